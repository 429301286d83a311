//! Workload files: the communication of one training step, written down as TOML.
//!
//! Such a file states the dimensions of a model, each with its source, the process groups, and what one rank does in a
//! step. Sizes are formulas over the dimensions ([`super::formula`]), never bare numbers of bytes:
//!
//! ```toml
//! title = "a model, trained in such a way"
//! source = ["who described the sequence of calls, and where"]
//! assumptions = ["what no source says"]
//! dtype = "bfloat16"                          # of all calls that name no other
//!
//! grid = [                                    # innermost first: ranks 0 and 1 differ in the first dimension
//!     { name = "tensor", size = 2 },
//!     { name = "data", size = "rest" },       # at most one: what the world has left
//! ]
//!
//! [parameters]                                # names for formulas; `world` and the grid's dimensions are names, too
//! layers = { value = 40, source = "paper, table" }
//! hidden = { value = 5120, source = "paper, table" }
//! layer = { value = "12 * hidden^2", meaning = "parameters of a layer" }
//! tokens = { value = 2048, assumption = "one sequence a rank" }
//!
//! [[phase]]
//! name = "forward"
//! steps = [
//!     { call = "all_gather", group = "data", count = "layer", overlap = "weights" },
//!     { repeat = "layers", steps = [
//!         { wait = "weights" },
//!         { flops = "2 * tokens * layer" },
//!         { call = "all_reduce", group = "tensor", count = "tokens * hidden" },
//!     ] },
//! ]
//! ```
//!
//! A step is one of:
//! - `call`: a collective (`all_gather`, `reduce_scatter`, `all_reduce`, `alltoall`, `broadcast` from rank 0) of the
//!   group over one or several dimensions (`group = ["expert", "data"]`, or `"world"`). `count` is in elements and means
//!   the larger of a rank's two buffers: what an all-gather gives, what a reduce-scatter takes, all that a rank sends in
//!   an all-to-all. A quotient is rounded up, count 0 is no call, and neither is a call in a group of one rank. The
//!   program waits for it, unless `overlap` gives it a name. `skew` says how the blocks of an all-gather, a reduce-scatter or an
//!   all-to-all differ in size: `even`, or as `strata simulate --skew` has it (`zipf`, `one`, `zeros`); `count` is then that of
//!   the average block. `strata perf --skew` says it otherwise for all calls that say it, as a model does whose tokens are routed;
//! - `wait`: for the oldest call of that name nobody has waited for; `wait_all`: for all of them. A name that is issued
//!   one step ahead is a prefetch. Every call must be waited for before the step ends;
//! - `wait` with `until`: for so many leading elements of that call's result, by `strataStreamWaitRange`; 0 is no wait. The
//!   call goes on, and is waited for as others;
//! - `flops` or `us`: computing, by the given rate, or for so many microseconds;
//! - `repeat` and `steps`: these steps so many times.
//!
//! Calls of one group are carried out one after another, in the order in which they are issued; different groups do not
//! wait for each other.
#![forbid(unsafe_code)]

use super::super::collective::Kind;
use super::formula::{unknown, Formula};
use serde::{de, Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;
use strata::dtype::DataType;
use strata::error::{Error, Lines, Result};
use strata::sim::skew::Skew;
use toml::Spanned;

/// The word for the dimension that takes what the world has left.
const REST: &str = "rest";
/// The most bytes of a file: those that come with the command have less than a hundredth.
pub const MOST_BYTES: usize = 1 << 20;
/// The most bytes of a name.
const MOST_NAME_BYTES: usize = 128;
/// The most dimensions of a grid.
const MOST_DIMENSIONS: usize = 64;
/// The most parameters.
const MOST_PARAMETERS: usize = 1024;
/// The group of all ranks.
pub const WORLD: &str = "world";

/// A workload as its file states it.
#[derive(Debug)]
pub struct Workload {
    /// What it is, in a line.
    pub title: String,
    /// Where the sequence of calls is described.
    pub source: Vec<String>,
    /// What no source says.
    pub assumptions: Vec<String>,
    /// The dimensions that ranks are laid out in, innermost first.
    pub grid: Vec<Dimension>,
    /// The named formulas.
    pub parameters: BTreeMap<String, Parameter>,
    /// What a rank does, phase by phase.
    pub phases: Vec<Phase>,
}

/// A dimension of the grid.
#[derive(Debug)]
pub struct Dimension {
    /// Its name, which is a group's.
    pub name: String,
    /// How many ranks it has; `None`: what the world has left.
    pub size: Option<Formula>,
}

/// A named formula, with its origin.
#[derive(Debug)]
pub struct Parameter {
    /// What it is worth.
    pub formula: Formula,
    /// Who says so.
    pub source: Option<String>,
    /// Why it is taken to be so, where nobody says it.
    pub assumption: Option<String>,
}

/// A part of a training step, such as the forward pass.
#[derive(Debug)]
pub struct Phase {
    /// Its name in tables.
    pub name: String,
    /// What happens in it, in order.
    pub steps: Vec<Step>,
}

/// One line of a phase.
#[derive(Debug)]
pub enum Step {
    /// Steps that happen several times.
    Repeat(Formula, Vec<Step>),
    /// A collective.
    Call(CallStep),
    /// Computing that takes so many floating-point operations.
    Flops(Formula),
    /// Computing that takes so many microseconds.
    Micros(Formula),
    /// A wait for the oldest call of a name, or for all of them; the line.
    Wait(String, bool, usize),
    /// A wait for so many leading elements of the oldest call of a name; the line.
    WaitUntil(String, Formula, usize),
}

/// A collective of a group.
#[derive(Debug)]
pub struct CallStep {
    /// Which.
    pub kind: Kind,
    /// The dimensions whose ranks take part.
    pub group: Vec<String>,
    /// Elements of the larger buffer.
    pub count: Formula,
    /// Their type.
    pub dtype: DataType,
    /// How its blocks differ in size, where the file says it: then they may be otherwise in another run.
    pub sizes: Option<BlockSizes>,
    /// The name by which it is waited for; `None`: at once.
    pub overlap: Option<String>,
    /// The line of the file.
    pub line: usize,
}

/// How the blocks of a call differ in size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockSizes {
    /// Not at all.
    Even,
    /// As a skew has them.
    Skewed(Skew),
}

impl BlockSizes {
    /// Those of this name; else what is to be said of it, with the nearest name.
    pub fn named(name: &str) -> std::result::Result<BlockSizes, String> {
        const EVEN: &str = "even";
        match Skew::ALL.into_iter().find(|(known, _)| *known == name) {
            Some((_, skew)) => Ok(BlockSizes::Skewed(skew)),
            None if name == EVEN => Ok(BlockSizes::Even),
            None => Err(unknown(name, &[&[EVEN][..], &Skew::ALL.map(|(name, _)| name)].concat())),
        }
    }

    /// The skew, if there is one.
    pub fn skew(self) -> Option<Skew> {
        match self {
            BlockSizes::Even => None,
            BlockSizes::Skewed(skew) => Some(skew),
        }
    }
}

/// A number or a formula, as TOML has it.
struct Amount(String);

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Amount, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Amount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a formula in quotes")
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> std::result::Result<Amount, E> {
                Ok(Amount(value.to_string()))
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<Amount, E> {
                Ok(Amount(value.to_string()))
            }
            fn visit_str<E: de::Error>(self, value: &str) -> std::result::Result<Amount, E> {
                Ok(Amount(value.to_string()))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// One name or several.
struct NameList(Vec<String>);

impl<'de> Deserialize<'de> for NameList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<NameList, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = NameList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a dimension of the grid or a list of them")
            }
            fn visit_str<E: de::Error>(self, value: &str) -> std::result::Result<NameList, E> {
                Ok(NameList(vec![value.to_string()]))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<NameList, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = seq.next_element()? {
                    names.push(name);
                }
                Ok(NameList(names))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    title: String,
    source: Vec<String>,
    #[serde(default)]
    assumptions: Vec<String>,
    dtype: Spanned<String>,
    grid: Vec<DimensionText>,
    #[serde(default)]
    parameters: BTreeMap<String, ParameterText>,
    phase: Vec<PhaseText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DimensionText {
    name: Spanned<String>,
    size: Spanned<Amount>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParameterText {
    value: Spanned<Amount>,
    source: Option<String>,
    assumption: Option<String>,
    #[serde(default, rename = "meaning")]
    _meaning: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PhaseText {
    name: String,
    steps: Vec<Spanned<StepText>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepText {
    repeat: Option<Spanned<Amount>>,
    steps: Option<Vec<Spanned<StepText>>>,
    call: Option<String>,
    group: Option<NameList>,
    count: Option<Spanned<Amount>>,
    dtype: Option<Spanned<String>>,
    skew: Option<Spanned<String>>,
    overlap: Option<String>,
    wait: Option<String>,
    until: Option<Spanned<Amount>>,
    wait_all: Option<String>,
    flops: Option<Spanned<Amount>>,
    us: Option<Spanned<Amount>>,
}

/// Turns the text's places into lines.
struct Reader<'a> {
    lines: Lines<'a>,
    dtype: DataType,
}

impl Workload {
    /// Reads a file's text. An error says what is wrong and in which line.
    pub fn parse(text: &str) -> Result<Workload> {
        if text.len() > MOST_BYTES {
            return Err(Error::InvalidArgument(format!("it has more than {MOST_BYTES} bytes, the most of a workload")));
        }
        let lines = Lines::of(text);
        let file: FileText = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| lines.at(span.start));
            Error::InvalidArgument(format!("line {line}: {}", error.message()))
        })?;
        let mut reader = Reader { lines, dtype: DataType::F32 };
        reader.dtype = reader.dtype_named(&file.dtype)?;
        for (count, most, what) in
            [(file.grid.len(), MOST_DIMENSIONS, "dimensions"), (file.parameters.len(), MOST_PARAMETERS, "parameters")]
        {
            if count > most {
                return Err(Error::InvalidArgument(format!("{count} {what}; {most} are the most")));
            }
        }
        let grid = file.grid.iter().map(|dimension| reader.dimension(dimension)).collect::<Result<Vec<_>>>()?;
        if grid.iter().filter(|dimension| dimension.size.is_none()).count() > 1 {
            return wrong(reader.line(&file.grid[0].name), "only one dimension of the grid can have the rest");
        }
        let parameter = |(name, text): (String, ParameterText)| {
            let formula = reader.formula(&text.value);
            named(&name, formula.line)?;
            if name == WORLD || grid.iter().any(|dimension| dimension.name == name) {
                return wrong(formula.line, &format!("`{name}` is a dimension of the grid already"));
            }
            Ok((name, Parameter { formula, source: text.source, assumption: text.assumption }))
        };
        let parameters = file.parameters.into_iter().map(parameter).collect::<Result<_>>()?;
        let phase = |phase: PhaseText| Ok(Phase { steps: reader.steps(&phase.steps)?, name: phase.name });
        let phases = file.phase.into_iter().map(phase).collect::<Result<_>>()?;
        let (title, source, assumptions) = (file.title, file.source, file.assumptions);
        Ok(Workload { title, source, assumptions, grid, parameters, phases })
    }

    /// Whether any call says how its blocks differ in size.
    pub fn says_sizes(&self) -> bool {
        self.phases.iter().any(|phase| say_sizes(&phase.steps))
    }
}

/// Whether a call among the steps says how its blocks differ in size.
fn say_sizes(steps: &[Step]) -> bool {
    steps.iter().any(|step| match step {
        Step::Repeat(_, steps) => say_sizes(steps),
        Step::Call(call) => call.sizes.is_some(),
        _ => false,
    })
}

impl Reader<'_> {
    fn line<T>(&self, spanned: &Spanned<T>) -> usize {
        self.lines.at(spanned.span().start)
    }

    fn formula(&self, amount: &Spanned<Amount>) -> Formula {
        Formula { text: amount.get_ref().0.clone(), line: self.line(amount) }
    }

    fn dtype_named(&self, name: &Spanned<String>) -> Result<DataType> {
        let found = DataType::HOST.into_iter().find(|dtype| dtype.name() == name.get_ref());
        found.map_or_else(
            || {
                let all = DataType::HOST.map(DataType::name).join(", ");
                wrong(self.line(name), &format!("`{}` is not one of {all}", name.get_ref()))
            },
            Ok,
        )
    }

    fn dimension(&self, text: &DimensionText) -> Result<Dimension> {
        let name = text.name.get_ref().clone();
        named(&name, self.line(&text.name))?;
        if name == WORLD {
            return wrong(self.line(&text.name), "`world` is all ranks, not a dimension");
        }
        let size = Some(self.formula(&text.size)).filter(|formula| formula.text != REST);
        Ok(Dimension { name, size })
    }

    fn steps(&self, steps: &[Spanned<StepText>]) -> Result<Vec<Step>> {
        steps.iter().map(|step| self.step(step)).collect()
    }

    fn step(&self, spanned: &Spanned<StepText>) -> Result<Step> {
        let (step, line) = (spanned.get_ref(), self.line(spanned));
        let kinds = [
            step.call.is_some(),
            step.repeat.is_some(),
            step.wait.is_some(),
            step.wait_all.is_some(),
            step.flops.is_some(),
            step.us.is_some(),
        ];
        if kinds.iter().filter(|&&there| there).count() != 1 {
            return wrong(line, "a step has one of call, repeat, wait, wait_all, flops, us");
        }
        let of_calls = step.group.is_some() || step.count.is_some() || step.dtype.is_some() || step.overlap.is_some();
        if (of_calls || step.skew.is_some()) && step.call.is_none() {
            return wrong(line, "group, count, dtype, skew and overlap belong to a call");
        }
        if step.until.is_some() && step.wait.is_none() {
            return wrong(line, "until belongs to a wait");
        }
        if step.steps.is_some() != step.repeat.is_some() {
            return wrong(line, "repeat and steps belong together");
        }
        let groups = step.group.iter().flat_map(|group| &group.0);
        for name in [&step.overlap, &step.wait, &step.wait_all].into_iter().flatten().chain(groups) {
            named(name, line)?;
        }
        if let (Some(times), Some(steps)) = (&step.repeat, &step.steps) {
            return Ok(Step::Repeat(self.formula(times), self.steps(steps)?));
        }
        match (&step.wait, &step.wait_all, &step.flops, &step.us) {
            (Some(name), ..) => Ok(match &step.until {
                Some(elements) => Step::WaitUntil(name.clone(), self.formula(elements), line),
                None => Step::Wait(name.clone(), false, line),
            }),
            (_, Some(name), ..) => Ok(Step::Wait(name.clone(), true, line)),
            (_, _, Some(flops), _) => Ok(Step::Flops(self.formula(flops))),
            (_, _, _, Some(us)) => Ok(Step::Micros(self.formula(us))),
            _ => self.call(step, line),
        }
    }

    fn call(&self, step: &StepText, line: usize) -> Result<Step> {
        const KINDS: [Kind; 5] =
            [Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce, Kind::AllToAll, Kind::Broadcast];
        let name = step.call.as_deref().unwrap_or_default();
        let Some(kind) = name.parse().ok().filter(|kind| KINDS.contains(kind)) else {
            return wrong(line, &format!("`{name}` is not one of {}", KINDS.map(Kind::name).join(", ")));
        };
        let (Some(group), Some(count)) = (&step.group, &step.count) else {
            return wrong(line, "a call needs a group and a count");
        };
        let dtype = step.dtype.as_ref().map_or(Ok(self.dtype), |name| self.dtype_named(name))?;
        let sizes = step.skew.as_ref().map(|name| self.sizes(kind, name)).transpose()?;
        let (group, count) = (group.0.clone(), self.formula(count));
        Ok(Step::Call(CallStep { kind, group, count, dtype, sizes, overlap: step.overlap.clone(), line }))
    }

    fn sizes(&self, kind: Kind, name: &Spanned<String>) -> Result<BlockSizes> {
        let line = self.line(name);
        if !matches!(kind, Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll) {
            let kind = kind.name();
            return wrong(line, &format!("{kind} has no blocks to skew; all_gather, reduce_scatter and alltoall have"));
        }
        BlockSizes::named(name.get_ref()).or_else(|what| wrong(line, &format!("the skew {what}")))
    }
}

fn named(name: &str, line: usize) -> Result<()> {
    match name.len() {
        0..=MOST_NAME_BYTES => Ok(()),
        len => wrong(line, &format!("a name of {len} bytes; {MOST_NAME_BYTES} are the most")),
    }
}

fn wrong<T>(line: usize, what: &str) -> Result<T> {
    Err(Error::InvalidArgument(format!("line {line}: {what}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"title = "t"
source = ["s"]
dtype = "bfloat16"
grid = [
    { name = "tensor", size = 2 },
    { name = "data", size = "rest" },
]
[parameters]
layers = { value = 4, source = "s" }
hidden = { value = 1.5e3, assumption = "a" }
[[phase]]
name = "forward"
steps = [
    { call = "all_gather", group = "data", count = "hidden", overlap = "weights" },
    { repeat = "layers", steps = [
        { wait = "weights" },
        { flops = "2 * hidden" },
    ] },
]
"#;

    #[test]
    fn a_file_says_what_it_means() {
        let workload = Workload::parse(GOOD).unwrap();
        assert_eq!(workload.grid[0].size.as_ref().unwrap().text, "2");
        assert!(workload.grid[1].size.is_none());
        assert_eq!(workload.parameters["hidden"].formula, Formula { text: "1500".into(), line: 10 });
        let [Step::Call(call), Step::Repeat(times, steps)] = &workload.phases[0].steps[..] else { panic!("two steps") };
        assert_eq!((call.kind, call.dtype, call.line), (Kind::AllGather, DataType::BF16, 14));
        assert_eq!((times.line, steps.len()), (15, 2));
        assert!(matches!(&steps[0], Step::Wait(name, false, 16) if name == "weights"));
    }

    #[test]
    fn a_call_says_how_its_blocks_differ_or_nothing_of_it() {
        for (text, expected) in [
            ("", None),
            (", skew = \"even\"", Some(BlockSizes::Even)),
            (", skew = \"one\"", Some(BlockSizes::Skewed(Skew::One))),
        ] {
            let workload = Workload::parse(&GOOD.replace(", overlap", &format!("{text}, overlap"))).unwrap();
            let [Step::Call(call), ..] = &workload.phases[0].steps[..] else { panic!("a call") };
            assert_eq!(call.sizes, expected, "{text}");
        }
    }

    #[test]
    fn what_is_wrong_in_a_file_is_told_with_its_line() {
        for (from, to, expected) in [
            ("title = \"t\"", "title = ", "line 1: "),
            ("source = [\"s\"]\n", "", "missing field `source`"),
            ("\"bfloat16\"", "\"bfloat61\"", "line 3: `bfloat61` is not one of int8, uint8"),
            ("size = 2", "size = \"rest\"", "line 5: only one dimension of the grid can have the rest"),
            ("name = \"data\"", "name = \"world\"", "line 6: `world` is all ranks"),
            ("layers = {", "tensor = {", "line 9: `tensor` is a dimension of the grid already"),
            ("value = 1.5e3", "value = true", "line 10: "),
            ("value = 1.5e3", "valu = 1.5e3", "line 10: unknown field `valu`"),
            ("all_gather", "all_gatter", "line 14: `all_gatter` is not one of all_gather, reduce_scatter"),
            ("\"all_gather\"", "\"sendrecv\"", "line 14: `sendrecv` is not one of all_gather"),
            ("count = \"hidden\", ", "", "line 14: a call needs a group and a count"),
            ("{ wait = \"weights\" }", "{ wait = \"weights\", us = 1 }", "line 16: a step has one of call"),
            ("{ wait = \"weights\" }", "{ wait = \"weights\", count = 1 }", "line 16: group, count, dtype, skew and"),
            (
                "{ wait = \"weights\" }",
                "{ wait = \"weights\", skew = \"zipf\" }",
                "line 16: group, count, dtype, skew and",
            ),
            (
                ", overlap",
                ", skew = \"zipff\", overlap",
                "line 14: the skew uses the unknown name `zipff`; did you mean `zipf`?",
            ),
            (
                ", overlap",
                ", skew = \"half\", overlap",
                "line 14: the skew uses the unknown name `half`; there are: even, zipf, ",
            ),
            (", overlap", ", skew = 2, overlap", "line 14: invalid type"),
            (
                "call = \"all_gather\"",
                "call = \"broadcast\", skew = \"zipf\"",
                "line 14: broadcast has no blocks to skew; all_gather, reduce_scatter and alltoall have",
            ),
            ("{ flops", "{ steps = [], flops", "line 17: repeat and steps belong together"),
            ("{ flops", "{ flop", "line 17: unknown field `flop`"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let error = Workload::parse(&GOOD.replace(from, to)).unwrap_err();
            assert!(error.text().contains(expected), "{to}: {error}");
        }
    }

    #[test]
    fn what_is_too_long_or_too_much_is_refused_with_its_bound() {
        let told = |from: &str, to: &str| {
            assert!(GOOD.contains(from), "{from}");
            Workload::parse(&GOOD.replacen(from, to, 1)).unwrap_err().text().to_string()
        };
        let long = "x".repeat(129);
        for from in ["name = \"data\"", "overlap = \"weights\"", "wait = \"weights\"", "group = \"data\""] {
            let (key, _) = from.split_once(" =").unwrap();
            let text = told(from, &format!("{key} = \"{long}\""));
            assert!(text.contains("a name of 129 bytes; 128 are the most"), "{from}: {text}");
        }
        assert!(told("layers =", &format!("{long} =")).starts_with("line 9: a name of 129 bytes"));
        let many: String = (0..1023).map(|number| format!("p{number} = {{ value = 1 }}\n")).collect();
        assert_eq!(told("layers =", &format!("{many}layers =")), "1025 parameters; 1024 are the most");
        let many: String = (0..63).map(|number| format!("{{ name = \"g{number}\", size = 1 }},\n")).collect();
        assert_eq!(
            told("{ name = \"tensor\"", &format!("{many}{{ name = \"tensor\"")),
            "65 dimensions; 64 are the most"
        );
        let text = told("title = \"t\"", &format!("title = \"{}\"", "t".repeat(MOST_BYTES)));
        assert_eq!(text, "it has more than 1048576 bytes, the most of a workload");
    }
}
