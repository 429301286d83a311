//! The kernels that wait for a word and raise it.

use super::beds::{shipped, Argument, Bed, Compiled, Grid};
use super::memory::Twice;
use ptx::{Device, Launch, Manner};
use std::cell::Cell;
use std::sync::mpsc::channel;
use std::time::Duration;
use strata::device::gpu::kernels::{self, Flag};

const ONE: Grid = Grid { blocks: 1, threads: 1, seed: 0 };

#[test]
fn a_wait_ends_when_the_word_has_come_so_far_and_not_before() {
    let Some(bed) = Compiled::get() else { return };
    let mut memory = Twice::new(4096);
    memory.write(0, &[0; 4096]);
    let at = memory.place(4, 0);
    let address = memory.address(at);
    let run = |kernel: &str, value: u32| {
        let flag = Argument::Flag(Flag { address, value, reserved: 0 });
        bed.run(kernel, flag, &memory, ONE).expect("a compiled kernel runs");
    };
    run(kernels::RAISE, u32::MAX - 1);
    assert_eq!(memory.load(address, 4), Ok(u128::from(u32::MAX - 1)));
    run(kernels::WAIT, u32::MAX - 1);
    run(kernels::WAIT, u32::MAX - 100);
    let (tell, told) = channel();
    // Past the largest value the count begins anew.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            run(kernels::WAIT, 2);
            tell.send(()).expect("the test listens");
        });
        run(kernels::RAISE, 1);
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "the wait ended early");
        run(kernels::RAISE, 3);
        told.recv_timeout(Duration::from_secs(60)).expect("the wait ends");
    });
}

/// One word, which another raises by 1 while a kernel sleeps.
struct Word {
    now: Cell<u32>,
    slept: Cell<u32>,
}

/// Where the word is.
const AT: u64 = 4096;

impl Device for Word {
    fn load(&self, address: u64, bytes: usize) -> Result<u128, String> {
        assert_eq!((address, bytes), (AT, 4));
        Ok(self.now.get().into())
    }

    fn store(&self, address: u64, bytes: usize, value: u128) -> Result<(), String> {
        assert_eq!((address, bytes), (AT, 4));
        self.now.set(value as u32);
        Ok(())
    }

    fn sleep(&self) -> Result<(), String> {
        self.now.set(self.now.get().wrapping_add(1));
        self.slept.set(self.slept.get() + 1);
        if self.slept.get() > 1000 {
            Err("it sleeps for ever".to_string())
        } else {
            Ok(())
        }
    }
}

/// What the word is after a kernel, and how often the kernel slept.
pub fn after(modules: &[ptx::Module], kernel: &str, word: u32, value: u32) -> Result<(u32, u32), String> {
    let device = Word { now: Cell::new(word), slept: Cell::new(0) };
    let found = modules.iter().find_map(|module| module.kernel(kernel)).ok_or("it is in no module")?;
    let params = Argument::Flag(Flag { address: AT, value, reserved: 0 }).bytes();
    let launch = Launch { kernel: found, params: &params, blocks: [1; 3], threads: [1; 3] };
    launch.run(&device, Manner { limit: 100_000, ..Manner::default() }).map_err(|trap| trap.to_string())?;
    Ok((device.now.get(), device.slept.get()))
}

/// Runs both kernels of flags on words of every kind.
pub fn check(modules: &[ptx::Module]) -> Result<(), String> {
    let mut words = vec![0, 1, 2, 100, 0x7fff_ffff, 0x8000_0000, u32::MAX - 1, u32::MAX];
    words.extend((0..20u32).map(|step| step.wrapping_mul(0x9e37_79b9)));
    for value in words {
        // Behind by so much.
        for behind in [0u32, 1, 2, 7] {
            let raised = after(modules, kernels::RAISE, value.wrapping_sub(behind), value)?;
            let waited = after(modules, kernels::WAIT, value.wrapping_sub(behind), value)?;
            if raised != (value, 0) || waited != (value, behind) {
                return Err(format!("{value}, {behind} behind: raised {raised:?}, waited {waited:?}"));
            }
        }
        for ahead in [1, 5, 0x7fff_ffff] {
            let waited = after(modules, kernels::WAIT, value.wrapping_add(ahead), value)?;
            if waited != (value.wrapping_add(ahead), 0) {
                return Err(format!("{value}, {ahead} ahead: waited {waited:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn interpreted_flags_are_raised_and_waited_for() {
    check(shipped()).unwrap_or_else(|why| panic!("{why}"));
}
