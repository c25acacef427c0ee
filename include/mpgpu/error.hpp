// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_ERROR_HPP
#define MPGPU_ERROR_HPP

/// @file
/// Errors: `status` (the statuses of the C API, for `std::error_code`), the exceptions, and `on_error`, which selects
/// how a function reports errors.

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
/// 1 if this translation unit is compiled with exceptions, otherwise 0.
#define MPGPU_EXCEPTIONS 1
#else
/// 1 if this translation unit is compiled with exceptions, otherwise 0.
#define MPGPU_EXCEPTIONS 0
#endif

namespace mpgpu {

/// Statuses of the C API. Compare a `std::error_code` that this library has set with one of them.
enum class status : int {
    success = MP_SUCCESS,                           ///< the call succeeded
    invalid_argument = MP_ERROR_INVALID_ARGUMENT,   ///< an argument or option has an invalid value
    invalid_handle = MP_ERROR_INVALID_HANDLE,       ///< the object is empty or destroyed
    invalid_device = MP_ERROR_INVALID_DEVICE,       ///< the context has no such device
    invalid_pointer = MP_ERROR_INVALID_POINTER,     ///< an address is unknown or on another device
    overlap = MP_ERROR_OVERLAP,                     ///< transfers of a batch overlap
    no_route = MP_ERROR_NO_ROUTE,                   ///< the options allow no path between two devices
    out_of_memory = MP_ERROR_OUT_OF_MEMORY,         ///< a device or the host has run out of memory
    not_supported = MP_ERROR_NOT_SUPPORTED,         ///< not supported by this machine, driver or build
    no_driver = MP_ERROR_NO_DRIVER,                 ///< no GPU driver was found
    driver = MP_ERROR_DRIVER,                       ///< the driver or operating system reported an error
    topology = MP_ERROR_TOPOLOGY,                   ///< the topology is unknown, unreadable or invalid
    environment = MP_ERROR_ENVIRONMENT,             ///< an environment variable is invalid
    version_mismatch = MP_ERROR_VERSION_MISMATCH,   ///< header and library are incompatible
    data_corruption = MP_ERROR_DATA_CORRUPTION,     ///< copied data differ from the source
    internal = MP_ERROR_INTERNAL,                   ///< a defect of the library was detected
    peer_gone = MP_ERROR_PEER_GONE,                 ///< another process has exited or freed shared memory
    timeout = MP_ERROR_TIMEOUT,                     ///< the time limit of a wait has expired
    rank_failed = MP_ERROR_RANK_FAILED,             ///< another rank failed in a collective call
    allgather = MP_ERROR_ALLGATHER,                 ///< the caller's allgather function failed
    message_truncated = MP_ERROR_MESSAGE_TRUNCATED, ///< a message is longer than the receive buffer
    cancelled = MP_ERROR_CANCELLED,                 ///< the operation was cancelled
    queue_full = MP_ERROR_QUEUE_FULL                ///< a message queue is full
};

namespace detail {

class category_type final : public std::error_category {
  public:
    [[nodiscard]] const char *name() const noexcept override { return "mpgpu"; }

    [[nodiscard]] std::string message(int condition) const override {
        return mp_status_string(static_cast<mp_status_t>(condition));
    }

    [[nodiscard]] std::error_condition default_error_condition(int condition) const noexcept override {
        switch (static_cast<status>(condition)) {
        case status::invalid_argument:
            return std::errc::invalid_argument;
        case status::invalid_device:
            return std::errc::no_such_device;
        case status::invalid_pointer:
            return std::errc::bad_address;
        case status::out_of_memory:
            return std::errc::not_enough_memory;
        case status::not_supported:
            return std::errc::not_supported;
        case status::timeout:
            return std::errc::timed_out;
        default:
            return {condition, *this};
        }
    }
};

} // namespace detail

/// Returns the `std::error_category` of the error codes that this library sets.
inline const std::error_category &category() noexcept {
    static const detail::category_type instance;
    return instance;
}

/// Returns the `std::error_code` of a status. The standard library calls this function when a status is converted or
/// compared.
inline std::error_code make_error_code(status value) noexcept {
    return {static_cast<int>(value), category()};
}

/// Details of the last failed call on a thread.
struct error_details {
    /// Status that the failed call returned. `success` if no call on this thread has failed.
    mpgpu::status status = mpgpu::status::success;
    /// Error code of the driver or the operating system. 0 if neither reported an error.
    std::int64_t driver_code = 0;
    /// Name of the invalid argument. Empty if no single argument is invalid.
    std::string argument;
    /// Error text. It contains the invalid value and the remedy.
    std::string message;
};

namespace detail {

/// End of the error text for an empty object. The name of the object precedes it.
inline constexpr const char *is_empty = " is empty: create an object and move it there first";

} // namespace detail

/// Returns the details of the last failed call to the library on the calling thread. Throws only `std::bad_alloc`.
[[nodiscard]] inline error_details last_error() {
    mp_error_info_t last = MP_ERROR_INFO_INIT;
    error_details details;
    if (mp_last_error_info(&last) == MP_SUCCESS) {
        details.status = static_cast<status>(last.status);
        details.driver_code = last.driver_code;
        details.argument = last.argument != nullptr ? last.argument : "";
        details.message = last.message != nullptr ? last.message : "";
        // The C error text mentions a NULL handle. A C++ program knows it as an empty object.
        const std::string null = details.argument + " is NULL";
        if (details.status == mpgpu::status::invalid_handle && details.message == null) {
            details.message = details.argument + detail::is_empty;
        }
    }
    return details;
}

/// Base class of all exceptions of this library. `what()` contains the invalid value and the remedy.
class error : public std::runtime_error {
  public:
    /// Constructs an error from the details of a failed call.
    explicit error(error_details details)
        : std::runtime_error(details.message), details_(std::make_shared<const error_details>(std::move(details))) {}

    /// Returns the status of the failed call.
    [[nodiscard]] mpgpu::status status() const noexcept { return details_->status; }

    /// Returns the status as a `std::error_code`.
    [[nodiscard]] std::error_code code() const noexcept { return make_error_code(details_->status); }

    /// Returns the error code of the driver or the operating system. 0 if neither reported an error.
    [[nodiscard]] std::int64_t driver_code() const noexcept { return details_->driver_code; }

    /// Returns the name of the invalid argument. Empty if no single argument is invalid.
    [[nodiscard]] const std::string &argument() const noexcept { return details_->argument; }

  private:
    std::shared_ptr<const error_details> details_; // shared pointer, because copying an exception must not throw
};

/// Exception: an argument is invalid (a value, object, device or address, or transfers that overlap).
class argument_error : public error {
  public:
    using error::error;
};

/// Exception: a device or the host has no more memory.
class out_of_memory : public error {
  public:
    using error::error;
};

/// Exception: this machine, driver or build does not support the request. For example, no path connects two devices,
/// there is no GPU driver, or an engine is not available.
class not_supported : public error {
  public:
    using error::error;
};

/// Exception: a topology file or an environment variable is invalid, or the header has an incompatible version.
class configuration_error : public error {
  public:
    using error::error;
};

/// Exception: the driver or the operating system reported an error. `driver_code()` returns its code.
class driver_error : public error {
  public:
    using error::error;
};

/// Exception: copied data differ from the source. Thrown only with `MPGPU_VERIFY=bytes`.
class data_corruption : public error {
  public:
    using error::error;
};

/// Exception: a process on which the call depends has exited, or has freed memory that it shared.
class peer_gone : public error {
  public:
    using error::error;
};

/// Exception: the time limit of a wait has expired.
class timeout : public error {
  public:
    using error::error;
};

/// Exception: another rank failed in a collective call of the library, or the allgather function of the ranks failed.
class rank_failed : public error {
  public:
    using error::error;
};

/// Exception: a message was not sent or received. The message is longer than the receive buffer, the operation was
/// cancelled, or the message queue is full.
class message_error : public error {
  public:
    using error::error;
};

/// Exception: a defect of the library was detected.
class internal_error : public error {
  public:
    using error::error;
};

namespace detail {

/// Throws an exception of the class `Exception`. If exceptions are disabled, prints the message and aborts.
template <class Exception> [[noreturn]] void fail_as(error_details &&details) {
#if MPGPU_EXCEPTIONS
    throw Exception(std::move(details));
#else
    std::fprintf(stderr, "mpgpu: %s\n", details.message.c_str());
    std::abort();
#endif
}

/// Throws the exception class that corresponds to `details.status`.
[[noreturn]] inline void fail(error_details &&details) {
    switch (details.status) {
    case status::invalid_argument:
    case status::invalid_handle:
    case status::invalid_device:
    case status::invalid_pointer:
    case status::overlap:
        fail_as<argument_error>(std::move(details));
    case status::out_of_memory:
        fail_as<out_of_memory>(std::move(details));
    case status::no_route:
    case status::not_supported:
    case status::no_driver:
        fail_as<not_supported>(std::move(details));
    case status::topology:
    case status::environment:
    case status::version_mismatch:
        fail_as<configuration_error>(std::move(details));
    case status::driver:
        fail_as<driver_error>(std::move(details));
    case status::data_corruption:
        fail_as<data_corruption>(std::move(details));
    case status::internal:
        fail_as<internal_error>(std::move(details));
    case status::peer_gone:
        fail_as<peer_gone>(std::move(details));
    case status::timeout:
        fail_as<timeout>(std::move(details));
    case status::rank_failed:
    case status::allgather:
        fail_as<rank_failed>(std::move(details));
    case status::message_truncated:
    case status::cancelled:
    case status::queue_full:
        fail_as<message_error>(std::move(details));
    default: // a status that is newer than this header
        fail_as<error>(std::move(details));
    }
}

/// Throws the exception for a function that is called on an empty object. `what` is the name of the object's class.
[[noreturn]] inline void fail_empty(const char *what) {
    error_details details;
    details.status = status::invalid_handle;
    details.argument = what;
    details.message = std::string(what) + is_empty;
    fail(std::move(details));
}

} // namespace detail

/// Last parameter of every function and constructor that can fail. It selects how the function reports errors. Callers
/// never write its type.
///
/// If the argument is omitted, a failure throws. If a `std::error_code` is passed, the function stores its status
/// there, also on success. The function then throws only `std::bad_alloc`, and only if it creates a string or stores a
/// callable.
///
/// @code
/// stream.synchronize();                   // throws
/// std::error_code ec;
/// stream.synchronize(ec);                 // does not throw
/// if (ec == mpgpu::status::peer_gone) ...
/// @endcode
class on_error {
  public:
    /// Selects that a failure throws an exception.
    constexpr on_error() noexcept = default;
    /// Selects that the status is stored in `code`, which must exist until the function returns.
    constexpr on_error(std::error_code &code) noexcept : code_(&code) {}

    /// Reports the status that a function of the C API returned.
    void report(mp_status_t outcome) const {
        if (code_ != nullptr) {
            *code_ = make_error_code(static_cast<status>(outcome));
        } else if (outcome != MP_SUCCESS) {
            error_details details = last_error();
            details.status = static_cast<status>(outcome);
            detail::fail(std::move(details));
        }
    }

    /// Reports a failure that the C++ headers themselves have detected. `last_error()` does not return it.
    void report(error_details details) const {
        if (code_ == nullptr) {
            detail::fail(std::move(details));
        }
        *code_ = make_error_code(details.status);
    }

  private:
    std::error_code *code_ = nullptr;
};

} // namespace mpgpu

/// Allows `std::error_code` to be constructed from and compared with `mpgpu::status`.
template <> struct std::is_error_code_enum<mpgpu::status> : std::true_type {};

#endif // MPGPU_ERROR_HPP
