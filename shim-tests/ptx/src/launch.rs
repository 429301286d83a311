//! Launches: blocks of threads, one thread after the other, in an order that a seed decides.

use crate::forms::{Apply, Kind, NanIn, Type};
use crate::module::{Address, Instruction, Kernel, Op, Place, Special, PARAMS};
use crate::sharing::{Conflict, Notes, Number, Origin, Origins};
use half::f16;
use std::fmt;

/// What a launch runs on. Errors are sentences, for the [`Trap`].
pub trait Device {
    /// Loads up to 16 bytes, the first as the lowest. The address is a multiple of their number.
    fn load(&self, address: u64, bytes: usize) -> Result<u128, String>;
    /// Stores them.
    fn store(&self, address: u64, bytes: usize, value: u128) -> Result<(), String>;
    /// A thread has nothing to do for a while. An error ends it.
    fn sleep(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Which bits a NaN has that arithmetic gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nan {
    /// Those of NVIDIA's devices.
    Nvidia,
    /// Others, quiet, with this payload and sign.
    Other(u64),
}

impl Nan {
    fn bits(self, width: u32) -> u64 {
        match (self, width) {
            (Nan::Nvidia, 16) => 0x7fff,
            (Nan::Nvidia, 32) => 0x7fff_ffff,
            (Nan::Nvidia, _) => 0xfff8_0000_0000_0000,
            (Nan::Other(bits), 16) => 0x7e00 | (bits & 0x81ff),
            (Nan::Other(bits), 32) => 0x7fc0_0000 | (bits & 0x803f_ffff),
            (Nan::Other(bits), _) => 0x7ff8_0000_0000_0000 | (bits & 0x8007_ffff_ffff_ffff),
        }
    }
}

/// How a launch is run.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// Decides the order of the threads. With 0 it is that of their numbers.
    pub seed: u64,
    /// The NaN.
    pub nan: Nan,
    /// The most instructions of a thread.
    pub limit: u64,
}

impl Default for Manner {
    fn default() -> Manner {
        Manner { seed: 0, nan: Nan::Nvidia, limit: 100_000_000 }
    }
}

/// An error of a program: where, and what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trap {
    /// The kernel.
    pub kernel: String,
    /// The line in the module's text.
    pub line: usize,
    /// The instruction's text.
    pub text: String,
    /// The thread in its block, and the block.
    pub thread: [u32; 3],
    /// See `thread`.
    pub block: [u32; 3],
    /// What is wrong.
    pub why: String,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Trap { kernel, line, text, thread, block, why } = self;
        write!(f, "{kernel}, line {line}, `{text}`, thread {thread:?} of block {block:?}: {why}")
    }
}

impl std::error::Error for Trap {}

/// A launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Its parameters' bytes.
    pub params: &'a [u8],
    /// How many blocks there are.
    pub blocks: [u32; 3],
    /// How many threads a block has.
    pub threads: [u32; 3],
}

impl Launch<'_> {
    fn per_block(&self) -> u64 {
        self.threads.iter().map(|count| u64::from(*count)).product()
    }

    /// How many threads there are.
    pub fn len(&self) -> u64 {
        self.blocks.iter().map(|count| u64::from(*count)).product::<u64>() * self.per_block()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Runs every thread once. Returns how many instructions were executed.
    pub fn run(&self, device: &dyn Device, manner: Manner) -> Result<u64, Trap> {
        let (count, seed) = (self.len(), manner.seed);
        // i -> (a i + b) mod n is every number once where a and n have no common factor.
        let mut a = if seed == 0 { 1 } else { (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % count.max(1)).max(1) };
        while common_factor(a, count.max(1)) != 1 {
            a += 1;
        }
        let b = if seed == 0 { 0 } else { (seed >> 7) % count.max(1) };
        let place = |index: u64| ((u128::from(a) * u128::from(index) + u128::from(b)) % u128::from(count)) as u64;
        self.run_threads((0..count).map(place), device, manner)
    }

    /// Runs the threads with these numbers: x first, then y and z, then the block's.
    pub fn run_threads(
        &self,
        threads: impl IntoIterator<Item = u64>,
        device: &dyn Device,
        manner: Manner,
    ) -> Result<u64, Trap> {
        let mut machine = Machine::new(self, device, manner);
        if self.params.len() != self.kernel.param_bytes || self.per_block() > self.kernel.max_threads || self.is_empty()
        {
            let (bytes, most) = (self.kernel.param_bytes, self.kernel.max_threads);
            let why = format!(
                "a launch of {:?} blocks of {:?} threads with {} bytes of parameters; it takes 1 to {most} threads and {bytes} bytes",
                self.blocks,
                self.threads,
                self.params.len()
            );
            return Err(machine.trap(0, why));
        }
        let mut instructions = 0;
        let result = threads.into_iter().try_for_each(|thread| {
            instructions += machine.thread(thread)?;
            Ok(())
        });
        self.kernel.executed(&machine.executed);
        result.map(|()| instructions)
    }

    fn places(&self, index: u64) -> ([u32; 3], [u32; 3]) {
        let (block, thread) = (index / self.per_block(), index % self.per_block());
        let split = |index: u64, sizes: [u32; 3]| {
            let (x, y) = (u64::from(sizes[0]), u64::from(sizes[1]));
            [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32]
        };
        (split(thread, self.threads), split(block, self.blocks))
    }
}

fn common_factor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        common_factor(b, a % b)
    }
}

/// A register: its bits, where they come from, and the last thread that wrote it.
#[derive(Debug, Clone, Copy, Default)]
struct Register {
    bits: u64,
    origin: Origin,
    by: Number,
}

/// As a register's thread: it is a constant.
const CONSTANT: Number = u32::MAX;

struct Machine<'a> {
    launch: &'a Launch<'a>,
    device: &'a dyn Device,
    manner: Manner,
    registers: Vec<Register>,
    origins: Origins,
    notes: Notes,
    executed: Vec<bool>,
    /// The numbers of the threads that have run.
    ran: Vec<u64>,
    thread: [u32; 3],
    block: [u32; 3],
}

/// Where a thread goes on.
enum Next {
    Following,
    At(usize),
    End,
}

impl<'a> Machine<'a> {
    fn new(launch: &'a Launch<'a>, device: &'a dyn Device, manner: Manner) -> Machine<'a> {
        let kernel = launch.kernel;
        let mut registers = vec![Register::default(); kernel.registers];
        registers.extend(kernel.constants.iter().map(|bits| Register { bits: *bits, origin: 0, by: CONSTANT }));
        Machine {
            launch,
            device,
            manner,
            registers,
            origins: Origins::default(),
            notes: Notes::default(),
            executed: vec![false; kernel.code.len()],
            ran: Vec::new(),
            thread: [0; 3],
            block: [0; 3],
        }
    }

    fn trap(&self, at: usize, why: String) -> Trap {
        let kernel = self.launch.kernel;
        Trap {
            kernel: kernel.name.clone(),
            line: kernel.code[at].line,
            text: kernel.text(at).to_string(),
            thread: self.thread,
            block: self.block,
            why,
        }
    }

    fn number(&self) -> Number {
        self.ran.len() as Number
    }

    fn thread(&mut self, index: u64) -> Result<u64, Trap> {
        (self.thread, self.block) = self.launch.places(index);
        self.ran.push(index);
        self.origins.clear();
        let kernel = self.launch.kernel;
        let (mut at, mut count) = (0, 0);
        loop {
            if count == self.manner.limit {
                return Err(self.trap(at, format!("the thread has not ended after {count} instructions")));
            }
            count += 1;
            match self.step(&kernel.code[at]) {
                // A branch that was reached has done what it does.
                Ok(None) => {
                    self.executed[at] |= matches!(kernel.code[at].op, Op::Branch(_));
                    at += 1;
                }
                Ok(Some(next)) => {
                    self.executed[at] = true;
                    match next {
                        Next::Following => at += 1,
                        Next::At(to) => at = to,
                        Next::End => return Ok(count),
                    }
                }
                Err(why) => return Err(self.trap(at, why)),
            }
        }
    }

    #[inline(always)]
    fn read(&self, place: Place) -> Result<Register, String> {
        let register = self.registers[place as usize];
        if register.by == self.number() || register.by == CONSTANT {
            return Ok(register);
        }
        Err("a register is read that was not written".to_string())
    }

    #[inline(always)]
    fn write(&mut self, place: Place, bits: u64, origin: Origin) {
        self.registers[place as usize] = Register { bits, origin, by: self.number() };
    }

    /// Executes an instruction; `None` where its guard forbids it.
    #[inline(always)]
    fn step(&mut self, instruction: &Instruction) -> Result<Option<Next>, String> {
        if let Some((predicate, wanted)) = instruction.guard {
            if (self.read(predicate)?.bits != 0) != wanted {
                return Ok(None);
            }
        }
        match &instruction.op {
            Op::Compute { apply, dst, srcs, ty, nan } => {
                let (bits, origin) = self.compute(*apply, srcs)?;
                let bits = ty.cut(bits);
                let bits = match nan {
                    NanIn::Nothing => bits,
                    NanIn::Whole => self.with_nan(bits, ty.bits),
                    NanIn::Halves => self.with_nan(bits & 0xffff, 16) | self.with_nan(bits >> 16, 16) << 16,
                };
                self.write(*dst, bits, origin);
            }
            Op::Special(dst, special) => self.write(*dst, u64::from(self.special(*special)), 0),
            Op::Pack(dst, [low, high], width) => {
                let (low, high) = (self.read(*low)?, self.read(*high)?);
                let origin = self.origins.join(low.origin, high.origin);
                self.write(*dst, low.bits | high.bits << width, origin);
            }
            Op::Unpack([low, high], src, width) => {
                let both = self.read(*src)?;
                self.write(*low, both.bits & ((1 << width) - 1), both.origin);
                self.write(*high, both.bits >> width, both.origin);
            }
            Op::Load { of_params, ty, dsts, at, volatile } => self.load(*of_params, *ty, dsts, *at, *volatile)?,
            Op::Store { ty, srcs, at, volatile } => self.store(*ty, srcs, *at, *volatile)?,
            Op::Branch(to) => return Ok(Some(Next::At(*to))),
            Op::Return => return Ok(Some(Next::End)),
            Op::Fence => std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst),
            Op::Sleep => self.device.sleep()?,
        }
        Ok(Some(Next::Following))
    }

    #[inline(always)]
    fn compute(&mut self, apply: Apply, srcs: &[Place; 4]) -> Result<(u64, Origin), String> {
        let a = self.read(srcs[0])?;
        Ok(match apply {
            Apply::One(f) => (f(a.bits), a.origin),
            Apply::Two(f) => {
                let b = self.read(srcs[1])?;
                (f(a.bits, b.bits), self.origins.join(a.origin, b.origin))
            }
            Apply::Partial(f) => {
                let b = self.read(srcs[1])?;
                let bits = f(a.bits, b.bits).ok_or("an integer is divided by 0, or the result does not fit")?;
                (bits, self.origins.join(a.origin, b.origin))
            }
            Apply::Select => {
                let (b, predicate) = (self.read(srcs[1])?, self.read(srcs[2])?);
                // The other one goes nowhere.
                let chosen = if predicate.bits != 0 { a } else { b };
                (chosen.bits, self.origins.join(chosen.origin, predicate.origin))
            }
            Apply::Three(f) => {
                let (b, c) = (self.read(srcs[1])?, self.read(srcs[2])?);
                let origin = self.origins.join(a.origin, b.origin);
                (f(a.bits, b.bits, c.bits), self.origins.join(origin, c.origin))
            }
            Apply::Four(f) => {
                let (b, c, d) = (self.read(srcs[1])?, self.read(srcs[2])?, self.read(srcs[3])?);
                let origin = self.origins.join(a.origin, b.origin);
                let origin = self.origins.join(origin, c.origin);
                (f(a.bits, b.bits, c.bits, d.bits), self.origins.join(origin, d.origin))
            }
        })
    }

    /// The machine's bits instead of a NaN's.
    fn with_nan(&self, bits: u64, width: u32) -> u64 {
        let is_nan = match width {
            16 => f16::from_bits(bits as u16).is_nan(),
            32 => f32::from_bits(bits as u32).is_nan(),
            _ => f64::from_bits(bits).is_nan(),
        };
        if is_nan {
            self.manner.nan.bits(width)
        } else {
            bits
        }
    }

    fn special(&self, special: Special) -> u32 {
        match special {
            Special::Tid(dimension) => self.thread[dimension],
            Special::Ntid(dimension) => self.launch.threads[dimension],
            Special::Ctaid(dimension) => self.block[dimension],
            Special::Nctaid(dimension) => self.launch.blocks[dimension],
        }
    }

    /// The address of an access, which is used from now on.
    fn address(&mut self, at: Address, bytes: usize) -> Result<u64, String> {
        let base = self.read(at.base)?;
        self.used(base.origin)?;
        let address = base.bits.wrapping_add_signed(at.offset);
        match address.is_multiple_of(bytes as u64) {
            true => Ok(address),
            false => Err(format!("{bytes} bytes at {address:#x}, which is no multiple of that")),
        }
    }

    fn load(
        &mut self,
        of_params: bool,
        ty: Type,
        dsts: &[(Place, Type)],
        at: Address,
        volatile: bool,
    ) -> Result<(), String> {
        let (each, bytes) = (ty.bytes(), ty.bytes() * dsts.len());
        let address = self.address(at, bytes)?;
        let (value, origin) = match of_params {
            true => (self.param(address, bytes)?, 0),
            false => {
                let value = self.device.load(address, bytes)?;
                (value, if volatile { 0 } else { self.origins.load(address, bytes as u64) })
            }
        };
        for (index, (place, register)) in dsts.iter().enumerate() {
            let bits = ty.cut((value >> (8 * each * index)) as u64);
            let is_negative = ty.kind == Kind::Signed && bits >> (ty.bits - 1) != 0;
            let extended = if is_negative { register.cut(bits | (u64::MAX << (ty.bits - 1))) } else { bits };
            self.write(*place, extended, origin);
        }
        Ok(())
    }

    fn param(&self, address: u64, bytes: usize) -> Result<u128, String> {
        let at = address.wrapping_sub(PARAMS);
        let end = at.saturating_add(bytes as u64);
        if end > self.launch.params.len() as u64 {
            return Err(format!("{bytes} bytes of the parameters at {at}, which have {}", self.launch.params.len()));
        }
        let mut value = [0; 16];
        value[..bytes].copy_from_slice(&self.launch.params[at as usize..end as usize]);
        Ok(u128::from_le_bytes(value))
    }

    fn store(&mut self, ty: Type, srcs: &[Place], at: Address, volatile: bool) -> Result<(), String> {
        let (each, bytes) = (ty.bytes(), ty.bytes() * srcs.len());
        let address = self.address(at, bytes)?;
        let mut value = 0;
        for (index, place) in srcs.iter().enumerate() {
            let register = self.read(*place)?;
            self.used(register.origin)?;
            value |= u128::from(ty.cut(register.bits)) << (8 * each * index);
        }
        if !volatile {
            let written = self.notes.write(self.number(), address, bytes as u64);
            written.map_err(|conflict| self.explain(conflict, "writes"))?;
        }
        self.device.store(address, bytes, value)
    }

    /// A value reaches a store or an address: what it was loaded from must be nobody else's.
    fn used(&mut self, origin: Origin) -> Result<(), String> {
        let (number, notes) = (self.number(), &mut self.notes);
        let told = self.origins.tell(origin, |address, bytes| notes.read(number, address, bytes));
        told.map_err(|conflict| self.explain(conflict, "uses what it read of"))
    }

    fn explain(&self, Conflict { address, other, wrote }: Conflict, does: &str) -> String {
        let who = match other {
            None => "several other threads".to_string(),
            Some(number) => {
                let (thread, block) = self.launch.places(self.ran[number as usize - 1]);
                format!("thread {thread:?} of block {block:?}")
            }
        };
        let did = if wrote { "writes" } else { "reads and uses" };
        format!("it {does} the byte at {address:#x}, which {who} {did}, and nothing orders them")
    }
}
