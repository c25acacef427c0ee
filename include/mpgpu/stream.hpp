// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_STREAM_HPP
#define MPGPU_STREAM_HPP

/// @file
/// Streams, in which work on a device runs in order.

#include <mpgpu/context.hpp>
#include <mpgpu/event.hpp>

#include <utility>

namespace mpgpu {

/// Stream of one device. Its work runs in order, and concurrently with work in other streams.
///
/// Owns its C handle and is move-only. The destructor does not block; work that is already enqueued still finishes.
/// Several threads may call `const` functions concurrently.
class stream {
  public:
    /// Constructs an empty stream. Every function called on it reports `status::invalid_handle`. The conversion to
    /// `stream_view` reports it too, because a null handle would refer to the default stream.
    stream() noexcept = default;

    /// Creates a stream on the device `where`. Throws `argument_error`, `driver_error`.
    stream(const context &ctx, device where, on_error failed = {}) {
        mp_stream_t made = nullptr;
        const mp_status_t outcome = mp_stream_create(ctx.get(), where.id(), &made);
        handle_ = handle_type(made, {ctx.get()});
        failed.report(outcome);
    }

    /// Returns a view of this stream, which functions such as `plan::execute` and `event::record` accept. The stream
    /// must outlive the view. Throws `argument_error` if the stream is empty.
    operator stream_view() const & {
        if (!handle_) {
            detail::fail_empty("stream");
        }
        return handle_.get();
    }
    operator stream_view() const && = delete;

    /// Blocks the calling thread until all work that is enqueued in this stream so far has finished.
    ///
    /// Throws `argument_error`, `driver_error`. Throws `peer_gone`, once, if a wait was abandoned because a process
    /// exited. The wait may be in this stream, or in another stream for which this stream has waited.
    void synchronize(on_error failed = {}) const { failed.report(mp_stream_synchronize(context_handle(), get())); }

    /// Enqueues a call of `task()` on a CPU thread, after all earlier work in this stream and before all later work.
    /// Does not block.
    ///
    /// The library keeps a copy of `task` until the call. If the stream is being captured, the graph owns the copy.
    /// Every launch of the graph calls the copy. The copy is destroyed after the graph and all of its executable
    /// graphs. As with `cudaLaunchHostFunc`, `task` and its destructor must not call this library or CUDA. An exception
    /// that leaves `task` terminates the program.
    ///
    /// Throws `argument_error`, `driver_error`. Throws `not_supported` in a capture if the driver is older than CUDA
    /// 11.3.
    template <class Task> void launch_host(Task &&task, on_error failed = {}) const {
        failed.report(detail::launch_host(context_handle(), get(), std::forward<Task>(task)));
    }

    /// Makes all work that is enqueued in this stream from now on wait for the work that is recorded in `ev` now. Does
    /// not block. Throws `argument_error`, `driver_error`.
    void wait(const event &ev, on_error failed = {}) const {
        failed.report(mp_stream_wait_event(context_handle(), get(), ev.get()));
    }

    /// Returns the C handle, which this object continues to own. On the CUDA backend it is a `cudaStream_t`.
    [[nodiscard]] mp_stream_t get() const noexcept { return handle_.get(); }
    /// Returns true if this object owns a stream.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    [[nodiscard]] mp_context_t context_handle() const noexcept { return handle_.owner().context; }

    using handle_type = detail::handle<mp_stream_t, detail::destroyed_in<mp_stream_destroy>>;
    handle_type handle_;
};

} // namespace mpgpu

#endif // MPGPU_STREAM_HPP
