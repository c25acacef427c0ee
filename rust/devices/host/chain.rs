//! Implements the execution order of a stream as a chain of graph nodes. Only the last node of the chain is stored.

use super::node::{Node, Work};
use crate::sync::{Mutex, lock};
use std::sync::Arc;

/// Chain of the graph nodes of one stream, in stream order. Each appended node starts after all nodes that were appended before it.
#[derive(Debug)]
pub(super) struct Chain<W: Work> {
    tail: Mutex<Option<Arc<Node<W>>>>,
}

impl<W: Work> Chain<W> {
    pub(super) fn new() -> Self {
        Chain { tail: Mutex::new(None) }
    }

    /// Appends `node` to the chain and releases it, that is, allows it to start. The node then starts after the chain's previous last node
    /// and after its other predecessors.
    pub(super) fn append(&self, node: &Arc<Node<W>>) {
        self.append_row(node, None);
    }

    /// Appends a sequence of nodes that starts with `first` and ends with `last`, and releases both, that is, allows them to start. If
    /// `last` is `None`, the sequence consists of `first` alone. Otherwise, `last` must be a direct or indirect successor of `first`.
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

    /// Returns the last node of the chain, or `None` if all nodes of the chain have finished. The function drops a finished last node
    /// together with its memory.
    pub(super) fn tail(&self) -> Option<Arc<Node<W>>> {
        let mut tail = lock(&self.tail);
        if tail.as_ref().is_some_and(|tail| tail.is_finished()) {
            *tail = None;
        }
        tail.clone()
    }
}
