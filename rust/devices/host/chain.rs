//! Stream order: a chain of nodes, known by its last one.

use super::node::{Node, Work};
use crate::sync::{Mutex, lock};
use std::sync::Arc;

/// The order of one stream. Whatever is appended starts after everything appended before.
#[derive(Debug)]
pub(super) struct Chain<W: Work> {
    tail: Mutex<Option<Arc<Node<W>>>>,
}

impl<W: Work> Chain<W> {
    pub(super) fn new() -> Self {
        Chain { tail: Mutex::new(None) }
    }

    /// Appends `node` and releases it: it starts after the chain's tail and whatever else precedes it by now.
    pub(super) fn append(&self, node: &Arc<Node<W>>) {
        // The lock covers only the exchange. A thread that appends next may find `node` as its tail before `node` has its own
        // predecessor; that is harmless, because `node` cannot finish before it is released.
        let previous = lock(&self.tail).replace(Arc::clone(node));
        if let Some(previous) = previous {
            previous.precede(node);
        }
        node.release();
    }

    /// The last node; `None` if everything has finished. A finished tail is forgotten, with the memory it holds.
    pub(super) fn tail(&self) -> Option<Arc<Node<W>>> {
        let mut tail = lock(&self.tail);
        if tail.as_ref().is_some_and(|tail| tail.is_finished()) {
            *tail = None;
        }
        tail.clone()
    }
}
