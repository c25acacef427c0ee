// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HPP
#define MPGPU_HPP

/// @file
/// The C++ API of mpgpu: headers over mpgpu.h and nothing else. C++17, no CUDA headers, no library of its own. This one
/// includes them all but those of MPI and of halo exchanges.
///
/// @code
/// mpgpu::context ctx;
/// mpgpu::buffer<float> a(ctx, mpgpu::device::gpu(0), n), b(ctx, mpgpu::device::gpu(1), n);
/// mpgpu::plan halo(ctx, {mpgpu::make_transfer(b, a)});
/// mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
/// mpgpu::request done = halo.execute(stream);
/// done.synchronize();
/// @endcode
///
/// Errors. A function that can fail throws `mpgpu::error` or one of the classes derived from it. Given a
/// `std::error_code` as its last argument it reports there instead, see `on_error`; a constructor that reports so
/// leaves the object empty. `mpgpu::last_error()` has the details either way. Destructors never throw. Without
/// exceptions (`-fno-exceptions`) the throwing form prints the error to `stderr` and calls `std::abort`.
///
/// Ownership. `context`, `node`, `messenger`, `plan`, `request`, `stream`, `event`, `buffer`, `signal_counters`,
/// `imported_memory` and `registered_memory` own one thing each and can be moved, not copied. A moved-from object is
/// empty, and so is one that is default-constructed, but for a `context`, which then makes one: it may be destroyed,
/// assigned to and tested; a call on it reports `status::invalid_handle`. Objects made from a context may outlive it:
/// they are then invalid, which is reported and never dereferenced.
///
/// Waiting. `synchronize` blocks the calling thread. `wait` never does: it makes later work of a stream wait.
///
/// Threads. The library may be called from any thread. Of one object, `const` functions may run at the same time; the
/// others need the caller's own synchronisation, as everywhere in the standard library.
///
/// Units are bytes and seconds, except that sizes of `buffer<T>` and of views count elements.

#include <mpgpu/buffer.hpp>
#include <mpgpu/collective.hpp>
#include <mpgpu/context.hpp>
#include <mpgpu/device.hpp>
#include <mpgpu/error.hpp>
#include <mpgpu/event.hpp>
#include <mpgpu/imported_memory.hpp>
#include <mpgpu/log.hpp>
#include <mpgpu/message.hpp>
#include <mpgpu/mpgpu.h>
#include <mpgpu/node.hpp>
#include <mpgpu/plan.hpp>
#include <mpgpu/registered_memory.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/signal.hpp>
#include <mpgpu/signal_counters.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/stream.hpp>
#include <mpgpu/stream_view.hpp>
#include <mpgpu/transfer.hpp>

/// Everything of mpgpu.
namespace mpgpu {}

#endif // MPGPU_HPP
