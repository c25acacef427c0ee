// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_STREAM_HPP
#define MPGPU_STREAM_HPP

/// @file
/// Streams.

#include <mpgpu/context.hpp>
#include <mpgpu/event.hpp>

#include <utility>

namespace mpgpu {

/// A stream of one device: work in it runs in order, and at the same time as work in other streams.
///
/// Owns it, and is move-only. Its destructor does not wait: work that is enqueued still finishes. `const` functions may
/// be called from several threads at once.
class stream {
  public:
    /// No stream: every call reports `status::invalid_handle`, and so does the view, which must not be taken for the
    /// default stream.
    stream() noexcept = default;

    /// Makes a stream of `where`. Throws `argument_error`, `driver_error`.
    stream(const context &ctx, device where, on_error failed = {}) {
        mp_stream_t made = nullptr;
        const mp_status_t outcome = mp_stream_create(ctx.get(), where.id(), &made);
        handle_ = handle_type(made, {ctx.get()});
        failed.report(outcome);
    }

    /// The view that `plan::execute` and `event::record` take. The stream must outlive it. Throws `argument_error` when
    /// empty.
    operator stream_view() const & {
        if (!handle_) {
            detail::fail_empty("stream");
        }
        return handle_.get();
    }
    operator stream_view() const && = delete;

    /// Blocks the calling thread until everything enqueued so far has finished. Throws `argument_error`,
    /// `driver_error`, and `peer_gone`, once for each process that has ended while a stream of the context waited for
    /// its signals.
    void synchronize(on_error failed = {}) const { failed.report(mp_stream_synchronize(context_handle(), get())); }

    /// Enqueues a call of `task()` on a CPU thread after all earlier work in this stream; later work waits for it. A
    /// copy of `task` is kept until then. While the stream is being captured, the copy belongs to the graph: it is
    /// called at every launch, and kept until the graph and all that was instantiated of it are gone. As with
    /// `cudaLaunchHostFunc`, neither `task` nor its destructor may call this library or CUDA, and an exception that
    /// leaves it ends the program. Throws `argument_error`, `driver_error`, `not_supported` in a capture where the
    /// driver is older than CUDA 11.3.
    template <class Task> void launch_host(Task &&task, on_error failed = {}) const {
        failed.report(detail::launch_host(context_handle(), get(), std::forward<Task>(task)));
    }

    /// Work enqueued from now on starts after what `ev` stands for now. Does not block. Throws `argument_error`,
    /// `driver_error`.
    void wait(const event &ev, on_error failed = {}) const {
        failed.report(mp_stream_wait_event(context_handle(), get(), ev.get()));
    }

    /// The C handle (a `cudaStream_t` on the CUDA backend), still owned by this object.
    [[nodiscard]] mp_stream_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a stream.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    [[nodiscard]] mp_context_t context_handle() const noexcept { return handle_.owner().context; }

    using handle_type = detail::handle<mp_stream_t, detail::destroyed_in<mp_stream_destroy>>;
    handle_type handle_;
};

} // namespace mpgpu

#endif // MPGPU_STREAM_HPP
