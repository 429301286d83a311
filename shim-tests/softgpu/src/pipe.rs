//! What streams of one priority share where a device has few queues: the work of all of them starts in the order in which
//! it was submitted, so a wait holds up the work of streams that have nothing to do with it. Drivers do so with
//! `CUDA_DEVICE_MAX_CONNECTIONS=1`, and with more streams than queues.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::Duration;

/// A queue of the device's.
#[derive(Default)]
pub struct Pipe {
    /// The next place that is given out, and the one whose work may start.
    places: Mutex<(u64, u64)>,
    moved: Condvar,
}

/// By context and priority.
type Pipes = HashMap<(usize, i32), Arc<Pipe>>;

static PIPES: LazyLock<Mutex<Pipes>> = LazyLock::new(Mutex::default);

/// The queue of a context's streams of this priority.
pub fn of(context: usize, priority: i32) -> Arc<Pipe> {
    PIPES.lock().unwrap().entry((context, priority)).or_default().clone()
}

/// A place in a queue. Those behind it go on when it has passed or is dropped.
pub struct Place {
    pipe: Arc<Pipe>,
    number: u64,
    passed: bool,
}

impl Pipe {
    /// The next place.
    pub fn enter(self: &Arc<Pipe>) -> Place {
        let mut places = self.places.lock().unwrap();
        places.0 += 1;
        Place { pipe: self.clone(), number: places.0 - 1, passed: false }
    }
}

impl Place {
    /// Waits until all before it have passed, or the waiter gives up.
    pub fn wait_unless(&self, gives_up: impl Fn() -> bool) {
        let mut places = self.pipe.places.lock().unwrap();
        while places.1 < self.number && !gives_up() {
            places = self.pipe.moved.wait_timeout(places, Duration::from_millis(5)).unwrap().0;
        }
    }

    /// Lets those behind it start.
    pub fn pass(&mut self) {
        if !std::mem::replace(&mut self.passed, true) {
            let mut places = self.pipe.places.lock().unwrap();
            places.1 = places.1.max(self.number + 1);
            self.pipe.moved.notify_all();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pass();
    }
}
