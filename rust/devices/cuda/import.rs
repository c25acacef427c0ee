//! Maps memory that another process has exported.
//!
//! The memory is mapped through the GPU of the calling thread, or through another GPU that is already in use. A rank therefore does not
//! create a context on each GPU of its neighbours.

use super::chunk::Chunk;
use super::export::{DESCRIPTOR, IPC, MEMORY_FILE, POOL};
use super::parts::Core;
use super::sharing::{Source, pin};
use crate::backend::Shared;
use crate::backend::{Allocation, BackendError};
use crate::ipc::segment::Mapping;

impl Core {
    /// Maps memory that another process has exported, and returns its address.
    pub fn map(&self, shared: &Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        self.gpus.check_alive()?;
        let (base, source) = match (shared.form, &shared.descriptor) {
            (MEMORY_FILE, Some(file)) => {
                let mapping = Mapping::new(file, allocation.bytes).map_err(|errno| BackendError::Driver {
                    what: "mapping memory of another process".into(),
                    reason: std::io::Error::from(errno).to_string(),
                    code: i64::from(errno.raw_os_error()),
                })?;
                pin(&self.gpus, mapping.base(), allocation.bytes)?;
                (mapping.base(), Source::Pinned(mapping))
            }
            (Shared::MAPPED_BY_PROGRAM, _) => self.sharing.adopt(&self.gpus, shared, allocation)?,
            (IPC, _) => self.sharing.open(&self.gpus, &shared.payload, allocation)?,
            (DESCRIPTOR, Some(descriptor)) => {
                let bytes = allocation.bytes.max(shared.offset);
                let chunk = Chunk::import(&self.gpus, descriptor, bytes, allocation.device.0 as usize)?;
                (chunk.base, Source::Mapped(chunk))
            }
            (POOL, Some(descriptor)) => {
                let owner = allocation.device.0 as usize;
                let gpu = self.gpus.mapping_gpu(owner);
                let base = self.sharing.pools.open(&self.gpus, gpu, (descriptor, shared.offset, &shared.payload), owner)?;
                (base, Source::OfPool(gpu, shared.offset))
            }
            (form, _) => {
                return Err(BackendError::NotSupported(format!(
                    "the memory is shared by method {form}, which this version of mpgpu does not know"
                )));
            }
        };
        self.sharing.insert(Allocation { base, ..*allocation }, source);
        Ok(base)
    }
}
