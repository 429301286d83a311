//! The forms of instructions that compute: which types they take, and what they do to bits.
//!
//! Values are kept as the low bits of a `u64`, the others 0. Signs, widths and special cases are those of NVIDIA's
//! description of the instruction set; where it leaves a result open (a division by 0), there is none.
// Forms are written once for all types: a cast to u64 is none where the type is u64.
#![allow(clippy::unnecessary_cast)]

use half::f16;
use std::fmt;

/// What a type's bits mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A predicate.
    Pred,
    /// Bits without a meaning.
    Bits,
    /// An unsigned integer.
    Unsigned,
    /// An integer with a sign.
    Signed,
    /// A float of IEEE 754.
    Float,
}

/// A type: its kind and its width in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Type {
    /// What the bits mean.
    pub kind: Kind,
    /// How many there are; 1 for a predicate.
    pub bits: u32,
}

impl Type {
    /// The predicate.
    pub const PRED: Type = Type { kind: Kind::Pred, bits: 1 };

    const fn new(kind: Kind, bits: u32) -> Type {
        Type { kind, bits }
    }

    /// The type of this name: `u32`, `b16`, `f64`, `pred`.
    pub fn of(name: &str) -> Option<Type> {
        if name == "pred" {
            return Some(Type::PRED);
        }
        let (kind, widths): (Kind, &[u32]) = match name.get(..1)? {
            "b" => (Kind::Bits, &[8, 16, 32, 64]),
            "u" => (Kind::Unsigned, &[8, 16, 32, 64]),
            "s" => (Kind::Signed, &[8, 16, 32, 64]),
            "f" => (Kind::Float, &[16, 32, 64]),
            _ => return None,
        };
        let bits = name[1..].parse().ok().filter(|bits| widths.contains(bits))?;
        Some(Type::new(kind, bits))
    }

    /// Bytes in memory.
    pub fn bytes(self) -> usize {
        self.bits as usize / 8
    }

    /// Cuts a value to the type's width.
    pub fn cut(self, bits: u64) -> u64 {
        bits & (u64::MAX >> (64 - self.bits))
    }

    /// Whether a register of type `register` serves as an operand of this type.
    pub fn takes(self, register: Type) -> bool {
        let bits = |kind| matches!(kind, Kind::Bits);
        let both_integers =
            matches!((self.kind, register.kind), (Kind::Unsigned | Kind::Signed, Kind::Unsigned | Kind::Signed));
        self.bits == register.bits
            && (self.kind == register.kind
                || both_integers
                || (bits(self.kind) && register.kind != Kind::Pred)
                || (bits(register.kind) && self.kind != Kind::Pred))
    }

    /// Whether a register serves where wider ones are allowed: in loads, stores and conversions.
    pub fn fits_in(self, register: Type) -> bool {
        let integers = self.kind != Kind::Float && !matches!(register.kind, Kind::Float | Kind::Pred);
        self.takes(register) || (integers && self.kind != Kind::Pred && register.bits >= self.bits)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let letter = match self.kind {
            Kind::Pred => return write!(f, "pred"),
            Kind::Bits => 'b',
            Kind::Unsigned => 'u',
            Kind::Signed => 's',
            Kind::Float => 'f',
        };
        write!(f, "{letter}{}", self.bits)
    }
}

/// The function of a form.
#[derive(Debug, Clone, Copy)]
pub enum Apply {
    /// Of one source.
    One(fn(u64) -> u64),
    /// Of two.
    Two(fn(u64, u64) -> u64),
    /// Of two; for some there is no result.
    Partial(fn(u64, u64) -> Option<u64>),
    /// The first of two if the third, a predicate, holds, otherwise the second.
    Select,
    /// Of three.
    Three(fn(u64, u64, u64) -> u64),
    /// Of four.
    Four(fn(u64, u64, u64, u64) -> u64),
}

/// Where a result may be a NaN, whose bits are then the machine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NanIn {
    /// Nowhere: bits are kept.
    Nothing,
    /// It may be one.
    Whole,
    /// Its halves may be.
    Halves,
}

/// A form: the destination's type, the sources' types, the function.
#[derive(Debug, Clone)]
pub struct Form {
    /// What it gives.
    pub dst: Type,
    /// What it takes.
    pub srcs: Vec<Type>,
    /// Whether sources may be in wider registers.
    pub widens: bool,
    /// How.
    pub apply: Apply,
    /// Where the result may be a NaN.
    pub nan: NanIn,
}

impl Form {
    fn new(dst: Type, srcs: &[Type], apply: Apply) -> Form {
        Form { dst, srcs: srcs.to_vec(), widens: false, apply, nan: NanIn::Nothing }
    }

    fn unary(ty: Type, f: fn(u64) -> u64) -> Form {
        Form::new(ty, &[ty], Apply::One(f))
    }

    fn binary(ty: Type, f: fn(u64, u64) -> u64) -> Form {
        Form::new(ty, &[ty, ty], Apply::Two(f))
    }

    fn with_nan(self, nan: NanIn) -> Form {
        Form { nan, ..self }
    }
}

/// The integer type of Rust, as `$T`, for a type with or without a sign.
macro_rules! with_integer {
    ($ty:expr, $T:ident, $body:expr) => {
        match ($ty.kind, $ty.bits) {
            (Kind::Unsigned, 8) => {
                type $T = u8;
                $body
            }
            (Kind::Unsigned, 16) => {
                type $T = u16;
                $body
            }
            (Kind::Unsigned, 32) => {
                type $T = u32;
                $body
            }
            (Kind::Unsigned, 64) => {
                type $T = u64;
                $body
            }
            (Kind::Signed, 8) => {
                type $T = i8;
                $body
            }
            (Kind::Signed, 16) => {
                type $T = i16;
                $body
            }
            (Kind::Signed, 32) => {
                type $T = i32;
                $body
            }
            (Kind::Signed, 64) => {
                type $T = i64;
                $body
            }
            _ => return None,
        }
    };
}

/// The form of an instruction: `add.s32`, `setp.ltu.f32`, `cvt.rn.f32.u64`. None for what is not known, also where the
/// instruction's meaning would not be one (`add.f32` without a rounding may be fused with a multiplication).
pub fn form(name: &str) -> Option<Form> {
    let (op, type_name) = name.rsplit_once('.')?;
    if type_name == "f16x2" {
        return of_halves(op);
    }
    let ty = Type::of(type_name)?;
    if let Some(rest) = op.strip_prefix("cvt") {
        return conversion(rest, ty);
    }
    if let Some(comparison) = op.strip_prefix("setp.") {
        return match ty.kind {
            Kind::Float => float_comparison(comparison, ty),
            _ => comparison_of_integers(comparison, ty),
        };
    }
    match (op, ty.kind) {
        ("selp", kind) if kind != Kind::Pred && ty.bits > 8 => {
            Some(Form::new(ty, &[ty, ty, Type::PRED], Apply::Select))
        }
        ("and" | "or" | "xor" | "not", Kind::Bits | Kind::Pred) if ty.bits != 8 => logic(op, ty),
        ("shl" | "shr", _) => shift(op, ty),
        ("prmt", Kind::Bits) if ty.bits == 32 => Some(Form::new(ty, &[ty; 3], Apply::Three(permute))),
        ("bfi", Kind::Bits) => insertion(ty),
        ("lop3", Kind::Bits) if ty.bits == 32 => Some(Form::new(ty, &[ty; 4], Apply::Four(by_table))),
        (_, Kind::Float) => arithmetic_of_floats(op, ty),
        _ => arithmetic_of_integers(op, ty),
    }
}

fn logic(op: &str, ty: Type) -> Option<Form> {
    match op {
        "and" => Some(Form::binary(ty, |a, b| a & b)),
        "or" => Some(Form::binary(ty, |a, b| a | b)),
        "xor" => Some(Form::binary(ty, |a, b| a ^ b)),
        _ => Some(Form::unary(ty, |a| !a)),
    }
}

/// Shifts by the width or more leave nothing but signs.
fn shift(op: &str, ty: Type) -> Option<Form> {
    let count = Type::new(Kind::Unsigned, 32);
    let apply = match (op, ty.kind, ty.bits) {
        ("shl", Kind::Bits, 16 | 32 | 64) => Apply::Two(|a, by| if by < 64 { a << by } else { 0 }),
        ("shr", Kind::Bits | Kind::Unsigned, 16 | 32 | 64) => Apply::Two(|a, by| if by < 64 { a >> by } else { 0 }),
        ("shr", Kind::Signed, 16) => Apply::Two(|a, by| (a as i16 >> by.min(15)) as u64),
        ("shr", Kind::Signed, 32) => Apply::Two(|a, by| (a as i32 >> by.min(31)) as u64),
        ("shr", Kind::Signed, 64) => Apply::Two(|a, by| (a as i64 >> by.min(63)) as u64),
        _ => return None,
    };
    Some(Form::new(ty, &[ty, count], apply))
}

/// Four bytes picked out of eight; a selector's fourth bit spreads the picked byte's sign.
fn permute(a: u64, b: u64, selectors: u64) -> u64 {
    let bytes = (a | b << 32).to_le_bytes();
    let pick = |at: u32| {
        let selector = (selectors >> (4 * at)) as usize;
        let byte = bytes[selector & 7];
        u64::from(if selector & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }) << (8 * at)
    };
    (0..4).map(pick).fold(0, |all, byte| all | byte)
}

/// The bit of the table at the place that the three bits give.
fn by_table(a: u64, b: u64, c: u64, table: u64) -> u64 {
    let row = |at: u64| {
        let same = |source: u64, bit: u64| if at >> bit & 1 == 1 { source } else { !source };
        if table >> at & 1 == 1 {
            same(a, 2) & same(b, 1) & same(c, 0)
        } else {
            0
        }
    };
    (0..8).map(row).fold(0, |all, row| all | row)
}

fn f16_of(bits: u64) -> f32 {
    f16::from_bits(bits as u16).to_f32()
}

/// To the nearest, of two the even one.
fn f16_nearest(value: f32) -> u64 {
    u64::from(f16::from_f32(value).to_bits())
}

/// To the next towards zero.
fn f16_to_zero(value: f32) -> u64 {
    let nearest = f16_nearest(value);
    if f16_of(nearest).abs() > value.abs() {
        nearest - 1
    } else {
        nearest
    }
}

/// What a comparison of halves gives.
fn mask(holds: bool) -> u64 {
    if holds {
        0xffff
    } else {
        0
    }
}

/// What is done to the halves of two words.
fn halves(a: u64, b: u64, f: impl Fn(f32, f32) -> u64) -> u64 {
    f(f16_of(a), f16_of(b)) | f(f16_of(a >> 16), f16_of(b >> 16)) << 16
}

/// Instructions on two half floats in a word. A float32 has more than twice the bits and two more, so that rounding its
/// sum or product is rounding once.
fn of_halves(op: &str) -> Option<Form> {
    let word = Type::new(Kind::Bits, 32);
    let form = |f| Form::binary(word, f);
    Some(match op {
        "add.rn" => form(|a, b| halves(a, b, |x, y| f16_nearest(x + y))).with_nan(NanIn::Halves),
        "sub.rn" => form(|a, b| halves(a, b, |x, y| f16_nearest(x - y))).with_nan(NanIn::Halves),
        "mul.rn" => form(|a, b| halves(a, b, |x, y| f16_nearest(x * y))).with_nan(NanIn::Halves),
        "set.gt.u32" => form(|a, b| halves(a, b, |x, y| mask(x > y))),
        "set.lt.u32" => form(|a, b| halves(a, b, |x, y| mask(x < y))),
        "set.eq.u32" => form(|a, b| halves(a, b, |x, y| mask(x == y))),
        "set.nan.u32" => form(|a, b| halves(a, b, |x, y| mask(x.is_nan() || y.is_nan()))),
        _ => return None,
    })
}

/// `len` bits of the first source over the second's from a position on. Position and length are bytes.
fn insertion(ty: Type) -> Option<Form> {
    let number = Type::new(Kind::Unsigned, 32);
    let apply = Apply::Four(|a, b, at, len| {
        let (at, len) = (at & 0xff, len & 0xff);
        let ones = if len < 64 { (1 << len) - 1 } else { u64::MAX };
        let mask = if at < 64 { ones << at } else { 0 };
        let moved = if at < 64 { a << at } else { 0 };
        (moved & mask) | (b & !mask)
    });
    (ty.bits >= 32).then(|| Form::new(ty, &[ty, ty, number, number], apply))
}

fn arithmetic_of_integers(op: &str, ty: Type) -> Option<Form> {
    if ty.bits == 8 {
        return None;
    }
    let wide = Type::new(ty.kind, 2 * ty.bits);
    with_integer!(ty, T, {
        Some(match op {
            "add" => Form::binary(ty, |a, b| (a as T).wrapping_add(b as T) as u64),
            "sub" => Form::binary(ty, |a, b| (a as T).wrapping_sub(b as T) as u64),
            "mul.lo" => Form::binary(ty, |a, b| (a as T).wrapping_mul(b as T) as u64),
            "mul.wide" if ty.bits < 64 => {
                Form::new(wide, &[ty, ty], Apply::Two(|a, b| (a as T as i128 * b as T as i128) as u64))
            }
            "mul.hi" => Form::binary(ty, |a, b| ((a as T as i128).wrapping_mul(b as T as i128) >> T::BITS) as u64),
            "mad.lo" => {
                let apply = Apply::Three(|a, b, c| (a as T).wrapping_mul(b as T).wrapping_add(c as T) as u64);
                Form::new(ty, &[ty; 3], apply)
            }
            "div" => Form::new(ty, &[ty, ty], Apply::Partial(|a, b| Some((a as T).checked_div(b as T)? as u64))),
            "rem" => Form::new(ty, &[ty, ty], Apply::Partial(|a, b| Some((a as T).checked_rem(b as T)? as u64))),
            "min" => Form::binary(ty, |a, b| (a as T).min(b as T) as u64),
            "max" => Form::binary(ty, |a, b| (a as T).max(b as T) as u64),
            "neg" if ty.kind == Kind::Signed => Form::unary(ty, |a| (a as T).wrapping_neg() as u64),
            "abs" if ty.kind == Kind::Signed => {
                Form::unary(ty, |a| if (a as i128) << (128 - T::BITS) < 0 { (a as T).wrapping_neg() as u64 } else { a })
            }
            _ => return None,
        })
    })
}

fn comparison_of_integers(comparison: &str, ty: Type) -> Option<Form> {
    // Bits are compared for equality only, and have no 8-bit comparisons.
    let as_integer = match (ty.kind, comparison) {
        (Kind::Bits, "eq" | "ne") => Type::new(Kind::Unsigned, ty.bits),
        (Kind::Unsigned | Kind::Signed, _) => ty,
        _ => return None,
    };
    if ty.bits == 8 {
        return None;
    }
    let apply: fn(u64, u64) -> u64 = with_integer!(as_integer, T, {
        match (comparison, ty.kind) {
            ("eq", _) => |a, b| u64::from(a as T == b as T),
            ("ne", _) => |a, b| u64::from(a as T != b as T),
            ("lt", _) | ("lo", Kind::Unsigned) => |a, b| u64::from((a as T) < b as T),
            ("le", _) | ("ls", Kind::Unsigned) => |a, b| u64::from(a as T <= b as T),
            ("gt", _) | ("hi", Kind::Unsigned) => |a, b| u64::from(a as T > b as T),
            ("ge", _) | ("hs", Kind::Unsigned) => |a, b| u64::from(a as T >= b as T),
            _ => return None,
        }
    });
    Some(Form::new(Type::PRED, &[ty, ty], Apply::Two(apply)))
}

/// Readings of a float type of Rust from bits and to them, as functions `$of` and `$bits`.
macro_rules! with_float {
    ($ty:expr, $of:ident, $bits:ident, $body:expr) => {
        match $ty.bits {
            32 => {
                #[allow(unused_imports)]
                use single::{bits as $bits, of as $of};
                $body
            }
            64 => {
                #[allow(unused_imports)]
                use double::{bits as $bits, of as $of};
                $body
            }
            _ => return None,
        }
    };
}

mod single {
    pub fn of(bits: u64) -> f32 {
        f32::from_bits(bits as u32)
    }

    pub fn bits(value: f32) -> u64 {
        u64::from(value.to_bits())
    }
}

mod double {
    pub fn of(bits: u64) -> f64 {
        f64::from_bits(bits)
    }

    pub fn bits(value: f64) -> u64 {
        value.to_bits()
    }
}

fn arithmetic_of_floats(op: &str, ty: Type) -> Option<Form> {
    with_float!(ty, of, bits, {
        Some(
            match op {
                "add.rn" => Form::binary(ty, |a, b| bits(of(a) + of(b))),
                "sub.rn" => Form::binary(ty, |a, b| bits(of(a) - of(b))),
                "mul.rn" => Form::binary(ty, |a, b| bits(of(a) * of(b))),
                "div.rn" => Form::binary(ty, |a, b| bits(of(a) / of(b))),
                "rcp.rn" => Form::unary(ty, |a| bits(1.0 / of(a))),
                "fma.rn" => Form::new(ty, &[ty; 3], Apply::Three(|a, b, c| bits(of(a).mul_add(of(b), of(c))))),
                // Of a NaN and a number the number; -0 is less than 0.
                "min" => Form::binary(ty, |a, b| {
                    let (x, y) = (of(a), of(b));
                    if y.is_nan() || x < y || (x == y && x.is_sign_negative()) {
                        a
                    } else {
                        b
                    }
                }),
                "max" => Form::binary(ty, |a, b| {
                    let (x, y) = (of(a), of(b));
                    if y.is_nan() || x > y || (x == y && x.is_sign_positive()) {
                        a
                    } else {
                        b
                    }
                }),
                "abs" => Form::unary(ty, |a| bits(of(a).abs())),
                "neg" => Form::unary(ty, |a| bits(-of(a))),
                _ => return None,
            }
            .with_nan(NanIn::Whole),
        )
    })
}

fn float_comparison(comparison: &str, ty: Type) -> Option<Form> {
    let apply: fn(u64, u64) -> u64 = with_float!(ty, of, _bits, {
        match comparison {
            "eq" => |a, b| u64::from(of(a) == of(b)),
            "ne" => |a, b| u64::from(of(a) < of(b) || of(a) > of(b)),
            "lt" => |a, b| u64::from(of(a) < of(b)),
            "le" => |a, b| u64::from(of(a) <= of(b)),
            "gt" => |a, b| u64::from(of(a) > of(b)),
            "ge" => |a, b| u64::from(of(a) >= of(b)),
            // With u: also if one is a NaN.
            "equ" => |a, b| u64::from(!(of(a) < of(b) || of(a) > of(b))),
            "neu" => |a, b| u64::from(of(a) != of(b)),
            "ltu" => |a, b| u64::from(!matches!(of(a).partial_cmp(&of(b)), Some(o) if o.is_ge())),
            "leu" => |a, b| u64::from(!matches!(of(a).partial_cmp(&of(b)), Some(o) if o.is_gt())),
            "gtu" => |a, b| u64::from(!matches!(of(a).partial_cmp(&of(b)), Some(o) if o.is_le())),
            "geu" => |a, b| u64::from(!matches!(of(a).partial_cmp(&of(b)), Some(o) if o.is_lt())),
            "num" => |a, b| u64::from(!of(a).is_nan() && !of(b).is_nan()),
            "nan" => |a, b| u64::from(of(a).is_nan() || of(b).is_nan()),
            _ => return None,
        }
    });
    Some(Form::new(Type::PRED, &[ty, ty], Apply::Two(apply)))
}

/// `rest` is what stands between `cvt` and the source's type: a rounding and the destination's type.
fn conversion(rest: &str, src: Type) -> Option<Form> {
    let (rounding, name) = rest.rsplit_once('.')?;
    let dst = Type::of(name)?;
    let (apply, floating): (fn(u64) -> u64, bool) = match (rounding, dst.kind, dst.bits, src.kind, src.bits) {
        ("", Kind::Unsigned | Kind::Signed, _, Kind::Unsigned | Kind::Signed, _) => {
            (with_integer!(src, T, |a| a as T as u64), false)
        }
        (".rn", Kind::Float, 32, Kind::Unsigned | Kind::Signed, _) => {
            (with_integer!(src, T, |a| single::bits(a as T as f32)), false)
        }
        (".rn", Kind::Float, 64, Kind::Unsigned | Kind::Signed, _) => {
            (with_integer!(src, T, |a| (a as T as f64).to_bits()), false)
        }
        ("", Kind::Float, 32, Kind::Float, 16) => (|a| single::bits(f16_of(a)), true),
        (".rn", Kind::Float, 16, Kind::Float, 32) => (|a| f16_nearest(single::of(a)), true),
        (".rz", Kind::Float, 16, Kind::Float, 32) => (|a| f16_to_zero(single::of(a)), true),
        ("", Kind::Float, 64, Kind::Float, 32) => (|a| f64::from(single::of(a)).to_bits(), true),
        (".rn", Kind::Float, 32, Kind::Float, 64) => (|a| single::bits(f64::from_bits(a) as f32), true),
        _ => return None,
    };
    let mut form = Form::new(dst, &[src], Apply::One(apply));
    form.widens = src.kind != Kind::Float;
    form.nan = if floating { NanIn::Whole } else { NanIn::Nothing };
    Some(form)
}
