//! Allows one execution at a time to use a range of a staging ring, in the order in which streams reach the executions.
//!
//! The order of submission could deadlock: the stream of an execution that was submitted earlier may wait for work behind a later execution
//! in another stream. An execution gets all of its ranges at the same time, and waits for no other execution after that.

use super::node::{Node, Work};
use crate::sync::{Mutex, lock};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Byte ranges of staging rings that an execution uses.
pub(super) type RingBytes = SmallVec<[Range<u64>; 4]>;

/// Executions that use staging rings: those that their streams have reached and that have not ended, in the order of arrival.
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

    /// Releases `node` as soon as no earlier execution uses any of these byte ranges. `node` must not have been released before.
    pub(super) fn claim(&self, node: &Arc<Node<W>>, bytes: &RingBytes) {
        lock(&self.0).push_back(Claim { node: Arc::clone(node), bytes: bytes.clone(), is_granted: false });
        self.grant();
    }

    /// Ends the use of byte ranges by an execution, and releases the executions that can use them next.
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
        // The lock is released first, because a node may end immediately and then take it.
        drop(claims);
        granted.iter().for_each(Node::release);
    }
}

fn overlap(a: &[Range<u64>], b: &[Range<u64>]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end))
}
