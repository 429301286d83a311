//! Formulas over named numbers: `layers * (12 * hidden^2 + 13 * hidden)`.
//!
//! The arithmetic is that of the crate `exmex`: `+ - * / ^`, brackets, `min(a, b)`, `max(a, b)`, `floor`, `ceil`,
//! `sqrt`, `log2` and the like, in 64-bit floating point. A name may stand for a formula over further names.
#![forbid(unsafe_code)]

use exmex::{Express, FlatEx};
use std::collections::{BTreeMap, HashMap};
use strata::error::{Error, Result};

/// Numbers beyond this lose whole elements in floating point.
const LARGEST: f64 = (1u64 << 53) as f64;
/// The most bytes of a formula: the crate's time grows with their square.
const MOST_BYTES: usize = 2048;
/// How deep brackets may be nested, which the crate reads by recursion.
const MOST_BRACKETS: usize = 64;
/// How long a chain of names may be of which each needs the next.
const MOST_ABOVE: usize = 64;

/// A formula and the line that it stands in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formula {
    /// What was written.
    pub text: String,
    /// The line of the file, from 1; 0: it was given with `--set`.
    pub line: usize,
}

impl Formula {
    /// An error about this formula.
    pub fn error(&self, what: &str) -> Error {
        let place = if self.line == 0 { "--set".to_string() } else { format!("line {}", self.line) };
        // A formula that is too long to be computed is too long to be shown.
        let shown: String = self.text.chars().take(MOST_BYTES).collect();
        Error::InvalidArgument(format!("{place}: `{shown}` {what}"))
    }

    /// What the crate makes of it: tens of kilobytes, which must not stay on the stack while other formulas are computed.
    fn parsed(&self) -> Result<FlatEx<f64>> {
        let not_one = |error: exmex::ExError| self.error(&format!("is not a formula: {}", error.msg()));
        FlatEx::parse(&spelt_out(&self.text)).map_err(not_one)
    }

    /// The names in it.
    #[inline(never)]
    fn names(&self) -> Result<Vec<String>> {
        self.check()?;
        Ok(self.parsed()?.var_names().to_vec())
    }

    /// What it comes to with these values of its names.
    #[inline(never)]
    fn with(&self, values: &[f64]) -> Result<f64> {
        self.parsed()?.eval(values).map_err(|error| self.error(&format!("has no value: {}", error.msg())))
    }

    /// Whether it is small enough to be computed.
    fn check(&self) -> Result<()> {
        if self.text.len() > MOST_BYTES {
            return Err(self.error(&format!("has {} bytes; a formula has at most {MOST_BYTES}", self.text.len())));
        }
        let mut open = 0usize;
        for byte in self.text.bytes() {
            match byte {
                b'(' => open += 1,
                b')' => open = open.saturating_sub(1),
                _ => {}
            }
            if open > MOST_BRACKETS {
                return Err(self.error(&format!("has more than {MOST_BRACKETS} brackets inside each other")));
            }
        }
        Ok(())
    }
}

/// Names and what they stand for.
#[derive(Debug, Default)]
pub struct Names {
    formulas: BTreeMap<String, Formula>,
    values: BTreeMap<String, f64>,
    /// What formulas have given: those of a step that is repeated are computed once.
    computed: HashMap<String, f64>,
}

impl Names {
    /// Gives a name its number.
    pub fn set(&mut self, name: &str, value: f64) {
        self.values.insert(name.to_string(), value);
        self.computed.clear();
    }

    /// Says what a name stands for.
    pub fn define(&mut self, name: &str, formula: &Formula) {
        self.formulas.insert(name.to_string(), formula.clone());
        self.computed.clear();
    }

    /// What a name stands for, if it stands for a formula.
    pub fn formula(&self, name: &str) -> Option<Formula> {
        self.formulas.get(name).cloned()
    }

    /// All names, for messages.
    pub fn list(&self) -> Vec<&str> {
        let mut all: Vec<&str> = self.values.keys().chain(self.formulas.keys()).map(String::as_str).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The number that a formula gives: finite, not negative, at most 2^53.
    pub fn value(&mut self, formula: &Formula) -> Result<f64> {
        if let Some(&value) = self.computed.get(&formula.text) {
            return Ok(value);
        }
        let value = self.within(formula, &mut Vec::new())?;
        self.computed.insert(formula.text.clone(), value);
        Ok(value)
    }

    /// The same, rounded up to a whole number.
    pub fn whole(&mut self, formula: &Formula) -> Result<u64> {
        // A quotient such as 25557032 / 3 * 3 may miss the whole number by a bit.
        self.value(formula).map(|value| (value - 1e-6).ceil().max(0.0) as u64)
    }

    /// `above`: the names whose formulas are being computed.
    fn within(&mut self, formula: &Formula, above: &mut Vec<String>) -> Result<f64> {
        let names = formula.names()?;
        let values = names.iter().map(|name| self.named(name, formula, above)).collect::<Result<Vec<f64>>>()?;
        let value = formula.with(&values)?;
        match value {
            value if (0.0..=LARGEST).contains(&value) => Ok(value),
            value => Err(formula.error(&format!("is {value}, which is no size or number of anything"))),
        }
    }

    fn named(&mut self, name: &str, user: &Formula, above: &mut Vec<String>) -> Result<f64> {
        if let Some(&value) = self.values.get(name) {
            return Ok(value);
        }
        if above.iter().any(|known| known == name) {
            return Err(user.error(&format!("needs `{name}`, which needs itself: {}", above.join(", "))));
        }
        let Some(formula) = self.formulas.get(name).cloned() else {
            return Err(user.error(&unknown(name, &self.list())));
        };
        if above.len() == MOST_ABOVE {
            return Err(
                user.error(&format!("is the end of a chain of more than {MOST_ABOVE} names that need each other"))
            );
        }
        above.push(name.to_string());
        let value = self.within(&formula, above)?;
        above.pop();
        self.values.insert(name.to_string(), value);
        Ok(value)
    }
}

/// The formula with names in braces, so that one may begin as a function does (`minibatch`), and numbers without exponents,
/// which the crate does not read.
fn spelt_out(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let in_word = |c: char| c.is_alphanumeric() || c == '_';
        let end = |part: &str, inside: &dyn Fn(char) -> bool| part.find(|c| !inside(c)).unwrap_or(part.len());
        let len = match first {
            '0'..='9' | '.' => {
                let len = end(rest, &|c| c.is_ascii_digit() || c == '.');
                let exponent = rest[len..].strip_prefix(['e', 'E']).map(|tail| {
                    let sign = usize::from(tail.starts_with(['+', '-']));
                    sign + end(&tail[sign..], &|c| c.is_ascii_digit())
                });
                len + exponent.map_or(0, |digits| 1 + digits)
            }
            first if in_word(first) => end(rest, &in_word),
            first => first.len_utf8(),
        };
        let (token, tail) = rest.split_at(len);
        match token.parse::<f64>() {
            Ok(number) if first.is_ascii_digit() || first == '.' => out += &number.to_string(),
            _ if in_word(first) && !first.is_ascii_digit() && !tail.trim_start().starts_with('(') => {
                out.extend(["{", token, "}"]);
            }
            _ => out += token,
        }
        rest = tail;
    }
    out
}

/// `uses the unknown name ...`, with the nearest of those that there are.
pub fn unknown(name: &str, known: &[&str]) -> String {
    let near = known.iter().max_by(|a, b| {
        let likeness = |other: &str| strsim::jaro_winkler(name, other);
        likeness(a).total_cmp(&likeness(b))
    });
    match near.filter(|near| strsim::jaro_winkler(name, near) > 0.75) {
        Some(near) => format!("uses the unknown name `{name}`; did you mean `{near}`?"),
        None => format!("uses the unknown name `{name}`; there are: {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formula(text: &str) -> Formula {
        Formula { text: text.to_string(), line: 7 }
    }

    fn value(text: &str) -> Result<f64> {
        let mut names = Names::default();
        names.set("hidden", 4.0);
        names.set("world", 8.0);
        // Names that begin as functions of the crate do.
        names.set("experts", 16.0);
        names.set("minibatch", 2.0);
        names.define("layer", &formula("12 * hidden^2 + 13 * hidden"));
        names.define("a", &formula("b + 1"));
        names.define("b", &formula("a + 1"));
        names.value(&formula(text))
    }

    #[test]
    fn formulas_are_computed_over_names_that_stand_for_formulas() {
        assert_eq!(value("layer"), Ok(12.0 * 16.0 + 13.0 * 4.0));
        assert_eq!(value("2 * layer / (world - 4)"), Ok(122.0));
        assert_eq!(value("experts * minibatch + ceil(hidden / 3)"), Ok(34.0));
        assert_eq!(value("max(hidden, world) + min(1, 2)"), Ok(9.0));
        assert_eq!(value("25 * 2^20"), Ok(25.0 * 1048576.0));
        assert_eq!(value("4.5e3 * 2E-1 + 1e1"), Ok(910.0));
    }

    #[test]
    fn whole_numbers_are_rounded_up_but_not_by_rounding_errors() {
        let mut names = Names::default();
        assert_eq!(names.whole(&formula("10 / 3")), Ok(4));
        assert_eq!(names.whole(&formula("(1 - 0.9) * 10")), Ok(1));
        assert_eq!(names.whole(&formula("0")), Ok(0));
    }

    #[test]
    fn what_would_take_too_long_or_too_deep_is_refused_with_its_bound() {
        // A formula of 200,000 terms took 40 s; a chain of 3,000 names, or as many brackets, overflowed the stack.
        for (text, part) in [
            (vec!["1"; 200_000].join("+"), "has 399999 bytes; a formula has at most 2048"),
            (format!("{}1{}", "(".repeat(65), ")".repeat(65)), "more than 64 brackets inside each other"),
            (format!("{}1", "-".repeat(3000)), "has 3001 bytes"),
        ] {
            let error = value(&text).unwrap_err();
            assert!(error.text().contains(part) && error.text().len() < 2200, "{error}");
        }
        assert_eq!(value(&format!("{}2{}", "(".repeat(64), ")".repeat(64))), Ok(2.0));
        assert_eq!(value(&vec!["1"; 1024].join("+")), Ok(1024.0));
        assert_eq!(value(&format!("{}1", "-".repeat(2000))), Ok(1.0));
        let chain = |links: usize| {
            let mut names = Names::default();
            names.set("n0", 1.0);
            (1..=links).for_each(|link| names.define(&format!("n{link}"), &formula(&format!("n{} + 1", link - 1))));
            names.value(&formula(&format!("n{links}")))
        };
        assert_eq!(chain(64), Ok(65.0));
        assert!(chain(3000).unwrap_err().text().contains("a chain of more than 64 names"));
    }

    #[test]
    fn a_formula_is_computed_anew_when_a_name_has_changed() {
        let mut names = Names::default();
        names.set("n", 1.0);
        assert_eq!(names.value(&formula("n + 1")), Ok(2.0));
        names.set("n", 2.0);
        assert_eq!(names.value(&formula("n + 1")), Ok(3.0));
    }

    #[test]
    fn what_cannot_be_computed_is_told_with_its_line() {
        for (text, expected) in [
            ("hiden * 2", "line 7: `hiden * 2` uses the unknown name `hiden`; did you mean `hidden`?"),
            ("3 - hidden", "line 7: `3 - hidden` is -1, which is no size or number of anything"),
            ("1 / (hidden - 4)", "line 7: `1 / (hidden - 4)` is inf, which is no size or number of anything"),
            ("10^20", "line 7: `10^20` is 100000000000000000000, which is no size or number of anything"),
        ] {
            assert_eq!(value(text).unwrap_err().text(), expected);
        }
        for (text, part) in [
            ("12 * ", "line 7: `12 *"),
            ("(1", "is not a formula"),
            ("1.2.3", "is not a formula"),
            ("hidden layer", "is not a formula"),
            ("2 ü", "`2 ü`"),
            ("", "is not a formula"),
            ("a", "`a + 1` needs `a`, which needs itself: a, b"),
            ("zzz", "there are: a, b, experts, hidden, layer"),
        ] {
            let error = value(text).unwrap_err();
            assert!(error.text().contains(part), "{text}: {error}");
        }
    }
}
