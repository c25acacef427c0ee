// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EVENT_HPP
#define MPGPU_EVENT_HPP

/// @file
/// Events.

#include <mpgpu/context.hpp>

namespace mpgpu {

/// A point in a stream that other streams, of any device, and the host can wait for. Stands for nothing until recorded.
///
/// Owns it, and is move-only. Its destructor does not wait: streams that wait for the event still do.
class event {
  public:
    /// No event: every call reports `status::invalid_handle`.
    event() noexcept = default;

    /// Makes an event. Throws `argument_error`, `driver_error`.
    explicit event(const context &ctx, on_error failed = {}) {
        mp_event_t made = nullptr;
        const mp_status_t outcome = mp_event_create(ctx.get(), &made);
        handle_ = handle_type(made, {ctx.get()});
        failed.report(outcome);
    }

    /// From now on the event stands for all work enqueued in `stream` so far. Throws `argument_error`, `driver_error`.
    void record(stream_view stream, on_error failed = {}) {
        failed.report(mp_event_record(context_handle(), get(), stream.get()));
    }

    /// Blocks the calling thread until what this stands for has finished. Throws `argument_error`, `driver_error`,
    /// `peer_gone` as `stream::synchronize` does, until it is recorded in a stream that was told.
    void synchronize(on_error failed = {}) const { failed.report(mp_event_synchronize(context_handle(), get())); }

    /// The C handle (one of mpgpu's own, no `cudaEvent_t`, also on the CUDA backend), still owned by this object.
    [[nodiscard]] mp_event_t get() const noexcept { return handle_.get(); }
    /// Whether this owns an event.
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
