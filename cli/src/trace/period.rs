//! Which calls of a program are one step of it, by their repetition.
#![forbid(unsafe_code)]

/// A part of a list that repeats until its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period {
    /// Where the first whole repetition begins.
    pub start: usize,
    /// How many entries each has.
    pub len: usize,
    /// How many there are.
    pub times: usize,
}

/// The shortest period with which the longest part of a list repeats, up to its end; it must cover half of the list. What is
/// left of a repetition that the end has cut off may be missing.
pub fn find<T: PartialEq>(list: &[T]) -> Option<Period> {
    let mut best: Option<Period> = None;
    // Where the program was interrupted in a step, the end is shorter.
    for len in 1..=list.len() / 2 {
        let repeats = (0..list.len() - len).rev().take_while(|&at| list[at] == list[at + len]).count();
        let times = (repeats + len) / len;
        let covered = times * len;
        if times < 2 || 2 * covered < list.len() {
            continue;
        }
        if best.is_none_or(|best| covered > best.len * best.times) {
            best = Some(Period { start: list.len() - covered, len, times });
        }
        if covered + len > list.len() {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_period_that_covers_most_is_found() {
        let find = |text: &str| find(text.as_bytes()).map(|period| (period.start, period.len, period.times));
        assert_eq!(find("abcabcabc"), Some((0, 3, 3)));
        assert_eq!(find("xyabcabcabc"), Some((2, 3, 3)), "a prologue is no step");
        assert_eq!(find("aabaabaab"), Some((0, 3, 3)), "not the two equal ones in it");
        assert_eq!(find("aaaa"), Some((0, 1, 4)));
        assert_eq!(find("abcdefgh"), None);
        assert_eq!(find("abcdefghhh"), None, "three of ten are no program");
        assert_eq!(find(""), None);
        assert_eq!(find("a"), None);
    }
}
