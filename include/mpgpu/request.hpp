// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_REQUEST_HPP
#define MPGPU_REQUEST_HPP

/// @file
/// Requests: executions, sends and receives that can be waited for.

#include <mpgpu/detail/handle.hpp>
#include <mpgpu/error.hpp>
#include <mpgpu/stream_view.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <system_error>
#include <utility>

namespace mpgpu {

namespace detail {

/// Forgets a request: the execution goes on.
struct request_owner {
    void operator()(mp_request_t value) const noexcept { static_cast<void>(mp_request_destroy(&value)); }
};

/// What `request::then` was given.
using request_function = std::function<void(std::error_code)>;

/// Calls what `request::then` was given, and destroys it.
inline void call_request_function(void *user, mp_status_t outcome) {
    const std::unique_ptr<request_function> function(static_cast<request_function *>(user));
    (*function)(make_error_code(static_cast<status>(outcome)));
}

} // namespace detail

/// One execution of a plan, to wait for or to ask about.
///
/// Move-only. Destroying a request that is still pending forgets it, as `MPI_Request_free` does: the copies go on,
/// ordered by their stream, and nothing blocks. A destructor that waited would put a host synchronisation, which nobody
/// wrote, into a time loop that is ordered by streams alone. Whoever frees or reads the memory on the host
/// synchronizes, with the request, the stream or an event.
class request {
  public:
    /// Nothing to wait for.
    request() noexcept = default;

    /// Blocks the calling thread until all bytes have arrived; returns at once when empty. Empty afterwards. Throws
    /// `driver_error`, `data_corruption` where the execution met one, `peer_gone` as `stream::synchronize` does.
    void synchronize(on_error failed = {}) { failed.report(mp_wait(handle_.address(), nullptr)); }

    /// Whether all bytes have arrived, without blocking; empty once they have. Throws as `synchronize` does.
    [[nodiscard]] bool test(on_error failed = {}) {
        std::int32_t done = 0;
        failed.report(mp_test(handle_.address(), &done, nullptr));
        return done != 0;
    }

    /// Makes later work of `stream` wait until all bytes have arrived; the host does not wait. The stream goes on where
    /// the request ends with an error, which `synchronize` reports. Throws `argument_error`, `not_supported`.
    void wait(stream_view stream, on_error failed = {}) const {
        failed.report(mp_stream_wait_request(stream.get(), handle_.get()));
    }

    /// Calls `function` once with the outcome, on the thread `mpgpu-callback` of the context; it must not throw. The
    /// request may be destroyed before. Throws `argument_error`, `not_supported`.
    void then(std::function<void(std::error_code)> function, on_error failed = {}) const {
        auto owned = std::make_unique<detail::request_function>(std::move(function));
        const mp_status_t outcome = mp_request_set_callback(handle_.get(), detail::call_request_function, owned.get());
        if (outcome == MP_SUCCESS) {
            static_cast<void>(owned.release()); // the callback's
        }
        failed.report(outcome);
    }

    /// Whether there is still something to wait for.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
    /// The C handle, still owned by this object.
    [[nodiscard]] mp_request_t get() const noexcept { return handle_.get(); }

  private:
    friend class plan;
    friend class messenger;
    friend class message_request;
    detail::handle<mp_request_t, detail::request_owner> handle_;
};

} // namespace mpgpu

#endif // MPGPU_REQUEST_HPP
