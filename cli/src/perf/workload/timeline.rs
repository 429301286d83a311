//! A step laid on a timeline: one rank's computing, and one queue of calls for each of its groups.
//!
//! A call begins when it has been issued and the calls of its group before it have ended, and takes what a [`Pricer`]
//! says. Computing goes on meanwhile, until a wait for a call that has not ended: the time that it stands still is
//! *exposed* and counts for that call. So the step takes the computing and everything exposed.
//!
//! ```text
//! program   |compute|wait.|compute    |..wait|
//! group a        [---all_gather---]  [-reduce_scatter-]
//! ```
//!
//! All ranks are taken to be equally far, and calls of different groups not to slow each other down. Where the last rank computes longer
//! than this one ([`Program::late`]), a call begins when that rank has issued it, and what this one waits for it is exposed, too.
#![forbid(unsafe_code)]

use super::super::collective::Kind;
use super::program::{Call, Op, Program};
use std::collections::HashMap;
use strata::error::Result;
use strata::sim::price::Price;
use strata::sim::skew::Skew;

/// Says what a call costs.
pub trait Pricer {
    /// What the call costs by itself.
    fn price(&mut self, program: &Program, call: &Call) -> Result<Price>;
}

/// Where a step's time goes, in microseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// From the beginning of the step to its end.
    pub step: f64,
    /// For each row of the program: how long its calls were carried out.
    pub busy: Vec<f64>,
    /// For each row of the program: how long the program waited for its calls.
    pub exposed: Vec<f64>,
}

impl Times {
    /// All that is exposed.
    pub fn all_exposed(&self) -> f64 {
        self.exposed.iter().sum()
    }
}

/// Lays a step on the timeline.
pub fn lay_out(program: &Program, pricer: &mut dyn Pricer) -> Result<Times> {
    let mut prices: HashMap<(Kind, usize, usize, Option<Skew>), Price> = HashMap::new();
    let mut times = Times { step: 0.0, busy: vec![0.0; program.rows.len()], exposed: vec![0.0; program.rows.len()] };
    let mut free = vec![0.0f64; program.groups.len()];
    // By how much the last rank is behind.
    let mut behind = 0.0f64;
    let mut begins = vec![0.0f64; program.calls.len()];
    let key = |call: &Call| (call.kind, call.group, program.bytes_of(call), call.skew);
    for op in &program.ops {
        match *op {
            Op::Compute(_, us) => {
                times.step += us;
                behind += us * program.late;
            }
            Op::Issue(index) => {
                let call = &program.calls[index];
                let ns = match prices.get(&key(call)) {
                    Some(price) => price.ns,
                    None => prices.entry(key(call)).or_insert(pricer.price(program, call)?).ns,
                };
                let us = ns / 1e3;
                begins[index] = (times.step + behind).max(free[call.group]);
                free[call.group] = begins[index] + us;
                times.busy[call.row] += us;
            }
            Op::Wait(index) | Op::WaitUntil(index, _) => {
                let call = &program.calls[index];
                let bytes = if let Op::WaitUntil(_, bytes) = *op { bytes } else { usize::MAX };
                let ns = prices.get(&key(call)).map_or(0.0, |price| price.final_ns(bytes));
                let waited = (begins[index] + ns / 1e3 - times.step).max(0.0);
                times.exposed[call.row] += waited;
                times.step += waited;
                behind = (behind - waited).max(0.0);
            }
        }
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::super::file::Workload;
    use super::super::program::Setting;
    use super::*;

    /// One microsecond a call and one for each byte.
    struct Linear(usize);

    impl Pricer for Linear {
        fn price(&mut self, program: &Program, call: &Call) -> Result<Price> {
            self.0 += 1;
            let bytes = program.bytes_of(call);
            let front = vec![(bytes / 3, 4e3), (2 * bytes / 3, 7e3)];
            Ok(Price { front, ..Price::by_law(1e3 + 1e3 * bytes as f64) })
        }
    }

    fn times(steps: &str) -> (Times, usize) {
        times_with(steps, 0.0)
    }

    fn times_with(steps: &str, late: f64) -> (Times, usize) {
        let head = "title = \"t\"\nsource = []\ndtype = \"int8\"\n\
             grid = [{ name = \"a\", size = 2 }, { name = \"b\", size = \"rest\" }]\n\
             [[phase]]\nname = \"p\"\nsteps = [\n";
        let workload = Workload::parse(&format!("{head}{steps}\n]")).unwrap();
        let setting = Setting { world: 4, flops: 1e6, scale: 1.0, compute: true, set: Vec::new(), sizes: None };
        let program = Program { late, ..Program::new(&workload, &setting).unwrap() };
        let mut pricer = Linear(0);
        let times = lay_out(&program, &mut pricer).unwrap();
        assert!((times.step - program.compute_us() - times.all_exposed()).abs() < 1e-9, "nothing else takes time");
        (times, pricer.0)
    }

    #[test]
    fn a_call_that_is_waited_for_at_once_is_wholly_exposed() {
        let (times, _) = times("{ us = 5 }, { call = \"all_reduce\", group = \"a\", count = 9 }, { us = 5 }");
        assert_eq!(times, Times { step: 20.0, busy: vec![10.0], exposed: vec![10.0] });
    }

    #[test]
    fn computing_hides_a_call_as_far_as_it_goes() {
        let steps = |us: usize| {
            format!("{{ call = \"all_reduce\", group = \"a\", count = 9, overlap = \"x\" }}, {{ us = {us} }}, {{ wait = \"x\" }}")
        };
        assert_eq!(times(&steps(4)).0, Times { step: 10.0, busy: vec![10.0], exposed: vec![6.0] });
        assert_eq!(times(&steps(10)).0, Times { step: 10.0, busy: vec![10.0], exposed: vec![0.0] });
        assert_eq!(times(&steps(30)).0, Times { step: 30.0, busy: vec![10.0], exposed: vec![0.0] });
    }

    #[test]
    fn what_the_last_rank_is_behind_is_exposed_once() {
        // The last rank comes 2 us after this one, which then is no longer ahead; computing of 8 us hides the second call but for 2 us.
        let steps = "{ us = 4 }, { call = \"all_reduce\", group = \"a\", count = 9 },\
                     { call = \"all_reduce\", group = \"a\", count = 9, overlap = \"x\" }, { us = 8 }, { wait = \"x\" }";
        let (times, _) = times_with(steps, 0.5);
        assert_eq!(times, Times { step: 4.0 + 12.0 + 10.0, busy: vec![20.0], exposed: vec![12.0 + 2.0] });
    }

    #[test]
    fn calls_of_a_group_queue_and_groups_do_not() {
        // Both of 10 us are issued at 0; the second ends at 20 in the same group, at 10 in another.
        let steps = |second: &str| {
            format!(
                "{{ call = \"all_reduce\", group = \"a\", count = 9, overlap = \"x\" }},\
                 {{ call = \"all_gather\", group = \"{second}\", count = 9, overlap = \"y\" }},\
                 {{ us = 3 }}, {{ wait = \"x\" }}, {{ wait = \"y\" }}"
            )
        };
        // Two blocks of 5 bytes: 11 us.
        assert_eq!(times(&steps("a")).0, Times { step: 21.0, busy: vec![10.0, 11.0], exposed: vec![7.0, 11.0] });
        assert_eq!(times(&steps("b")).0, Times { step: 11.0, busy: vec![10.0, 11.0], exposed: vec![7.0, 1.0] });
    }

    #[test]
    fn computing_follows_the_front_of_a_call() {
        // Final: 3 bytes after 4 us, 6 after 7, all 9 after 10.
        let call = "{ call = \"all_reduce\", group = \"a\", count = 9, overlap = \"x\" },";
        let layer = |until: usize| format!("{{ wait = \"x\", until = {until} }}, {{ us = 2 }},");
        let layers = [2, 3, 5, 9].map(layer).concat();
        // Waits 4, then computes 4 us, waits for nothing at 8, computes to 10, and from there to 12.
        let (times, _) = times(&format!("{call} {layers} {{ wait = \"x\" }}"));
        assert_eq!(times, Times { step: 12.0, busy: vec![10.0], exposed: vec![4.0] });
    }

    #[test]
    fn a_prefetch_hides_all_but_the_first() {
        // Layers of 15 us; weights of 10 us: gathered at 0..10, 10..20, and 25..35 behind the issue at 25.
        let gather = "{ call = \"all_reduce\", group = \"a\", count = 9, overlap = \"w\" },";
        let layer = "{ wait = \"w\" }, { us = 15 },";
        let (times, priced) = times(&format!("{gather} {{ repeat = 2, steps = [{gather} {layer}] }}, {layer}"));
        assert_eq!(times, Times { step: 10.0 + 3.0 * 15.0, busy: vec![30.0], exposed: vec![10.0] });
        assert_eq!(priced, 1, "equal calls are priced once");
    }
}
