//! A workload made concrete for a world: every call with its group and size, every wait with what it waits for.
//!
//! Replaying and simulating both go through [`Program::ops`], so they cannot disagree about what a step is.
#![forbid(unsafe_code)]

use super::super::collective::{Kind, Place};
use super::file::{BlockSizes, CallStep, Step, Workload, WORLD};
use super::formula::{unknown, Formula, Names};
use super::groups::{Group, Layout};
use std::collections::{BTreeMap, VecDeque};
use strata::dtype::DataType;
use strata::error::{Error, Result};
use strata::sim::skew::Skew;

/// More operations than a step can be meant to have.
const MOST_OPS: usize = 4_000_000;
/// The most steps that are gone through, with those that come to no operation.
const MOST_TURNS: usize = 3 * MOST_OPS;

/// What a workload is made concrete with.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Ranks in all.
    pub world: usize,
    /// Floating-point operations a second of a rank.
    pub flops: f64,
    /// What sizes and computing are multiplied with.
    pub scale: f64,
    /// Whether there is computing at all.
    pub compute: bool,
    /// Parameters and dimensions that are set otherwise than in the file.
    pub set: Vec<(String, String)>,
    /// How blocks differ in size, of the calls of which the file says it; `None`: as the file says.
    pub sizes: Option<BlockSizes>,
}

/// A collective of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Which.
    pub kind: Kind,
    /// The group, as an index of [`Program::groups`].
    pub group: usize,
    /// Elements given to the call: a block, where the larger buffer has one for each rank; the average one of skewed blocks.
    pub count: usize,
    /// Their type.
    pub dtype: DataType,
    /// How its blocks differ in size.
    pub skew: Option<Skew>,
    /// The line of the table that it counts for.
    pub row: usize,
}

impl Call {
    /// The elements of each rank's block, where they differ. Of an all-to-all each rank sends such blocks.
    pub fn sizes(&self, nranks: usize) -> Option<Vec<usize>> {
        self.skew.map(|skew| skew.sizes(nranks, self.count.saturating_mul(nranks)))
    }

    /// Elements of a rank's send and receive buffers.
    pub fn elements(&self, place: Place) -> (usize, usize) {
        let Place { rank, nranks, .. } = place;
        let (send, recv) = self.kind.blocks(place);
        let (send, recv) = (send.saturating_mul(self.count), recv.saturating_mul(self.count));
        match (self.sizes(nranks), self.kind) {
            (Some(sizes), Kind::AllGather) => (sizes[rank], recv),
            (Some(sizes), Kind::ReduceScatter) => (send, sizes[rank]),
            (Some(sizes), Kind::AllToAll) => (send, sizes[rank].saturating_mul(nranks)),
            _ => (send, recv),
        }
    }
}

/// One thing that a rank does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// Starts a call of [`Program::calls`].
    Issue(usize),
    /// Waits for it.
    Wait(usize),
    /// Waits until so many leading bytes of its result are final.
    WaitUntil(usize, usize),
    /// Computes, for a phase, so many microseconds.
    Compute(usize, f64),
}

/// The calls of a phase that are of one kind and group, and of blocks that differ alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The phase, as an index of [`Program::phases`].
    pub phase: usize,
    /// The collective.
    pub kind: Kind,
    /// The group, as an index of [`Program::groups`].
    pub group: usize,
    /// How blocks differ in size.
    pub skew: Option<Skew>,
    /// How many.
    pub calls: usize,
    /// Bytes of the larger buffer, all calls together.
    pub bytes: u64,
}

impl Row {
    /// What is called, in a word: `alltoall`, `alltoall(zipf)`.
    pub fn label(&self) -> String {
        label(self.kind, self.skew)
    }
}

/// A kind of call and the skew of its blocks, in a word.
pub fn label(kind: Kind, skew: Option<Skew>) -> String {
    skew.map_or(kind.name().to_string(), |skew| format!("{}({})", kind.name(), skew.name()))
}

/// One step of a workload in a world.
#[derive(Debug)]
pub struct Program {
    /// The groups that calls are made in.
    pub groups: Vec<Group>,
    /// The names of the phases.
    pub phases: Vec<String>,
    /// The collectives, in the order in which they are issued.
    pub calls: Vec<Call>,
    /// What a rank does, in order.
    pub ops: Vec<Op>,
    /// The calls by phase, kind and group.
    pub rows: Vec<Row>,
    /// The ranks' grid.
    pub layout: Layout,
    /// By which part the last rank computes longer than this one, on a timeline.
    pub late: f64,
}

impl Program {
    /// The step of a workload in a world of `setting.world` ranks.
    pub fn new(workload: &Workload, setting: &Setting) -> Result<Program> {
        let mut names = names(workload, setting)?;
        let layout = Layout::new(&workload.grid, setting.world, &mut names)?;
        let phases = workload.phases.iter().map(|phase| phase.name.clone()).collect();
        let (groups, calls, ops, rows) = Default::default();
        let program = Program { groups, phases, calls, ops, rows, layout, late: 0.0 };
        let mut builder = Builder { program, names, setting, phase: 0, turns: 0, open: BTreeMap::new() };
        for (phase, text) in workload.phases.iter().enumerate() {
            builder.phase = phase;
            builder.steps(&text.steps)?;
        }
        if setting.sizes.is_some() && !workload.says_sizes() {
            let text = "--skew: no call of this workload says how its blocks differ in size (skew = \"even\")";
            return Err(Error::InvalidArgument(text.to_string()));
        }
        if let Some((name, (line, _))) = builder.open.iter().find(|(_, (_, calls))| !calls.is_empty()) {
            return Err(Error::InvalidArgument(format!("line {line}: nothing waits for all calls named `{name}`")));
        }
        Ok(builder.program)
    }

    /// Bytes of the larger buffer, over all calls.
    pub fn bytes(&self) -> u64 {
        self.rows.iter().map(|row| row.bytes).sum()
    }

    /// Microseconds of computing.
    pub fn compute_us(&self) -> f64 {
        self.ops.iter().map(|op| if let Op::Compute(_, us) = op { *us } else { 0.0 }).sum()
    }

    /// Bytes of the larger buffer of a call.
    pub fn bytes_of(&self, call: &Call) -> usize {
        call.kind.total_bytes(call.count, call.dtype.size(), self.groups[call.group].size)
    }
}

/// The parameters, the world and what was set otherwise.
fn names(workload: &Workload, setting: &Setting) -> Result<Names> {
    let mut names = Names::default();
    names.set(WORLD, setting.world as f64);
    for (name, parameter) in &workload.parameters {
        names.define(name, &parameter.formula);
    }
    let dimensions = workload.grid.iter().map(|dimension| dimension.name.as_str());
    let known: Vec<&str> = workload.parameters.keys().map(String::as_str).chain(dimensions).collect();
    for (name, text) in &setting.set {
        if !known.contains(&name.as_str()) {
            return Err(Error::InvalidArgument(format!("--set {name}={text} {}", unknown(name, &known))));
        }
        names.define(name, &Formula { text: text.clone(), line: 0 });
    }
    Ok(names)
}

struct Builder<'a> {
    program: Program,
    names: Names,
    setting: &'a Setting,
    phase: usize,
    turns: usize,
    // By name: the line of the last one, and the calls that nobody has waited for; `None`: in a group of one rank.
    open: BTreeMap<String, (usize, VecDeque<Option<usize>>)>,
}

impl Builder<'_> {
    fn steps(&mut self, steps: &[Step]) -> Result<()> {
        for step in steps {
            self.turn()?;
            match step {
                Step::Repeat(times, steps) => {
                    for _ in 0..self.names.whole(times)? {
                        self.turn()?;
                        self.steps(steps)?;
                    }
                }
                Step::Call(call) => self.call(call)?,
                Step::Flops(formula) => {
                    let us = self.names.value(formula)? / self.setting.flops * 1e6;
                    self.compute(us);
                }
                Step::Micros(formula) => {
                    let us = self.names.value(formula)?;
                    self.compute(us);
                }
                Step::Wait(name, all, line) => self.wait(name, *all, *line)?,
                Step::WaitUntil(name, elements, line) => self.wait_until(name, elements, *line)?,
            }
            if self.program.ops.len() > MOST_OPS {
                return Err(Error::InvalidArgument(format!("a step has more than {MOST_OPS} operations")));
            }
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<()> {
        self.turns += 1;
        match self.turns {
            0..=MOST_TURNS => Ok(()),
            _ => Err(Error::InvalidArgument(format!("a step goes through more than {MOST_TURNS} lines and repeats"))),
        }
    }

    fn compute(&mut self, us: f64) {
        if self.setting.compute && us > 0.0 {
            self.program.ops.push(Op::Compute(self.phase, us * self.setting.scale));
        }
    }

    fn call(&mut self, step: &CallStep) -> Result<()> {
        let elems = self.names.whole(&step.count)?;
        let group = self.program.layout.group(&step.group).map_err(|text| at(step.line, &text))?;
        let index = match group.size > 1 && elems > 0 {
            true => Some(self.issue(step, group, elems)),
            false => None,
        };
        match &step.overlap {
            Some(name) => {
                let (line, calls) = self.open.entry(name.clone()).or_default();
                *line = step.line;
                calls.push_back(index);
            }
            None => self.program.ops.extend(index.map(Op::Wait)),
        }
        Ok(())
    }

    fn issue(&mut self, step: &CallStep, group: Group, elems: u64) -> usize {
        let program = &mut self.program;
        let elems = (elems as f64 * self.setting.scale).ceil().max(1.0) as usize;
        let nranks = group.size;
        let count = if step.kind.is_split() { elems.div_ceil(nranks) } else { elems };
        let group = program.groups.iter().position(|known| *known == group).unwrap_or_else(|| {
            program.groups.push(group);
            program.groups.len() - 1
        });
        let (phase, kind) = (self.phase, step.kind);
        let skew = step.sizes.and_then(|stated| self.setting.sizes.unwrap_or(stated).skew());
        let same = |row: &Row| (row.phase, row.kind, row.group, row.skew) == (phase, kind, group, skew);
        let row = program.rows.iter().position(same).unwrap_or_else(|| {
            program.rows.push(Row { phase, kind, group, skew, calls: 0, bytes: 0 });
            program.rows.len() - 1
        });
        program.rows[row].calls += 1;
        program.rows[row].bytes += kind.total_bytes(count, step.dtype.size(), nranks) as u64;
        program.calls.push(Call { kind, group, count, dtype: step.dtype, skew, row });
        let index = program.calls.len() - 1;
        program.ops.push(Op::Issue(index));
        index
    }

    /// The calls of a name, of which there is one at least.
    fn open(&mut self, name: &str, line: usize) -> Result<&mut VecDeque<Option<usize>>> {
        if !self.open.contains_key(name) {
            let known: Vec<&str> = self.open.keys().map(String::as_str).collect();
            return Err(at(line, &format!("the wait {}", unknown(name, &known))));
        }
        let open = self.open.get_mut(name).map(|(_, open)| open).filter(|open| !open.is_empty());
        open.ok_or_else(|| at(line, &format!("no call named `{name}` is under way here")))
    }

    fn wait_until(&mut self, name: &str, elements: &Formula, line: usize) -> Result<()> {
        let elems = self.names.whole(elements)?;
        let Some(index) = self.open(name, line)?[0] else { return Ok(()) };
        let program = &mut self.program;
        let call = &program.calls[index];
        if let (Some(skew), Kind::ReduceScatter | Kind::AllToAll) = (call.skew, call.kind) {
            let text =
                format!("until is for results of one size on all ranks, and {} gives", label(call.kind, Some(skew)));
            return Err(at(line, &format!("{text} each rank another")));
        }
        let bytes = (elems as f64 * self.setting.scale).ceil() as usize * call.dtype.size();
        let most = match call.kind {
            Kind::ReduceScatter => call.count * call.dtype.size(),
            _ => program.bytes_of(call),
        };
        if bytes > most {
            return Err(at(line, &format!("until {elems} elements, of a result of {}", most / call.dtype.size())));
        }
        program.ops.push(Op::WaitUntil(index, bytes));
        Ok(())
    }

    fn wait(&mut self, name: &str, all: bool, line: usize) -> Result<()> {
        let open = self.open(name, line)?;
        let waited = if all { open.len() } else { 1 };
        let waited: Vec<Option<usize>> = open.drain(..waited).collect();
        self.program.ops.extend(waited.into_iter().flatten().map(Op::Wait));
        Ok(())
    }
}

fn at(line: usize, what: &str) -> Error {
    Error::InvalidArgument(format!("line {line}: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(steps: &str) -> Workload {
        let head = "title = \"t\"\nsource = []\ndtype = \"half\"\n\
             grid = [{ name = \"t\", size = \"width\" }, { name = \"d\", size = \"rest\" }]\n\
             [parameters]\nwidth = { value = 2 }\n[[phase]]\nname = \"p\"\nsteps = [\n";
        Workload::parse(&format!("{head}{steps}\n]")).unwrap()
    }

    fn setting(world: usize) -> Setting {
        Setting { world, flops: 1e9, scale: 1.0, compute: true, set: Vec::new(), sizes: None }
    }

    fn ops(steps: &str) -> Result<Vec<Op>> {
        Program::new(&workload(steps), &setting(8)).map(|program| program.ops)
    }

    #[test]
    fn waits_take_the_oldest_call_of_their_name() {
        let call =
            |name: &str| format!("{{ call = \"all_gather\", group = \"d\", count = 9, overlap = \"{name}\" }},\n");
        let steps = [&call("a"), &call("b"), &call("a"), "{ wait = \"a\" },", "{ wait_all = \"a\" }, { wait = \"b\" }"];
        use Op::{Issue, Wait};
        assert_eq!(ops(&steps.concat()).unwrap(), [Issue(0), Issue(1), Issue(2), Wait(0), Wait(2), Wait(1)]);
    }

    #[test]
    fn calls_without_a_name_are_waited_for_and_steps_are_repeated() {
        let steps =
            "{ repeat = \"width\", steps = [{ flops = 2000 }, { call = \"broadcast\", group = \"t\", count = 1 }] }";
        use Op::{Compute, Issue, Wait};
        assert_eq!(ops(steps).unwrap(), [Compute(0, 2.0), Issue(0), Wait(0), Compute(0, 2.0), Issue(1), Wait(1)]);
    }

    #[test]
    fn waits_that_do_not_match_calls_are_refused() {
        let call = "{ call = \"all_reduce\", group = \"world\", count = 1, overlap = \"grads\" },\n";
        for (steps, expected) in [
            (call.to_string(), "line 10: nothing waits for all calls named `grads`"),
            (format!("{call}{{ wait = \"grad\" }}"), "line 11: the wait uses the unknown name `grad`; did you mean"),
            (
                format!("{call}{{ wait = \"grads\" }},\n{{ wait = \"grads\" }}"),
                "line 12: no call named `grads` is under",
            ),
        ] {
            let error = ops(&steps).unwrap_err();
            assert!(error.text().contains(expected), "{error}");
        }
    }

    #[test]
    fn a_wait_goes_as_far_as_the_result_of_its_call() {
        let steps = |kind: &str, until: usize| {
            format!(
                "{{ call = \"{kind}\", group = \"d\", count = 8, overlap = \"a\" }},\n\
                 {{ wait = \"a\", until = {until} }}, {{ wait = \"a\" }}"
            )
        };
        // Of two bytes each; four ranks are in the group.
        for (kind, most) in [("all_reduce", 8), ("all_gather", 8), ("reduce_scatter", 2)] {
            assert_eq!(ops(&steps(kind, most)).unwrap()[1], Op::WaitUntil(0, 2 * most), "{kind}");
            let error = ops(&steps(kind, most + 1)).unwrap_err();
            assert!(error.text().contains(&format!("elements, of a result of {most}")), "{error}");
        }
    }

    #[test]
    fn repeats_that_come_to_nothing_have_a_bound_too() {
        for body in ["", "{ flops = 0 }"] {
            let error = ops(&format!("{{ repeat = 1e15, steps = [{body}] }}")).unwrap_err();
            assert!(error.text().contains("more than 12000000 lines and repeats"), "{error}");
        }
        let error = ops("{ repeat = 1e15, steps = [{ us = 1 }] }").unwrap_err();
        assert!(error.text().contains("more than 4000000 operations"), "{error}");
    }

    #[test]
    fn sizes_count_the_larger_buffer_in_whole_blocks() {
        let steps = "{ call = \"all_gather\", group = \"d\", count = 10 }, { call = \"all_reduce\", group = \"d\", count = 10 }";
        let program = Program::new(&workload(steps), &setting(8)).unwrap();
        assert_eq!(program.calls.iter().map(|call| call.count).collect::<Vec<_>>(), [3, 10]);
        assert_eq!(program.rows.iter().map(|row| row.bytes).collect::<Vec<_>>(), [24, 20], "4 blocks of 3, padded");
        let scaled = Setting { scale: 0.5, ..setting(8) };
        assert_eq!(Program::new(&workload(steps), &scaled).unwrap().calls[1].count, 5);
    }

    #[test]
    fn skewed_blocks_have_the_bytes_of_even_ones_and_rows_of_their_own() {
        let call = |kind: &str, skew: &str| format!("{{ call = \"{kind}\", group = \"d\", count = 44{skew} }},\n");
        let [plain, even, zipf] = ["", ", skew = \"even\"", ", skew = \"zipf\""];
        let steps = [call("alltoall", plain), call("alltoall", even), call("alltoall", zipf), call("all_gather", zipf)];
        let made = |sizes| {
            let setting = Setting { sizes, ..setting(8) };
            let program = Program::new(&workload(&steps.concat()), &setting).unwrap();
            let label = |row: &Row| format!("{} {} {}", row.label(), row.calls, row.bytes);
            (program.rows.iter().map(label).collect::<Vec<_>>(), program)
        };
        let (rows, program) = made(None);
        assert_eq!(rows, ["alltoall 2 176", "alltoall(zipf) 1 88", "all_gather(zipf) 1 88"]);
        let zipf = program.calls[2];
        assert_eq!(zipf.sizes(4), Some(vec![21, 11, 7, 5]), "1, 1/2, 1/3, 1/4");
        let place = |rank| Place { rank, nranks: 4, root: 0 };
        assert_eq!([0, 3].map(|rank| zipf.elements(place(rank))), [(44, 84), (44, 20)]);
        assert_eq!([0, 3].map(|rank| program.calls[3].elements(place(rank))), [(21, 44), (5, 44)]);
        assert_eq!(program.calls[0].elements(place(3)), (44, 44));
        // Another skew is for the calls that say theirs, of whatever kind.
        let (rows, _) = made(Some(BlockSizes::Skewed(Skew::One)));
        assert_eq!(rows, ["alltoall 1 88", "alltoall(one) 2 176", "all_gather(one) 1 88"]);
        assert_eq!(made(Some(BlockSizes::Even)).0, ["alltoall 3 264", "all_gather 1 88"]);
        let setting = Setting { sizes: Some(BlockSizes::Even), ..setting(8) };
        let error = Program::new(&workload(&call("alltoall", plain)), &setting).unwrap_err();
        assert!(error.text().starts_with("--skew: no call of this workload says"), "{error}");
    }

    #[test]
    fn a_wait_goes_no_way_into_results_of_different_sizes() {
        let steps = |kind: &str| {
            format!(
                "{{ call = \"{kind}\", group = \"d\", count = 8, skew = \"one\", overlap = \"a\" }},\n\
                 {{ wait = \"a\", until = 1 }}, {{ wait = \"a\" }}"
            )
        };
        assert_eq!(ops(&steps("all_gather")).unwrap()[1], Op::WaitUntil(0, 2));
        for kind in ["reduce_scatter", "alltoall"] {
            let error = ops(&steps(kind)).unwrap_err();
            let text = format!(
                "line 11: until is for results of one size on all ranks, and {kind}(one) gives each rank another"
            );
            assert_eq!(error.text(), text);
        }
    }

    #[test]
    fn groups_of_one_rank_make_no_calls() {
        let steps = "{ call = \"all_gather\", group = \"d\", count = 10, overlap = \"a\" }, { wait = \"a\" }";
        assert!(Program::new(&workload(steps), &setting(2)).unwrap().ops.is_empty());
    }

    #[test]
    fn parameters_can_be_set_otherwise_if_they_exist() {
        let steps = "{ call = \"all_reduce\", group = \"t\", count = \"width\" }";
        let with = |name: &str| Setting { set: vec![(name.into(), "4".into())], ..setting(8) };
        let program = Program::new(&workload(steps), &with("width")).unwrap();
        assert_eq!((program.calls[0].count, program.groups[0].size), (4, 4));
        let error = Program::new(&workload(steps), &with("widht")).unwrap_err();
        assert_eq!(error.text(), "--set widht=4 uses the unknown name `widht`; did you mean `width`?");
        assert!(Program::new(&workload(steps), &with("t")).is_ok(), "dimensions too");
    }
}
