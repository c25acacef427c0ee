//! Grants the bytes of staging rings to one execution at a time, in the order in which streams reach the executions.
//!
//! The order of submission could deadlock: the stream of an earlier execution may wait for work behind a later execution in another stream.
//! An execution gets all of its bytes together and waits for no other execution after that.

use super::node::{Node, Work};
use crate::sync::{Mutex, lock};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of an execution's rings.
pub(super) type RingBytes = SmallVec<[Range<u64>; 4]>;

/// Executions whose streams have reached them and that have not ended, in the order of arrival.
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

    /// Releases `node`, which has not been released, once no earlier execution claims any of these bytes.
    pub(super) fn claim(&self, node: &Arc<Node<W>>, bytes: &RingBytes) {
        lock(&self.0).push_back(Claim { node: Arc::clone(node), bytes: bytes.clone(), is_granted: false });
        self.grant();
    }

    /// Gives the bytes of an execution that has ended to the next ones.
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
