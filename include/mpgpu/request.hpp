// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_REQUEST_HPP
#define MPGPU_REQUEST_HPP

/// @file
/// Requests: executions, sends and receives that the program can wait for.

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

/// Deleter that destroys a request without blocking. The execution continues.
struct request_owner {
    void operator()(mp_request_t value) const noexcept { static_cast<void>(mp_request_destroy(&value)); }
};

/// Access to a request's handle, for functions that create requests.
struct request_access;

/// Type of the function that is passed to `request::then`.
using request_function = std::function<void(std::error_code)>;

/// Calls the function that was passed to `request::then`, and then destroys it.
inline void call_request_function(void *user, mp_status_t outcome) {
    const std::unique_ptr<request_function> function(static_cast<request_function *>(user));
    (*function)(make_error_code(static_cast<status>(outcome)));
}

} // namespace detail

/// Request: an execution of a plan that the program can wait for.
///
/// Move-only. As with `MPI_Request_free`, destroying a pending request does not block and does not stop the copies.
/// They continue in stream order. (A destructor that waited would add a hidden host synchronisation to time loops that
/// use only streams for ordering.) Before the host frees or reads the memory, it must synchronise with the request, the
/// stream or an event.
class request {
  public:
    /// Constructs an empty request.
    request() noexcept = default;

    /// Blocks the calling thread until the execution has ended. The request is then empty. Returns immediately if the
    /// request is already empty.
    ///
    /// Throws `driver_error`. Throws `data_corruption` if copied data differ from the source (checked only with
    /// `MPGPU_VERIFY=bytes`). Throws `peer_gone` in the cases in which `stream::synchronize` throws it.
    void synchronize(on_error failed = {}) { failed.report(mp_wait(handle_.address(), nullptr)); }

    /// Returns true if the execution has ended; the request is then empty. Does not block. Throws the exceptions of
    /// `synchronize`.
    [[nodiscard]] bool test(on_error failed = {}) {
        std::int32_t done = 0;
        failed.report(mp_test(handle_.address(), &done, nullptr));
        return done != 0;
    }

    /// Makes all work that is enqueued in `stream` from now on wait until the execution has ended. Does not block. If
    /// the execution fails, the stream continues nevertheless, and `synchronize` reports the error. Throws
    /// `argument_error`, `not_supported`.
    void wait(stream_view stream, on_error failed = {}) const {
        failed.report(mp_stream_wait_request(stream.get(), handle_.get()));
    }

    /// Calls `function` once with the final status when the operation has ended, on the context's thread
    /// `mpgpu-callback`. Does not block. `function` must not throw. The request may be destroyed before the call.
    /// Throws `argument_error`, `not_supported`.
    void then(std::function<void(std::error_code)> function, on_error failed = {}) const {
        auto owned = std::make_unique<detail::request_function>(std::move(function));
        const mp_status_t outcome = mp_request_set_callback(handle_.get(), detail::call_request_function, owned.get());
        if (outcome == MP_SUCCESS) {
            static_cast<void>(owned.release()); // the callback now owns it
        }
        failed.report(outcome);
    }

    /// Returns true if the request is not empty.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
    /// Returns the C handle, which this object continues to own.
    [[nodiscard]] mp_request_t get() const noexcept { return handle_.get(); }

  private:
    friend struct detail::request_access;
    friend class plan;
    friend class messenger;
    friend class message_request;
    detail::handle<mp_request_t, detail::request_owner> handle_;
};

} // namespace mpgpu

#endif // MPGPU_REQUEST_HPP
