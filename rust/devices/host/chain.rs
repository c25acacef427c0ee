//! Implements stream order as a chain of nodes. Only the last node is stored.

use super::node::{Node, Work};
use crate::sync::{Mutex, lock};
use std::sync::Arc;

/// Order of one stream. An appended node starts after all nodes appended before it.
#[derive(Debug)]
pub(super) struct Chain<W: Work> {
    tail: Mutex<Option<Arc<Node<W>>>>,
}

impl<W: Work> Chain<W> {
    pub(super) fn new() -> Self {
        Chain { tail: Mutex::new(None) }
    }

    /// Appends `node` and releases the node, which then starts after the chain's tail and after its other predecessors.
    pub(super) fn append(&self, node: &Arc<Node<W>>) {
        self.append_row(node, None);
    }

    /// Appends a row of nodes that ends with `last`, or only `first`. The last one must follow the first by way of others. Releases both.
    pub(super) fn append_row(&self, first: &Arc<Node<W>>, last: Option<&Arc<Node<W>>>) {
        // The lock covers only the exchange. A thread that appends next may find `last` as its tail before the predecessor of `first` is
        // linked. This is harmless, because `last` cannot finish before `first` is released.
        let previous = lock(&self.tail).replace(Arc::clone(last.unwrap_or(first)));
        if let Some(previous) = previous {
            previous.precede(first);
        }
        first.release();
        last.into_iter().for_each(Node::release);
    }

    /// Returns the last node, or `None` if everything has finished. A finished tail is dropped together with its memory.
    pub(super) fn tail(&self) -> Option<Arc<Node<W>>> {
        let mut tail = lock(&self.tail);
        if tail.as_ref().is_some_and(|tail| tail.is_finished()) {
            *tail = None;
        }
        tail.clone()
    }
}
