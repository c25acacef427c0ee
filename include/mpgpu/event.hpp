// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EVENT_HPP
#define MPGPU_EVENT_HPP

/// @file
/// Events: points in streams that other streams and the host can wait for.

#include <mpgpu/context.hpp>

namespace mpgpu {

/// Event: a point in a stream that the host and other streams, of any device, can wait for. An event that was never
/// recorded counts as completed.
///
/// Owns its C handle and is move-only. The destructor does not block. Streams that already wait for the event continue
/// to wait.
class event {
  public:
    /// Constructs an empty event. Every function called on it reports `status::invalid_handle`.
    event() noexcept = default;

    /// Creates an event. Throws `argument_error`, `driver_error`.
    explicit event(const context &ctx, on_error failed = {}) {
        mp_event_t made = nullptr;
        const mp_status_t outcome = mp_event_create(ctx.get(), &made);
        handle_ = handle_type(made, {ctx.get()});
        failed.report(outcome);
    }

    /// Records all work that is enqueued in `stream` so far. This replaces an earlier record. Throws `argument_error`,
    /// `driver_error`.
    void record(stream_view stream, on_error failed = {}) {
        failed.report(mp_event_record(context_handle(), get(), stream.get()));
    }

    /// Blocks the calling thread until the recorded work has finished.
    ///
    /// Throws `argument_error`, `driver_error`. Throws `peer_gone` in the cases in which `stream::synchronize` throws
    /// it. Each call throws `peer_gone`, until the event is recorded again in a stream that has already reported the
    /// error.
    void synchronize(on_error failed = {}) const { failed.report(mp_event_synchronize(context_handle(), get())); }

    /// Returns the C handle, which this object continues to own. It is not a `cudaEvent_t`, even on the CUDA backend.
    [[nodiscard]] mp_event_t get() const noexcept { return handle_.get(); }
    /// Returns true if this object owns an event.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    [[nodiscard]] mp_context_t context_handle() const noexcept { return handle_.owner().context; }

    using handle_type = detail::handle<mp_event_t, detail::destroyed_in<mp_event_destroy>>;
    handle_type handle_;
};

inline void context::wait(stream_view stream, const event &ev, on_error failed) const {
    failed.report(mp_stream_wait_event(get(), stream.get(), ev.get()));
}

} // namespace mpgpu

#endif // MPGPU_EVENT_HPP
