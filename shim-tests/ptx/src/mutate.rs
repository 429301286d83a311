//! Mutants: a module's text with one instruction changed.

use crate::forms::Type;
use crate::module::Module;

/// Numbers that a seed decides: splitmix64.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// A changed text.
#[derive(Debug, Clone)]
pub struct Mutant {
    /// The kernel that is changed.
    pub kernel: String,
    /// The line, from 1.
    pub line: usize,
    /// What stood there.
    pub before: String,
    /// What stands there now; empty where the instruction is gone.
    pub after: String,
    /// The whole text.
    pub text: String,
}

/// What may take a word's place in an opcode.
const WORDS: [(&str, &str); 24] = [
    ("add", "sub"),
    ("sub", "add"),
    ("min", "max"),
    ("max", "min"),
    ("and", "or"),
    ("or", "and"),
    ("xor", "or"),
    ("shl", "shr"),
    ("shr", "shl"),
    ("lt", "le"),
    ("le", "lt"),
    ("gt", "ge"),
    ("ge", "gt"),
    ("eq", "ne"),
    ("ne", "eq"),
    ("ltu", "lt"),
    ("nan", "num"),
    ("mul", "add"),
    ("div", "mul"),
    ("u64", "s64"),
    ("u32", "s32"),
    ("s32", "u32"),
    ("s16", "u16"),
    ("u16", "s16"),
];

/// A mutant of a module that [`Module::parse`] takes.
pub fn mutant(text: &str, random: &mut Random) -> Mutant {
    let module = Module::parse(text).expect("the module is right before it is changed");
    let lines: Vec<&str> = text.lines().collect();
    loop {
        let kernel = &module.kernels[random.below(module.kernels.len())];
        let line = kernel.code[random.below(kernel.code.len())].line;
        let before = lines[line - 1].trim();
        let of_kernel: Vec<usize> = kernel.code.iter().map(|one| one.line).collect();
        let Some(after) = changed(before, &lines, &of_kernel, random) else { continue };
        if after == before {
            continue;
        }
        let mut whole = lines.clone();
        whole[line - 1] = &after;
        let changed = whole.join("\n") + "\n";
        if Module::parse(&changed).is_ok() {
            let kernel = kernel.name.clone();
            return Mutant { kernel, line, before: before.to_string(), after, text: changed };
        }
    }
}

/// An instruction's parts: its guard with a space behind it, its opcode, its operands.
struct Parts<'a> {
    guard: String,
    opcode: &'a str,
    operands: &'a str,
}

impl Parts<'_> {
    fn with(&self, opcode: &str, operands: &str) -> Option<String> {
        Some(format!("{}{opcode} {operands};", self.guard))
    }

    /// The guard the other way round.
    fn negated(&self) -> Option<String> {
        let (opcode, operands) = (self.opcode, self.operands);
        match self.guard.strip_prefix("@!") {
            Some(rest) => Some(format!("@{rest}{opcode} {operands};")),
            None => self.guard.strip_prefix('@').map(|rest| format!("@!{rest}{opcode} {operands};")),
        }
    }

    /// Another operation.
    fn with_word(&self, random: &mut Random) -> Option<String> {
        let mut parts: Vec<&str> = self.opcode.split('.').collect();
        let at = random.below(parts.len());
        if at > 0 && Type::of(parts[at]).is_some() && !minds_signs(&parts, at) {
            return None;
        }
        let others: Vec<&str> = WORDS.iter().filter(|(from, _)| *from == parts[at]).map(|(_, to)| *to).collect();
        parts[at] = others.get(random.below(others.len().max(1)))?;
        self.with(&parts.join("."), self.operands)
    }

    /// Another number.
    fn with_number(&self, random: &mut Random) -> Option<String> {
        let operands = self.operands;
        let words = operands.split(|c: char| ",[]{}+".contains(c));
        let numbers: Vec<&str> = words.filter(|word| word.parse::<i64>().is_ok()).collect();
        let number = *numbers.get(random.below(numbers.len().max(1)))?;
        let value: i64 = number.parse().ok()?;
        let other = match random.below(4) {
            0 => value.wrapping_add(1),
            1 => value.wrapping_sub(1),
            2 => value.wrapping_mul(2),
            _ => value ^ (1 << random.below(16)),
        };
        let at = operands.rfind(number)?;
        self.with(self.opcode, &format!("{}{other}{}", &operands[..at], &operands[at + number.len()..]))
    }

    /// Another register of the same kind, which the kernel names.
    fn with_register(&self, lines: &[&str], of_kernel: &[usize], random: &mut Random) -> Option<String> {
        let operands = self.operands;
        let class = |name: &str| name.trim_end_matches(|c: char| c.is_ascii_digit()).to_string();
        let found = registers(operands);
        let (at, name) = *found.get(random.below(found.len().max(1)))?;
        let elsewhere = lines[of_kernel[random.below(of_kernel.len())] - 1];
        let others = registers(elsewhere).into_iter().map(|(_, other)| other);
        let same: Vec<&str> = others.filter(|other| class(other) == class(name)).collect();
        let other = same.get(random.below(same.len().max(1)))?;
        self.with(self.opcode, &format!("{}{other}{}", &operands[..at], &operands[at + name.len()..]))
    }

    /// A branch to another place.
    fn with_label(&self, lines: &[&str], of_kernel: &[usize], random: &mut Random) -> Option<String> {
        let labels: Vec<&str> = of_kernel.iter().filter_map(|line| lines[*line - 1].split("bra").nth(1)).collect();
        let other = labels[random.below(labels.len())];
        self.with(self.opcode, other.trim_start_matches(".uni").trim().trim_end_matches(';'))
    }

    /// Two sources exchanged.
    fn exchanged(&self) -> Option<String> {
        let commutes = ["add", "mul", "and", "or", "xor", "min", "max", "setp.eq", "setp.ne", "setp.nan"];
        let mut parts: Vec<&str> = self.operands.split(',').collect();
        let is_plain = !self.operands.contains(['[', '{']) && parts.len() > 2;
        if !is_plain || commutes.iter().any(|name| self.opcode.starts_with(name)) {
            return None;
        }
        parts.swap(1, 2);
        self.with(self.opcode, &parts.join(","))
    }
}

fn changed(before: &str, lines: &[&str], of_kernel: &[usize], random: &mut Random) -> Option<String> {
    let (guard, rest) = match before.strip_prefix('@') {
        Some(rest) => rest.split_once(' ').map(|(guard, rest)| (format!("@{guard} "), rest))?,
        None => (String::new(), before),
    };
    let (opcode, operands) = rest.trim_end_matches(';').split_once(' ').unwrap_or((rest.trim_end_matches(';'), ""));
    let parts = Parts { guard, opcode, operands };
    match random.below(6) {
        0 => Some(String::new()).filter(|_| opcode != "ret"),
        1 => parts.negated(),
        2 => parts.with_word(random),
        3 => parts.with_number(random),
        4 => parts.with_register(lines, of_kernel, random),
        _ if opcode.starts_with("bra") => parts.with_label(lines, of_kernel, random),
        _ => parts.exchanged(),
    }
}

/// Whether the sign of the type at this place of an opcode decides what it computes.
fn minds_signs(parts: &[&str], at: usize) -> bool {
    match parts[0] {
        "cvt" => {
            let widths: Vec<u32> = parts.iter().filter_map(|part| Type::of(part)).map(|ty| ty.bits).collect();
            at + 1 == parts.len() && widths[0] > widths[1]
        }
        "setp" => !["eq", "ne"].contains(&parts[1]),
        "mul" => parts[1] != "lo",
        op => ["min", "max", "shr", "div", "rem"].contains(&op),
    }
}

/// The registers in a text, with their places in it.
fn registers(text: &str) -> Vec<(usize, &str)> {
    let starts = text.match_indices('%').map(|(at, _)| at);
    let ended = starts.map(|at| {
        let length = text[at + 1..].find(|c: char| !c.is_ascii_alphanumeric()).map_or(text.len() - at, |end| end + 1);
        (at, &text[at..at + length])
    });
    ended.filter(|(_, name)| name.ends_with(|c: char| c.is_ascii_digit())).collect()
}
