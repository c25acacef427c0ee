// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_STREAM_HPP
#define MPGPU_STREAM_HPP

/// @file
/// Streams, in which work on a device runs in order.

#include <mpgpu/context.hpp>
#include <mpgpu/event.hpp>

#include <utility>

namespace mpgpu {

/// Stream of one device: its work runs in order, concurrently with work in other streams.
///
/// Owns its C handle and is move-only. The destructor does not wait; enqueued work still finishes. Several threads may
/// call `const` functions concurrently.
class stream {
  public:
    /// Constructs an empty stream. Every call on it reports `status::invalid_handle`. So does the conversion to
    /// `stream_view`, which would otherwise name the default stream.
    stream() noexcept = default;

    /// Creates a stream on the device `where`. Throws `argument_error`, `driver_error`.
    stream(const context &ctx, device where, on_error failed = {}) {
        mp_stream_t made = nullptr;
        const mp_status_t outcome = mp_stream_create(ctx.get(), where.id(), &made);
        handle_ = handle_type(made, {ctx.get()});
        failed.report(outcome);
    }

    /// Returns the view that `plan::execute` and `event::record` take. The stream must outlive it. Throws
    /// `argument_error` if the stream is empty.
    operator stream_view() const & {
        if (!handle_) {
            detail::fail_empty("stream");
        }
        return handle_.get();
    }
    operator stream_view() const && = delete;

    /// Blocks the calling thread until all work enqueued so far has finished. Throws `argument_error`, `driver_error`,
    /// and `peer_gone` once if a wait in this stream, or in a stream that it has waited for, was abandoned because a
    /// peer exited.
    void synchronize(on_error failed = {}) const { failed.report(mp_stream_synchronize(context_handle(), get())); }

    /// Enqueues a call of `task()` on a CPU thread after all earlier work in this stream. Later work waits for the
    /// call.
    ///
    /// The library keeps a copy of `task` until the call. While the stream is being captured, the graph owns the copy:
    /// it is called at every launch, and kept until the graph and all of its executables are destroyed. As with
    /// `cudaLaunchHostFunc`, neither `task` nor its destructor may call this library or CUDA, and an exception that
    /// leaves it ends the program. Throws `argument_error`, `driver_error`, `not_supported` in a capture if the driver
    /// is older than CUDA 11.3.
    template <class Task> void launch_host(Task &&task, on_error failed = {}) const {
        failed.report(detail::launch_host(context_handle(), get(), std::forward<Task>(task)));
    }

    /// Makes work enqueued from now on wait for the work that is currently recorded in `ev`. Does not block. Throws
    /// `argument_error`, `driver_error`.
    void wait(const event &ev, on_error failed = {}) const {
        failed.report(mp_stream_wait_event(context_handle(), get(), ev.get()));
    }

    /// Returns the C handle, which this object still owns. On the CUDA backend it is a `cudaStream_t`.
    [[nodiscard]] mp_stream_t get() const noexcept { return handle_.get(); }
    /// True if this object owns a stream.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    [[nodiscard]] mp_context_t context_handle() const noexcept { return handle_.owner().context; }

    using handle_type = detail::handle<mp_stream_t, detail::destroyed_in<mp_stream_destroy>>;
    handle_type handle_;
};

} // namespace mpgpu

#endif // MPGPU_STREAM_HPP
