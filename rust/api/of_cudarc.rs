//! Use of memory slices and streams of the crate cudarc in transfers and streams of this crate.

use crate::buffer::{Element, End, Keep};
use crate::context::Context;
use crate::stream::Stream;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use mpgpu_contexts::Error;
use mpgpu_core::topology::DeviceId;
use std::sync::Arc;

/// Returns an error if the context has virtual devices (host backend), because virtual devices cannot access memory of cudarc.
fn check(ctx: &Context) -> Result<(), Error> {
    if ctx.backend() == "cuda" {
        return Ok(());
    }
    Err(Error::NotSupported(
        "memory and streams of cudarc are on GPUs, but this context uses virtual devices on CPU threads: create a \
         context on the CUDA backend"
            .into(),
    ))
}

impl End {
    /// Creates a source or destination from all elements of a cudarc slice, and keeps the slice alive. Blocks until the work in the stream
    /// in which the slice was allocated has finished.
    ///
    /// cudarc does not track executions of plans. Use a common stream ([`Stream::of_cudarc`]) or waits to order the executions with work of
    /// cudarc.
    ///
    /// # Errors
    ///
    /// Returns an error on the host backend. Also returns errors of the driver.
    pub fn of_cudarc<T: Element>(ctx: &Context, slice: &Arc<CudaSlice<T>>) -> Result<End, Error> {
        check(ctx)?;
        let stream = slice.stream();
        stream.synchronize().map_err(|error| Error::NotSupported(format!("the stream of a cudarc slice has failed: {error}")))?;
        let address = slice.device_ptr(stream).0;
        let bytes = slice.num_bytes() as u64;
        Ok(End { address, device: DeviceId::AUTO, bytes, context: Some(ctx.clone()), keep: Some(Keep::new(slice.clone(), true)) })
    }
}

impl Stream {
    /// Creates a stream handle that refers to a cudarc stream, and keeps that stream alive.
    ///
    /// # Errors
    ///
    /// Returns an error on the host backend.
    pub fn of_cudarc(ctx: &Context, stream: &Arc<CudaStream>) -> Result<Stream, Error> {
        check(ctx)?;
        Ok(Stream::kept(ctx, stream.cu_stream().addr(), stream.clone()))
    }
}
