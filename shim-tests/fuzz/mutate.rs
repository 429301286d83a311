//! Inputs made of right ones by changes of the kinds that parsers stumble over. The same number gives the same input.

use strata::sim::Random;

/// Numbers that are the last or the first of something.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 53,
    i64::MAX as u64,
    u64::MAX,
];
/// Pieces of texts.
const TEXTS: [&str; 24] = [
    "-1",
    "1e308",
    "nan",
    "inf",
    "18446744073709551616",
    "\"",
    "\"\"\"",
    "'",
    "{",
    "}",
    "[",
    "]",
    "[[",
    "(",
    ")",
    ",",
    "=",
    "\n",
    "\\u{0}",
    "\u{fffd}",
    "#",
    ".",
    " ",
    "\0",
];
/// Inputs grow no longer than this, unless the seed is.
const MOST_BYTES: usize = 1 << 13;

/// The input with this number.
pub fn input(seeds: &[Vec<u8>], number: u64) -> Vec<u8> {
    let mut random = Random::new(number);
    let mut data = seeds[random.below(seeds.len() as u64) as usize].clone();
    let limit = data.len().max(MOST_BYTES);
    for _ in 0..=random.below(6) {
        change(&mut data, seeds, &mut random);
    }
    data.truncate(limit);
    data
}

fn place(data: &[u8], random: &mut Random) -> usize {
    random.below(data.len() as u64 + 1) as usize
}

/// A piece of the data: mostly a short one.
fn piece(data: &[u8], random: &mut Random) -> std::ops::Range<usize> {
    let start = place(data, random);
    let most = if random.one_in(4) { data.len() } else { 16 };
    start..(start + random.below(most as u64 + 1) as usize).min(data.len())
}

fn change(data: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = place(data, random);
    match random.below(11) {
        0 if at < data.len() => data[at] ^= 1 << random.below(8),
        1 if at < data.len() => data[at] = random.next_u64() as u8,
        2 => data.truncate(at),
        3 => {
            let cut = piece(data, random);
            data.drain(cut);
        }
        4 => {
            let twice = data[piece(data, random)].to_vec();
            data.splice(at..at, twice);
        }
        5 => {
            let text = TEXTS[random.below(TEXTS.len() as u64) as usize];
            let times = if random.one_in(16) { 200 } else { 1 };
            data.splice(at..at, text.repeat(times).into_bytes());
        }
        6 => {
            let number = random.pick(&NUMBERS).to_le_bytes();
            let len = (1usize << random.below(4)).min(data.len() - at);
            data[at..at + len].copy_from_slice(&number[..len]);
        }
        7 => exchange_number(data, at, random),
        8 => {
            let other = &seeds[random.below(seeds.len() as u64) as usize];
            let taken = other[piece(other, random)].to_vec();
            data.splice(at..at, taken);
        }
        9 => {
            let from = data[piece(data, random)].to_vec();
            let end = (at + from.len()).min(data.len());
            data.splice(at..end, from);
        }
        _ => {
            let len = random.below(9);
            data.splice(at..at, (0..len).map(|_| random.next_u64() as u8));
        }
    }
}

/// Another number in place of the first one written in digits behind a place.
fn exchange_number(data: &mut Vec<u8>, at: usize, random: &mut Random) {
    let Some(start) = data[at..].iter().position(u8::is_ascii_digit).map(|found| at + found) else { return };
    let len = data[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = match random.below(3) {
        0 => random.pick(&NUMBERS).to_string(),
        1 => random.below(100).to_string(),
        _ => TEXTS[random.below(5) as usize].to_string(),
    };
    data.splice(start..start + len, number.into_bytes());
}
