//! Text to kernels. What is not known is an error with its line.

use crate::forms::{form, Apply, Kind, NanIn, Type};
use crate::tokens::{tokens, Token};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where the addresses of the parameters' space begin: nothing else has such addresses.
pub const PARAMS: u64 = 0x4000_0000_0000_0000;

type Result<T, E = String> = std::result::Result<T, E>;

/// The number of a register, or of a constant, which lies behind the registers.
pub type Place = u32;

/// What an instruction does.
#[derive(Debug, Clone)]
pub enum Op {
    /// `dst = f(srcs)`.
    Compute {
        /// The function.
        apply: Apply,
        /// Where the result goes.
        dst: Place,
        /// The sources; those that the function does not take are 0.
        srcs: [Place; 4],
        /// What the result is cut to.
        ty: Type,
        /// Where a NaN is the machine's.
        nan: NanIn,
    },
    /// Which thread of which block this is.
    Special(Place, Special),
    /// Two halves, the lower first, into one register.
    Pack(Place, [Place; 2], u32),
    /// One register into two halves.
    Unpack([Place; 2], Place, u32),
    /// Loads `dsts.len()` neighbours.
    Load {
        /// Whether from the parameters.
        of_params: bool,
        /// What is loaded.
        ty: Type,
        /// Where to, each with its register's type.
        dsts: Vec<(Place, Type)>,
        /// The address.
        at: Address,
        /// Whether others may write it meanwhile.
        volatile: bool,
    },
    /// Stores `srcs.len()` neighbours.
    Store {
        /// What is stored.
        ty: Type,
        /// What.
        srcs: Vec<Place>,
        /// The address.
        at: Address,
        /// Whether others may read it meanwhile.
        volatile: bool,
    },
    /// Goes on elsewhere.
    Branch(usize),
    /// Ends the thread.
    Return,
    /// Orders memory accesses before and after.
    Fence,
    /// Waits a little.
    Sleep,
}

/// A register or constant, and what is added to it.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    /// The register.
    pub base: Place,
    /// What is added.
    pub offset: i64,
}

/// A register that tells a thread where it is: which, and of which dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// The thread in its block.
    Tid(usize),
    /// Threads of a block.
    Ntid(usize),
    /// The block.
    Ctaid(usize),
    /// Blocks.
    Nctaid(usize),
}

/// An instruction with its guard, its line, and its text.
#[derive(Debug, Clone)]
pub struct Instruction {
    /// The predicate, and what it must be.
    pub guard: Option<(Place, bool)>,
    /// What it does.
    pub op: Op,
    /// The line in the text, from 1.
    pub line: usize,
}

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Where its parameters are, and how long they are.
    pub params: Vec<(usize, usize)>,
    /// Bytes of its parameters.
    pub param_bytes: usize,
    /// The most threads of a block.
    pub max_threads: u64,
    /// Its code.
    pub code: Vec<Instruction>,
    /// How many registers there are before the constants.
    pub registers: usize,
    /// The constants.
    pub constants: Vec<u64>,
    /// The text's lines, from the first.
    lines: Vec<String>,
    executed: Vec<AtomicBool>,
}

impl Kernel {
    /// The text of an instruction.
    pub fn text(&self, instruction: usize) -> &str {
        self.lines[self.code[instruction].line - 1].trim()
    }

    /// Notes that instructions were executed.
    pub fn executed(&self, which: &[bool]) {
        for (known, _) in self.executed.iter().zip(which).filter(|(_, now)| **now) {
            known.store(true, Ordering::Relaxed);
        }
    }

    /// Instructions that were never executed, by any launch.
    pub fn unexecuted(&self) -> Vec<usize> {
        (0..self.code.len()).filter(|at| !self.executed[*at].load(Ordering::Relaxed)).collect()
    }
}

/// A module: its kernels.
#[derive(Debug)]
pub struct Module {
    /// In the text's order.
    pub kernels: Vec<Kernel>,
}

impl Module {
    /// Reads a text.
    pub fn parse(text: &str) -> Result<Module> {
        let mut parser = Parser { tokens: tokens(text)?, at: 0 };
        let lines: Vec<String> = text.lines().map(str::to_string).collect();
        parser.head()?;
        let mut kernels: Vec<Kernel> = Vec::new();
        while parser.at < parser.tokens.len() {
            let kernel = parser.kernel(&lines)?;
            if kernels.iter().any(|other| other.name == kernel.name) {
                return Err(format!("the kernel {} is there twice", kernel.name));
            }
            kernels.push(kernel);
        }
        Ok(Module { kernels })
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
}

/// What a body's names mean while it is read.
#[derive(Default)]
struct Names {
    registers: HashMap<String, (Place, Type)>,
    /// Offset of each parameter.
    params: HashMap<String, u64>,
    labels: HashMap<String, usize>,
    /// Branches, with the lines and labels that they name.
    branches: Vec<(usize, usize, String)>,
    constants: Vec<u64>,
}

/// A constant's place until it is known how many registers there are.
const CONSTANT: Place = 1 << 31;

impl Names {
    fn constant(&mut self, bits: u64) -> Place {
        let known = self.constants.iter().position(|known| *known == bits);
        let at = known.unwrap_or_else(|| {
            self.constants.push(bits);
            self.constants.len() - 1
        });
        CONSTANT + at as Place
    }

    fn register(&self, name: &str) -> Result<(Place, Type)> {
        self.registers.get(name).copied().ok_or(format!("{name} is no register"))
    }
}

impl Parser {
    fn line(&self) -> usize {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(0, |token| token.line)
    }

    fn peek(&self) -> &str {
        self.tokens.get(self.at).map_or("", |token| &token.text)
    }

    fn next(&mut self) -> String {
        let text = self.peek().to_string();
        self.at += 1;
        text
    }

    fn wrong<T>(&self, what: impl AsRef<str>) -> Result<T> {
        Err(format!("line {}: {}", self.line(), what.as_ref()))
    }

    fn expect(&mut self, text: &str) -> Result<()> {
        match self.peek() == text {
            true => {
                self.at += 1;
                Ok(())
            }
            false => self.wrong(format!("{text:?} is wanted and {:?} is there", self.peek())),
        }
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T> {
        let text = self.peek().to_string();
        match text.parse() {
            Ok(number) => {
                self.at += 1;
                Ok(number)
            }
            Err(_) => self.wrong(format!("{text:?} is no number that can stand here")),
        }
    }

    fn head(&mut self) -> Result<()> {
        self.expect(".version")?;
        let version = self.next();
        if !["7.0", "8.0", "8.1", "8.5"].contains(&version.as_str()) {
            return self.wrong(format!("version {version} is not known"));
        }
        self.expect(".target")?;
        if !self.next().starts_with("sm_") {
            return self.wrong("a target is wanted");
        }
        self.expect(".address_size")?;
        self.expect("64")
    }

    fn kernel(&mut self, lines: &[String]) -> Result<Kernel> {
        self.expect(".visible")?;
        self.expect(".entry")?;
        let name = self.next();
        let mut names = Names::default();
        let params = self.params(&mut names)?;
        let param_bytes = params.last().map_or(0, |(at, bytes)| at + bytes);
        let mut max_threads = 1024;
        while self.peek() != "{" {
            match self.next().as_str() {
                ".maxntid" => {
                    max_threads = self.number::<u64>()?;
                    while self.peek() == "," {
                        self.expect(",")?;
                        max_threads *= self.number::<u64>()?;
                    }
                }
                other => return self.wrong(format!("the directive {other} is not known")),
            }
        }
        self.expect("{")?;
        let mut code = Vec::new();
        while self.peek() != "}" {
            self.statement(&mut names, &mut code)?;
        }
        self.expect("}")?;
        for (at, line, label) in std::mem::take(&mut names.branches) {
            let to = names.labels.get(&label).ok_or(format!("line {line}: there is no label {label}"))?;
            code[at].op = Op::Branch(*to);
        }
        if !matches!(code.last().map(|last| (&last.op, last.guard)), Some((Op::Return | Op::Branch(_), None))) {
            return Err(format!("{name} runs past its end"));
        }
        let registers = names.registers.len();
        code.iter_mut().for_each(|instruction| settle(instruction, registers as Place));
        let executed = code.iter().map(|_| AtomicBool::new(false)).collect();
        let (constants, lines) = (names.constants, lines.to_vec());
        Ok(Kernel { name, params, param_bytes, max_threads, code, registers, constants, lines, executed })
    }

    fn params(&mut self, names: &mut Names) -> Result<Vec<(usize, usize)>> {
        let (mut offset, mut found) = (0usize, Vec::new());
        self.expect("(")?;
        while self.peek() == ".param" {
            self.expect(".param")?;
            let mut alignment = 1;
            if self.peek() == ".align" {
                self.expect(".align")?;
                alignment = self.number::<usize>()?;
            }
            let ty = self.directive_type()?;
            let name = self.next();
            let mut bytes = ty.bytes();
            if self.peek() == "[" {
                self.expect("[")?;
                bytes *= self.number::<usize>()?;
                self.expect("]")?;
            }
            offset = offset.next_multiple_of(alignment.max(ty.bytes()));
            names.params.insert(name, offset as u64);
            found.push((offset, bytes));
            offset += bytes;
            if self.peek() == "," {
                self.expect(",")?;
            }
        }
        self.expect(")")?;
        Ok(found)
    }

    fn directive_type(&mut self) -> Result<Type> {
        let name = self.next();
        match name.strip_prefix('.').and_then(Type::of) {
            Some(ty) => Ok(ty),
            None => self.wrong(format!("{name} is no type")),
        }
    }

    fn statement(&mut self, names: &mut Names, code: &mut Vec<Instruction>) -> Result<()> {
        match self.peek() {
            ".reg" => return self.registers(names),
            ".pragma" => {
                self.at += 1;
                return match self.next().as_str() {
                    "\"nounroll\"" => self.expect(";"),
                    other => self.wrong(format!("the pragma {other} is not known")),
                };
            }
            "" => return self.wrong("the text ends within a kernel"),
            _ => {}
        }
        let is_label = self.tokens.get(self.at + 1).is_some_and(|token| token.text == ":");
        if is_label {
            let label = self.next();
            self.expect(":")?;
            return match names.labels.insert(label, code.len()) {
                None => Ok(()),
                Some(_) => self.wrong("the label is there twice"),
            };
        }
        let line = self.line();
        let guard = self.guard(names).or_else(|why| self.wrong(why))?;
        let opcode = self.next();
        let op = self.operation(&opcode, names, code.len()).map_err(|why| match why.starts_with("line ") {
            true => why,
            false => format!("line {line}: {opcode}: {why}"),
        })?;
        self.expect(";")?;
        code.push(Instruction { guard, op, line });
        Ok(())
    }

    fn registers(&mut self, names: &mut Names) -> Result<()> {
        self.expect(".reg")?;
        let ty = self.directive_type()?;
        loop {
            let name = self.next();
            let mut wanted = vec![name.clone()];
            if self.peek() == "<" {
                self.expect("<")?;
                wanted = (0..self.number::<usize>()?.min(1 << 16)).map(|number| format!("{name}{number}")).collect();
                self.expect(">")?;
            }
            for name in wanted {
                let place = names.registers.len() as Place;
                if !name.starts_with('%') || names.registers.insert(name, (place, ty)).is_some() {
                    return self.wrong("a register's name is wrong or there twice");
                }
            }
            match self.next().as_str() {
                "," => {}
                ";" => return Ok(()),
                other => return self.wrong(format!("{other:?} is not wanted here")),
            }
        }
    }

    fn guard(&mut self, names: &Names) -> Result<Option<(Place, bool)>> {
        if self.peek() != "@" {
            return Ok(None);
        }
        self.expect("@")?;
        let wanted = self.peek() != "!";
        if !wanted {
            self.expect("!")?;
        }
        match names.register(&self.next())? {
            (place, Type::PRED) => Ok(Some((place, wanted))),
            _ => Err("a guard is a predicate".to_string()),
        }
    }

    fn operation(&mut self, opcode: &str, names: &mut Names, at: usize) -> Result<Op> {
        match opcode {
            "ret" => return Ok(Op::Return),
            "membar.sys" | "fence.sc.sys" | "fence.acq_rel.sys" => return Ok(Op::Fence),
            "nanosleep.u32" => {
                self.source(names, Type::of("u32").expect("a type"), false)?;
                return Ok(Op::Sleep);
            }
            "bra" | "bra.uni" => {
                let (line, label) = (self.line(), self.next());
                names.branches.push((at, line, label));
                return Ok(Op::Return);
            }
            "cvta.to.global.u64" => return self.computed("mov.u64", names),
            _ => {}
        }
        let parts: Vec<&str> = opcode.split('.').collect();
        match parts[0] {
            "ld" | "st" => self.access(&parts, names),
            "mov" => self.moved(opcode, names),
            _ => self.computed(opcode, names),
        }
    }

    fn moved(&mut self, opcode: &str, names: &mut Names) -> Result<Op> {
        let ty = opcode.strip_prefix("mov.").and_then(Type::of).filter(|ty| ty.bits != 8).ok_or("is not known")?;
        if self.peek() == "{" {
            let halves = self.list(names)?;
            self.expect(",")?;
            let (src, src_type) = names.register(&self.next())?;
            let halves = halved(ty, &halves)?;
            return match ty.takes(src_type) {
                true => Ok(Op::Unpack(halves, src, ty.bits / 2)),
                false => Err("the source has another type".to_string()),
            };
        }
        let name = self.next();
        let (dst, dst_type) = names.register(&name)?;
        if !ty.takes(dst_type) {
            return Err(format!("{name} has another type"));
        }
        self.expect(",")?;
        if self.peek() == "{" {
            let halves = self.list(names)?;
            return Ok(Op::Pack(dst, halved(ty, &halves)?, ty.bits / 2));
        }
        if let Some(special) = special(self.peek()) {
            self.at += 1;
            return match (ty.kind, ty.bits) {
                (Kind::Unsigned | Kind::Bits, 32) => Ok(Op::Special(dst, special)),
                _ => Err("is not of the special register's type".to_string()),
            };
        }
        if let Some(offset) = names.params.get(self.peek()).copied() {
            self.at += 1;
            let src = names.constant(PARAMS + offset);
            return match ty.bits {
                64 => Ok(compute(Apply::One(|a| a), dst, [src, 0, 0, 0], ty)),
                _ => Err("an address has 64 bits".to_string()),
            };
        }
        let src = self.source(names, ty, false)?;
        Ok(compute(Apply::One(|a| a), dst, [src, 0, 0, 0], ty))
    }

    fn computed(&mut self, opcode: &str, names: &mut Names) -> Result<Op> {
        if let Some(ty) = opcode.strip_prefix("mov.").and_then(Type::of) {
            let (dst, dst_type) = names.register(&self.next())?;
            self.expect(",")?;
            let src = self.source(names, ty, false)?;
            return match ty.takes(dst_type) {
                true => Ok(compute(Apply::One(|a| a), dst, [src, 0, 0, 0], ty)),
                false => Err("the destination has another type".to_string()),
            };
        }
        let form = form(opcode).ok_or("is not known")?;
        let name = self.next();
        let (dst, dst_type) = names.register(&name)?;
        if !form.dst.takes(dst_type) {
            return Err(format!("{name} has another type than {}", form.dst));
        }
        let mut srcs = [0; 4];
        for (src, ty) in srcs.iter_mut().zip(&form.srcs) {
            self.expect(",")?;
            *src = self.source(names, *ty, form.widens)?;
        }
        let mut op = compute(form.apply, dst, srcs, form.dst);
        if let Op::Compute { nan, .. } = &mut op {
            *nan = form.nan;
        }
        Ok(op)
    }

    /// A register or a number of a type.
    fn source(&mut self, names: &mut Names, ty: Type, widens: bool) -> Result<Place> {
        let text = self.next();
        if text.starts_with('%') {
            let (place, of) = names.register(&text)?;
            return match ty.takes(of) || (widens && ty.fits_in(of)) {
                true => Ok(place),
                false => Err(format!("{text} has another type than {ty}")),
            };
        }
        immediate(&text, ty).map(|bits| names.constant(bits)).ok_or(format!("{text:?} is no {ty}"))
    }

    fn list(&mut self, names: &Names) -> Result<Vec<(Place, Type)>> {
        self.expect("{")?;
        let mut found = vec![names.register(&self.next())?];
        while self.peek() == "," {
            self.expect(",")?;
            found.push(names.register(&self.next())?);
        }
        self.expect("}")?;
        Ok(found)
    }

    fn operands(&mut self, names: &Names, count: usize) -> Result<Vec<(Place, Type)>> {
        let found = match self.peek() {
            "{" => self.list(names)?,
            _ => vec![names.register(&self.next())?],
        };
        match found.len() == count {
            true => Ok(found),
            false => Err(format!("{count} registers are wanted")),
        }
    }

    fn access(&mut self, parts: &[&str], names: &mut Names) -> Result<Op> {
        let (mut rest, ty) = match parts.split_last() {
            Some((last, rest)) => {
                (&rest[1..], Type::of(last).filter(|ty| ty.kind != Kind::Pred).ok_or("is not known")?)
            }
            None => return Err("is not known".to_string()),
        };
        let mut take = |wanted: &str| {
            let found = rest.first() == Some(&wanted);
            rest = &rest[usize::from(found)..];
            found
        };
        let volatile = take("volatile");
        let of_params = take("param");
        let _global = !of_params && take("global");
        let count = if take("v2") {
            2
        } else if take("v4") {
            4
        } else {
            1
        };
        if !rest.is_empty() || ty.bytes() * count > 16 || (of_params && (volatile || parts[0] == "st")) {
            return Err("is not known".to_string());
        }
        let in_registers = |operands: &[(Place, Type)]| match operands.iter().all(|(_, of)| ty.fits_in(*of)) {
            true => Ok(()),
            false => Err(format!("a register does not hold {ty}")),
        };
        if parts[0] == "ld" {
            let dsts = self.operands(names, count)?;
            in_registers(&dsts)?;
            self.expect(",")?;
            let at = self.address(names, of_params)?;
            return Ok(Op::Load { of_params, ty, dsts, at, volatile });
        }
        let at = self.address(names, false)?;
        self.expect(",")?;
        let srcs = self.operands(names, count)?;
        in_registers(&srcs)?;
        Ok(Op::Store { ty, srcs: srcs.into_iter().map(|(place, _)| place).collect(), at, volatile })
    }

    fn address(&mut self, names: &mut Names, of_params: bool) -> Result<Address> {
        self.expect("[")?;
        let text = self.next();
        let base = match names.params.get(&text).copied() {
            Some(offset) if of_params => names.constant(PARAMS + offset),
            _ => match names.register(&text)? {
                (place, of) if of.bits == 64 && of.kind != Kind::Float => place,
                _ => return Err(format!("{text} holds no address")),
            },
        };
        let mut offset = 0;
        if self.peek() == "+" {
            self.expect("+")?;
            offset = self.number::<i64>()?;
        }
        self.expect("]")?;
        Ok(Address { base, offset })
    }
}

fn compute(apply: Apply, dst: Place, srcs: [Place; 4], ty: Type) -> Op {
    Op::Compute { apply, dst, srcs, ty, nan: NanIn::Nothing }
}

fn halved(ty: Type, halves: &[(Place, Type)]) -> Result<[Place; 2]> {
    match halves {
        [(low, a), (high, b)] if ty.kind == Kind::Bits && 2 * a.bits == ty.bits && a.bits == b.bits => {
            Ok([*low, *high])
        }
        _ => Err("two halves are wanted".to_string()),
    }
}

fn special(name: &str) -> Option<Special> {
    let (name, dimension) = name.rsplit_once('.')?;
    let dimension = ["x", "y", "z"].iter().position(|known| *known == dimension)?;
    match name {
        "%tid" => Some(Special::Tid(dimension)),
        "%ntid" => Some(Special::Ntid(dimension)),
        "%ctaid" => Some(Special::Ctaid(dimension)),
        "%nctaid" => Some(Special::Nctaid(dimension)),
        _ => None,
    }
}

/// A number's bits as this type has them; none where the type does not hold it.
fn immediate(text: &str, ty: Type) -> Option<u64> {
    if let Some(hex) = text.strip_prefix("0f").filter(|hex| hex.len() == 8) {
        let bits = u64::from(u32::from_str_radix(hex, 16).ok()?);
        return (ty.bits == 32 && matches!(ty.kind, Kind::Float | Kind::Bits)).then_some(bits);
    }
    if let Some(hex) = text.strip_prefix("0d").filter(|hex| hex.len() == 16) {
        let bits = u64::from_str_radix(hex, 16).ok()?;
        return (ty.bits == 64 && matches!(ty.kind, Kind::Float | Kind::Bits)).then_some(bits);
    }
    let number: i128 = match text.strip_prefix("0x") {
        Some(hex) => i128::from_str_radix(hex, 16).ok()?,
        None => text.parse().ok()?,
    };
    let holds = number >= -(1 << (ty.bits - 1)) && number < 1 << ty.bits;
    let is_number = match ty.kind {
        Kind::Float => false,
        Kind::Pred => number == 0 || number == 1,
        _ => holds,
    };
    is_number.then(|| ty.cut(number as u64))
}

/// Puts the constants behind the registers.
fn settle(instruction: &mut Instruction, registers: Place) {
    let place = |place: &mut Place| {
        if *place & CONSTANT != 0 {
            *place = *place - CONSTANT + registers;
        }
    };
    match &mut instruction.op {
        Op::Compute { srcs, .. } => srcs.iter_mut().for_each(place),
        Op::Load { at, .. } => place(&mut at.base),
        Op::Store { at, srcs, .. } => {
            place(&mut at.base);
            srcs.iter_mut().for_each(place);
        }
        Op::Special(..) | Op::Pack(..) | Op::Unpack(..) | Op::Branch(_) | Op::Return | Op::Fence | Op::Sleep => {}
    }
}
