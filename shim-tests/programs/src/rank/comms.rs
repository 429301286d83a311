//! Making and ending communicators, as one rank does it.

use super::{Pending, Rank, Trouble, PATIENCE};
use crate::library::{Comm, Config, Id, IN_PROGRESS, SUCCESS};
use crate::program::{End, Members};
use std::ffi::c_int;
use std::time::{Duration, Instant};

fn missing(what: &str) -> Trouble {
    Trouble::Failed { comm: None, code: -1, text: format!("the library has no {what}") }
}

impl Rank<'_> {
    fn members(&self, comm: usize) -> &Members {
        &self.program.comms[comm]
    }

    fn rank_in(&self, comm: usize) -> usize {
        self.members(comm).rank_of(self.me).expect("a member")
    }

    fn config(&self, comm: usize) -> Config {
        Config::new(!self.members(comm).nonblocking[self.rank_in(comm)])
    }

    fn fresh_id(&self, comm: usize) -> Result<Id, Trouble> {
        let mut id = Id([0; 128]);
        // SAFETY: the pointer must be writable; because it is a local of ours.
        let code = unsafe { (self.library.get_unique_id)(&raw mut id) };
        self.must(comm, "ncclGetUniqueId", code)?;
        Ok(id)
    }

    fn handed_ids(&self, comm: usize, count: usize) -> Result<Vec<Id>, Trouble> {
        let ids = self.board.ids(comm, count, self.patience(comm));
        ids.map_err(|text| Trouble::Failed { comm: Some(comm), code: -1, text })
    }

    /// Keeps a new communicator once it is there, and asks it for its ranks.
    fn keep(&mut self, comm: usize, what: &str, handle: Comm, code: i32) -> Result<(), Trouble> {
        self.must(comm, what, code)?;
        if handle.is_null() {
            return Err(Trouble::Wrong(format!("{what} returned success and no communicator")));
        }
        self.comms[comm] = handle;
        let (mut nranks, mut rank) = (-1, -1);
        // SAFETY: the communicator must be alive; because it was just made.
        let code = unsafe { (self.library.count)(handle, &raw mut nranks) };
        self.must(comm, "ncclCommCount", code)?;
        // SAFETY: the communicator must be alive; because it was just made.
        let code = unsafe { (self.library.user_rank)(handle, &raw mut rank) };
        self.must(comm, "ncclCommUserRank", code)?;
        let wanted = (self.members(comm).ranks.len() as c_int, self.rank_in(comm) as c_int);
        if (nranks, rank) != wanted {
            return Err(Trouble::Wrong(format!("{what} made rank {rank} of {nranks} and not {wanted:?}")));
        }
        Ok(())
    }

    pub fn init(&mut self, comm: usize, ids: usize, config: bool) -> Result<(), Trouble> {
        let (rank, nranks) = (self.rank_in(comm), self.members(comm).ranks.len());
        if rank == 0 {
            let made: Result<Vec<Id>, Trouble> = (0..ids).map(|_| self.fresh_id(comm)).collect();
            self.board.put_ids(comm, &made?);
        }
        let mut found = self.handed_ids(comm, ids)?;
        let mut options = self.config(comm);
        let mut handle = std::ptr::null_mut();
        let (n, r) = (nranks as c_int, rank as c_int);
        let squeezed = self.squeeze();
        let code = if ids > 1 {
            let init = self.library.init_scalable.ok_or_else(|| missing("ncclCommInitRankScalable"))?;
            // SAFETY: the ids must be there; because the list has `ids` of them.
            unsafe { init(&raw mut handle, n, r, ids as c_int, found.as_mut_ptr(), &raw mut options) }
        } else if config || self.members(comm).nonblocking[rank] {
            // SAFETY: the pointers must be valid; because they are locals of ours.
            unsafe { (self.library.init_rank_config)(&raw mut handle, n, found[0], r, &raw mut options) }
        } else {
            // SAFETY: the pointers must be valid; because they are locals of ours.
            unsafe { (self.library.init_rank)(&raw mut handle, n, found[0], r) }
        };
        let code = self.settle_handle(handle, code);
        drop(squeezed);
        self.keep(comm, "ncclCommInitRank", handle, code)
    }

    pub fn init_all(&mut self, comm: usize) -> Result<(), Trouble> {
        let (rank, nranks) = (self.rank_in(comm), self.members(comm).ranks.len());
        if rank == 0 {
            let mut handles = vec![std::ptr::null_mut(); nranks];
            // SAFETY: there must be room for all; because the list is that long.
            let code = unsafe { (self.library.init_all)(handles.as_mut_ptr(), nranks as c_int, std::ptr::null()) };
            if code != SUCCESS {
                handles.clear();
            }
            let handles = handles.into_iter().map(|handle| handle as usize).collect();
            self.handed.lock().expect("no thread panics").insert(comm, handles);
            self.must(comm, "ncclCommInitAll", code)?;
        }
        let end = Instant::now() + PATIENCE;
        let handle = loop {
            if let Some(handles) = self.handed.lock().expect("no thread panics").get(&comm) {
                break handles.get(rank).map(|&handle| handle as Comm);
            }
            if Instant::now() > end {
                break None;
            }
            std::thread::sleep(Duration::from_micros(200));
        };
        match handle {
            Some(handle) => self.keep(comm, "ncclCommInitAll", handle, SUCCESS),
            None => {
                let text = "nobody made the communicators".to_string();
                Err(Trouble::Failed { comm: Some(comm), code: -1, text })
            }
        }
    }

    /// Waits for a call that makes a communicator out of another one.
    fn derived(&self, parent: usize, handle: *const Comm, code: i32) -> (Comm, i32) {
        let code = self.settle(parent, code);
        // Written by another thread where nobody waits.
        // SAFETY: the pointer must be valid; because it is a local of the caller's.
        let made = unsafe { handle.read_volatile() };
        let state = if made.is_null() || code != SUCCESS { code } else { self.settle_handle(made, IN_PROGRESS) };
        if state == SUCCESS || made.is_null() {
            return (made, state);
        }
        // It may have been made, and then what it was made of failed.
        // SAFETY: the communicator must be alive; because nobody else knows it.
        unsafe { (self.library.abort)(made) };
        (std::ptr::null_mut(), state)
    }

    pub fn split(
        &mut self,
        parent: usize,
        colors: &[Option<usize>],
        keys: &[i32],
        children: &[usize],
    ) -> Result<(), Trouble> {
        let rank = self.rank_in(parent);
        let child = colors[rank].map(|color| children[color]);
        if self.lost[parent] {
            child.into_iter().for_each(|child| self.lost[child] = true);
            return Ok(());
        }
        let mut handle = Box::new(std::ptr::null_mut());
        let mut config = child.map_or_else(|| Config::new(true), |child| self.config(child));
        let color = colors[rank].map_or(-1, |color| color as c_int * 3);
        let (comm, at) = (self.comms[parent], &raw mut *handle);
        let squeezed = self.squeeze();
        // SAFETY: the pointers must be valid until the call has ended; because it is waited for below.
        let code = unsafe { (self.library.split)(comm, color, keys[rank], at, &raw mut config) };
        let (made, code) = self.derived(parent, at, code);
        drop(squeezed);
        if code != SUCCESS {
            child.into_iter().for_each(|child| self.lost[child] = true);
        }
        match child {
            Some(child) => self.keep_derived(parent, child, "ncclCommSplit", made, code),
            None => {
                self.must(parent, "ncclCommSplit", code)?;
                match made.is_null() {
                    true => Ok(()),
                    false => Err(Trouble::Wrong("ncclCommSplit without a color made a communicator".into())),
                }
            }
        }
    }

    /// A failure is the parent's, too, where the parent is what failed.
    fn keep_derived(&mut self, parent: usize, child: usize, what: &str, made: Comm, code: i32) -> Result<(), Trouble> {
        if code != SUCCESS {
            self.lost[child] = true;
            return self.must(parent, what, code);
        }
        self.keep(child, what, made, code)
    }

    pub fn shrink(&mut self, parent: usize, child: usize, abort: bool) -> Result<(), Trouble> {
        if self.lost[parent] {
            self.lost[child] = true;
            return Ok(());
        }
        let shrink = self.library.shrink.ok_or_else(|| missing("ncclCommShrink"))?;
        let kept = &self.members(child).ranks;
        let old = &self.members(parent).ranks;
        let mut excluded: Vec<c_int> =
            (0..old.len()).filter(|&r| !kept.contains(&old[r])).map(|r| r as c_int).collect();
        let mut handle = Box::new(std::ptr::null_mut());
        let mut config = self.config(child);
        let (comm, at, count) = (self.comms[parent], &raw mut *handle, excluded.len() as c_int);
        let flags = c_int::from(abort);
        // SAFETY: the pointers must be valid until the call has ended; because it is waited for below.
        let code = unsafe { shrink(comm, excluded.as_mut_ptr(), count, at, &raw mut config, flags) };
        let (made, code) = self.derived(parent, at, code);
        self.keep_derived(parent, child, "ncclCommShrink", made, code)
    }

    pub fn grow(&mut self, parent: usize, child: usize) -> Result<(), Trouble> {
        let grow = self.library.grow.ok_or_else(|| missing("ncclCommGrow"))?;
        let nranks = self.members(child).ranks.len() as c_int;
        let mut config = self.config(child);
        let mut handle = Box::new(std::ptr::null_mut());
        let at = &raw mut *handle;
        let Some(old) = self.members(parent).rank_of(self.me) else {
            let id = self.handed_ids(child, 1)?[0];
            let rank = self.rank_in(child) as c_int;
            // SAFETY: the pointers must be valid until the call has ended; because it is waited for below.
            let code = unsafe { grow(std::ptr::null_mut(), nranks, &raw const id, rank, at, &raw mut config) };
            // SAFETY: it must be valid; because it is a local of ours.
            let made = unsafe { at.read_volatile() };
            let code = self.settle_handle(made, code);
            return self.keep(child, "ncclCommGrow", made, code);
        };
        if self.lost[parent] {
            self.lost[child] = true;
            return Ok(());
        }
        let mut id = Id([0; 128]);
        let mut given = std::ptr::null();
        let comm = self.comms[parent];
        if old == 0 {
            let make = self.library.comm_unique_id.ok_or_else(|| missing("ncclCommGetUniqueId"))?;
            // SAFETY: the pointer must be writable; because it is a local of ours.
            let code = unsafe { make(comm, &raw mut id) };
            self.must(parent, "ncclCommGetUniqueId", code)?;
            self.board.put_ids(child, &[id]);
            given = &raw const id;
        }
        // SAFETY: the pointers must be valid until the call has ended; because it is waited for below.
        let code = unsafe { grow(comm, nranks, given, -1, at, &raw mut config) };
        let (made, code) = self.derived(parent, at, code);
        self.keep_derived(parent, child, "ncclCommGrow", made, code)
    }

    pub fn suspend(&mut self, comm: usize) -> Result<(), Trouble> {
        let (Some(suspend), Some(resume)) = (self.library.suspend, self.library.resume) else { return Ok(()) };
        self.settle_pending(|_| true)?;
        // What ran may have failed.
        if self.lost[comm] {
            return Ok(());
        }
        let handle = self.comms[comm];
        // SAFETY: the communicator must be alive and nothing run on it; because it is, and what ran was waited for.
        let code = unsafe { suspend(handle, 1) };
        self.must(comm, "ncclCommSuspend", code)?;
        // SAFETY: the communicator must be alive; because only this thread ends it. It was suspended above.
        let code = unsafe { resume(handle) };
        self.must(comm, "ncclCommResume", code)
    }

    /// All ranks have ended their calls, so that nobody's is cut off.
    pub fn revoke(&mut self, op: usize, comm: usize) -> Result<(), Trouble> {
        let Some(revoke) = self.library.revoke else { return Ok(()) };
        self.settle_pending(|_| true)?;
        let patience = if self.tainted[comm] { Duration::from_secs(1) } else { PATIENCE };
        let met = self.board.meet(op, self.members(comm).ranks.len(), patience);
        if self.lost[comm] {
            return Ok(());
        }
        let met = if self.tainted[comm] { Ok(()) } else { met };
        met.map_err(|text| Trouble::Failed { comm: Some(comm), code: -1, text })?;
        // SAFETY: the communicator must be alive; because only this thread ends it.
        let code = unsafe { revoke(self.comms[comm], 0) };
        self.must(comm, "ncclCommRevoke", code)?;
        let mut data = [0u32; 4];
        let at = data.as_mut_ptr().cast();
        // SAFETY: the buffer must have a number; because it has four.
        let code = unsafe { (self.library.bcast)(at, 1, 2, 0, self.comms[comm], std::ptr::null_mut()) };
        match code {
            SUCCESS | IN_PROGRESS => Err(Trouble::Wrong(format!("a call on a revoked communicator returned {code}"))),
            _ => Ok(()),
        }
    }

    /// Whether a communicator is finalized while its calls are under way: all of them have ended then.
    fn finalizes_early(&self, comm: usize) -> bool {
        self.program.fault.is_none() && self.gpu.is_none() && (self.me + comm).is_multiple_of(2)
    }

    pub fn end(&mut self, comm: usize, how: End) -> Result<(), Trouble> {
        let finalizes = matches!(how, End::FinalizeDestroy | End::FinalizeKeep);
        let early = finalizes && self.finalizes_early(comm);
        if !early {
            self.settle_pending(|_| true)?;
        }
        if self.lost[comm] || self.comms[comm].is_null() {
            return Ok(());
        }
        let handle = self.comms[comm];
        if finalizes {
            // SAFETY: the communicator must be alive; because only this thread ends it.
            let code = unsafe { (self.library.finalize)(handle) };
            let code = self.settle(comm, code);
            self.must(comm, "ncclCommFinalize", code)?;
        }
        if early {
            // Nobody has waited for the streams yet.
            let mut mine = self.pending.iter().filter(|call| call.comm == comm);
            mine.try_for_each(Pending::check).map_err(Trouble::Wrong)?;
            self.settle_pending(|_| true)?;
        }
        match how {
            End::Keep | End::FinalizeKeep => Ok(()),
            End::Destroy | End::FinalizeDestroy => {
                self.comms[comm] = std::ptr::null_mut();
                // SAFETY: the communicator must be alive and not be used again; because only this thread ends it, and
                // it was taken out of the list.
                let code = unsafe { (self.library.destroy)(handle) };
                self.must(comm, "ncclCommDestroy", code)
            }
            End::Abort => {
                self.comms[comm] = std::ptr::null_mut();
                // SAFETY: the communicator must be alive and not be used again; because only this thread ends it, and
                // it was taken out of the list.
                let code = unsafe { (self.library.abort)(handle) };
                self.must(comm, "ncclCommAbort", code)
            }
        }
    }
}
