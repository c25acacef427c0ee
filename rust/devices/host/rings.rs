//! Gives executions exclusive use of byte ranges of staging rings (ring buffers of staging memory), in the order in which streams reach the
//! executions.
//!
//! The order of submission could cause a deadlock, because an execution that was submitted first may be in a stream that waits for work
//! behind an execution submitted later. An execution gets all of its byte ranges at the same time, and waits for no other execution after
//! that.

use super::node::{Node, Work};
use crate::sync::{Mutex, lock};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Byte ranges of staging rings that one execution uses.
pub(super) type RingBytes = SmallVec<[Range<u64>; 4]>;

/// Queue of the executions that use staging rings. It contains the executions that their streams have reached and that have not ended, in
/// the order of arrival.
#[derive(Debug)]
pub(super) struct Rings<W: Work>(Mutex<VecDeque<Claim<W>>>);

#[derive(Debug)]
struct Claim<W: Work> {
    node: Arc<Node<W>>,
    bytes: RingBytes,
    is_granted: bool,
}

impl<W: Work> Rings<W> {
    pub(super) fn new() -> Self {
        Rings(Mutex::new(VecDeque::new()))
    }

    /// Requests exclusive use of byte ranges for the execution of `node`. Releases `node`, that is, allows it to start, as soon as no
    /// earlier execution uses any of these ranges. `node` must not have been released before.
    pub(super) fn claim(&self, node: &Arc<Node<W>>, bytes: &RingBytes) {
        lock(&self.0).push_back(Claim { node: Arc::clone(node), bytes: bytes.clone(), is_granted: false });
        self.grant();
    }

    /// Ends an execution's exclusive use of its byte ranges, and allows the executions that are next in the queue to start.
    pub(super) fn give_back(&self, node: &Arc<Node<W>>) {
        lock(&self.0).retain(|claim| !Arc::ptr_eq(&claim.node, node));
        self.grant();
    }

    fn grant(&self) {
        let mut granted: SmallVec<[Arc<Node<W>>; 4]> = SmallVec::new();
        let mut claims = lock(&self.0);
        for at in 0..claims.len() {
            let claim = &claims[at];
            if !claim.is_granted && !claims.range(..at).any(|earlier| overlap(&earlier.bytes, &claim.bytes)) {
                granted.push(Arc::clone(&claim.node));
                claims[at].is_granted = true;
            }
        }
        // The lock is released first, because a node may end immediately and then acquire the lock.
        drop(claims);
        granted.iter().for_each(Node::release);
    }
}

fn overlap(a: &[Range<u64>], b: &[Range<u64>]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end))
}
