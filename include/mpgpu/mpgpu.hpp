// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HPP
#define MPGPU_HPP

/// @file
/// C++ API of mpgpu. The headers need only mpgpu.h: C++17, no CUDA headers, no additional library. This header includes
/// all other C++ headers except entry.hpp, notify.hpp, and the headers for MPI and for halo exchanges.
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
/// Errors. A function that can fail throws `mpgpu::error` or a class derived from it. If a `std::error_code` is passed
/// as the last argument, the function stores the error there instead (`on_error`), and a constructor that fails leaves
/// the object empty. In both cases `mpgpu::last_error()` returns the details. Destructors never throw. Without
/// exceptions (`-fno-exceptions`), a failure that would throw prints the error to `stderr` and calls `std::abort`.
///
/// Ownership. A `context`, `node`, `messenger`, `plan`, `request`, `stream`, `event`, `buffer`, `signal_counters`,
/// `imported_memory`, `registered_memory` or `mapped_file` owns one object each. It can be moved, not copied.
/// Moved-from and default-constructed objects are empty, except that a default-constructed `context` creates a context.
/// An empty object may be destroyed, assigned to and tested. Other functions called on it report
/// `status::invalid_handle`. Objects that were created with a context may outlive it. They are then invalid, and
/// functions called on them report an error.
///
/// Waiting. Functions named `synchronize` block the calling thread. Functions named `wait` never block: they make later
/// work in a stream wait.
///
/// Threads. The library may be called from any thread. As in the standard library, `const` functions of one object may
/// run concurrently, and other functions need external synchronisation.
///
/// Units are bytes and seconds, except that sizes of `buffer<T>` and of views are in elements.

#include <mpgpu/buffer.hpp>
#include <mpgpu/collective.hpp>
#include <mpgpu/container.hpp>
#include <mpgpu/context.hpp>
#include <mpgpu/device.hpp>
#include <mpgpu/error.hpp>
#include <mpgpu/event.hpp>
#include <mpgpu/imported_memory.hpp>
#include <mpgpu/log.hpp>
#include <mpgpu/mapped_file.hpp>
#include <mpgpu/message.hpp>
#include <mpgpu/mpgpu.h>
#include <mpgpu/node.hpp>
#include <mpgpu/pieces.hpp>
#include <mpgpu/plan.hpp>
#include <mpgpu/registered_memory.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/signal.hpp>
#include <mpgpu/signal_counters.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/stream.hpp>
#include <mpgpu/stream_view.hpp>
#include <mpgpu/transfer.hpp>

/// All C++ types and functions of mpgpu.
namespace mpgpu {}

#endif // MPGPU_HPP
