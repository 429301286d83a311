//! The messages that have been sent and not received, channel by channel.
//!
//! There may be millions of channels, most of them for one message: all share one store.
#![forbid(unsafe_code)]

use super::{Message, NONE};

/// A channel's messages: a list in the store.
#[derive(Debug, Clone, Copy)]
struct Queue {
    first: u32,
    last: u32,
    len: u32,
    /// The receiver waits for the next message.
    awaited: bool,
}

/// All channels.
#[derive(Debug)]
pub(super) struct Queues {
    queues: Vec<Queue>,
    /// Messages, each with the number of the next one of its channel or, where there is none, of the next free entry.
    store: Vec<(Option<Message>, u32)>,
    free: u32,
}

impl Queues {
    /// Empty channels.
    pub fn new(channels: usize) -> Queues {
        let empty = Queue { first: NONE, last: NONE, len: 0, awaited: false };
        Queues { queues: vec![empty; channels], store: Vec::new(), free: NONE }
    }

    /// Whether a channel takes another message; see [`super::Options`].
    pub fn has_room(&self, channel: u32, capacity: usize) -> bool {
        let queue = self.queues[channel as usize];
        (queue.len as usize) < capacity || (queue.awaited && queue.len == 0)
    }

    /// The message that is to be received next.
    pub fn front(&self, channel: u32) -> Option<&Message> {
        self.store.get(self.queues[channel as usize].first as usize)?.0.as_ref()
    }

    /// Adds a message.
    pub fn push(&mut self, channel: u32, message: Message) {
        let entry = (Some(message), NONE);
        let at = match self.store.get_mut(self.free as usize) {
            Some(free) => {
                let at = self.free;
                self.free = std::mem::replace(free, entry).1;
                at
            }
            None => {
                self.store.push(entry);
                self.store.len() as u32 - 1
            }
        };
        let queue = &mut self.queues[channel as usize];
        match self.store.get_mut(queue.last as usize) {
            Some(last) => last.1 = at,
            None => queue.first = at,
        }
        *queue = Queue { last: at, len: queue.len + 1, awaited: false, ..*queue };
    }

    /// Takes the next message, or notes that it is awaited; and says whether that is news to the sender.
    pub fn pop(&mut self, channel: u32) -> (Option<Message>, bool) {
        let queue = &mut self.queues[channel as usize];
        let at = queue.first;
        let Some((message, next)) = self.store.get_mut(at as usize) else {
            return (None, !std::mem::replace(&mut queue.awaited, true));
        };
        queue.first = std::mem::replace(next, self.free);
        queue.len -= 1;
        if queue.len == 0 {
            queue.last = NONE;
        }
        queue.awaited = false;
        self.free = at;
        (message.take(), true)
    }
}
