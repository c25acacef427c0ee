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

/// Destroys a request without waiting; the execution continues.
struct request_owner {
    void operator()(mp_request_t value) const noexcept { static_cast<void>(mp_request_destroy(&value)); }
};

/// Type of the function that is passed to `request::then`.
using request_function = std::function<void(std::error_code)>;

/// Calls the function that was passed to `request::then`, and destroys it.
inline void call_request_function(void *user, mp_status_t outcome) {
    const std::unique_ptr<request_function> function(static_cast<request_function *>(user));
    (*function)(make_error_code(static_cast<status>(outcome)));
}

} // namespace detail

/// Request for one execution of a plan, which can be waited for.
///
/// Move-only. Destroying a pending request does not wait and does not stop the copies, as with `MPI_Request_free`. The
/// copies continue in stream order. A destructor that waited would add a hidden host synchronisation to time loops that
/// are ordered by streams alone. Before the host frees or reads the memory, it must synchronize with the request, the
/// stream or an event.
class request {
  public:
    /// Constructs an empty request.
    request() noexcept = default;

    /// Blocks the calling thread until all bytes have arrived. Returns immediately if the request is empty. The request
    /// is then empty. Throws `driver_error`; `data_corruption` if the execution found wrong bytes (checked only with
    /// `MPGPU_VERIFY=bytes`); and `peer_gone` in the cases in which `stream::synchronize` throws it.
    void synchronize(on_error failed = {}) { failed.report(mp_wait(handle_.address(), nullptr)); }

    /// Returns true if all bytes have arrived, without blocking. The request is then empty. Throws the exceptions of
    /// `synchronize`.
    [[nodiscard]] bool test(on_error failed = {}) {
        std::int32_t done = 0;
        failed.report(mp_test(handle_.address(), &done, nullptr));
        return done != 0;
    }

    /// Makes later work in `stream` wait until all bytes have arrived, without blocking the host. If the request ends
    /// with an error, which `synchronize` reports, the stream continues. Throws `argument_error`, `not_supported`.
    void wait(stream_view stream, on_error failed = {}) const {
        failed.report(mp_stream_wait_request(stream.get(), handle_.get()));
    }

    /// Calls `function` once with the outcome, on the thread `mpgpu-callback` of the context. `function` must not
    /// throw. The request may be destroyed before the call. Throws `argument_error`, `not_supported`.
    void then(std::function<void(std::error_code)> function, on_error failed = {}) const {
        auto owned = std::make_unique<detail::request_function>(std::move(function));
        const mp_status_t outcome = mp_request_set_callback(handle_.get(), detail::call_request_function, owned.get());
        if (outcome == MP_SUCCESS) {
            static_cast<void>(owned.release()); // owned by the callback
        }
        failed.report(outcome);
    }

    /// True if the request is not empty.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
    /// Returns the C handle, which this object still owns.
    [[nodiscard]] mp_request_t get() const noexcept { return handle_.get(); }

  private:
    friend class plan;
    friend class messenger;
    friend class message_request;
    detail::handle<mp_request_t, detail::request_owner> handle_;
};

} // namespace mpgpu

#endif // MPGPU_REQUEST_HPP
