// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_ERROR_HPP
#define MPGPU_ERROR_HPP

/// @file
/// Errors: the statuses of the C API as `std::error_code`s, the exceptions, and how a call is told to report.

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
/// 1 where this translation unit is compiled with exceptions, else 0.
#define MPGPU_EXCEPTIONS 1
#else
/// 1 where this translation unit is compiled with exceptions, else 0.
#define MPGPU_EXCEPTIONS 0
#endif

namespace mpgpu {

/// The statuses of the C API. A `std::error_code` set by this library compares equal to one of them.
enum class status : int {
    success = MP_SUCCESS,                           ///< done
    invalid_argument = MP_ERROR_INVALID_ARGUMENT,   ///< a value that is not accepted
    invalid_handle = MP_ERROR_INVALID_HANDLE,       ///< an empty or destroyed object
    invalid_device = MP_ERROR_INVALID_DEVICE,       ///< a device that the context does not have
    invalid_pointer = MP_ERROR_INVALID_POINTER,     ///< an address that is unknown or on another device
    overlap = MP_ERROR_OVERLAP,                     ///< transfers of a batch touch the same bytes
    no_route = MP_ERROR_NO_ROUTE,                   ///< no path joins two devices
    out_of_memory = MP_ERROR_OUT_OF_MEMORY,         ///< a device or the host has no memory left
    not_supported = MP_ERROR_NOT_SUPPORTED,         ///< this machine, driver or build cannot do it
    no_driver = MP_ERROR_NO_DRIVER,                 ///< no GPU driver was found
    driver = MP_ERROR_DRIVER,                       ///< the driver or the operating system refused
    topology = MP_ERROR_TOPOLOGY,                   ///< a topology that is unknown, unreadable or not valid
    environment = MP_ERROR_ENVIRONMENT,             ///< an environment variable that is not accepted
    version_mismatch = MP_ERROR_VERSION_MISMATCH,   ///< header and library do not go together
    data_corruption = MP_ERROR_DATA_CORRUPTION,     ///< bytes arrived wrong
    internal = MP_ERROR_INTERNAL,                   ///< a defect of the library
    peer_gone = MP_ERROR_PEER_GONE,                 ///< another process has ended or freed what it shared
    timeout = MP_ERROR_TIMEOUT,                     ///< what was waited for has not come in time
    rank_failed = MP_ERROR_RANK_FAILED,             ///< another rank could not do its part
    allgather = MP_ERROR_ALLGATHER,                 ///< the allgather of a node has failed
    message_truncated = MP_ERROR_MESSAGE_TRUNCATED, ///< a message is longer than its buffer
    cancelled = MP_ERROR_CANCELLED,                 ///< an operation was cancelled
    queue_full = MP_ERROR_QUEUE_FULL                ///< no room for another operation or message
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

/// The category of the error codes that this library sets.
inline const std::error_category &category() noexcept {
    static const detail::category_type instance;
    return instance;
}

/// The error code of a status; found by `std::error_code` itself.
inline std::error_code make_error_code(status value) noexcept {
    return {static_cast<int>(value), category()};
}

/// What the last failed call on this thread had to say.
struct error_details {
    /// Its status; `success` when no call on this thread has failed.
    mpgpu::status status = mpgpu::status::success;
    /// What the driver or the operating system returned; 0 when neither was involved.
    std::int64_t driver_code = 0;
    /// The name of the argument at fault; empty when no single one is.
    std::string argument;
    /// What was wrong, with the value, and what to do about it.
    std::string message;
};

namespace detail {

/// What follows the name of an object that is none.
inline constexpr const char *is_empty = " is empty: make one and move it there first";

} // namespace detail

/// Copies the details of the last failed call of the library on the calling thread. Throws nothing but
/// `std::bad_alloc`.
[[nodiscard]] inline error_details last_error() {
    mp_error_info_t last = MP_ERROR_INFO_INIT;
    error_details details;
    if (mp_last_error_info(&last) == MP_SUCCESS) {
        details.status = static_cast<status>(last.status);
        details.driver_code = last.driver_code;
        details.argument = last.argument != nullptr ? last.argument : "";
        details.message = last.message != nullptr ? last.message : "";
        // Handles are C's: here objects are empty.
        const std::string null = details.argument + " is NULL";
        if (details.status == mpgpu::status::invalid_handle && details.message == null) {
            details.message = details.argument + detail::is_empty;
        }
    }
    return details;
}

/// The base of every exception of this library. `what()` says what was wrong, with the value, and what to do about it.
class error : public std::runtime_error {
  public:
    /// An error with the details of a failed call.
    explicit error(error_details details)
        : std::runtime_error(details.message), details_(std::make_shared<const error_details>(std::move(details))) {}

    /// Its status.
    [[nodiscard]] mpgpu::status status() const noexcept { return details_->status; }

    /// The same as a `std::error_code`.
    [[nodiscard]] std::error_code code() const noexcept { return make_error_code(details_->status); }

    /// What the driver or the operating system returned; 0 when neither was involved.
    [[nodiscard]] std::int64_t driver_code() const noexcept { return details_->driver_code; }

    /// The name of the argument at fault; empty when no single one is.
    [[nodiscard]] const std::string &argument() const noexcept { return details_->argument; }

  private:
    std::shared_ptr<const error_details> details_; // shared, because copying an exception must not throw
};

/// The caller passed something wrong: a value, a handle, a device, a pointer, or transfers that overlap.
class argument_error : public error {
  public:
    using error::error;
};

/// A device or the host has no memory left.
class out_of_memory : public error {
  public:
    using error::error;
};

/// This machine, driver or build cannot do it: no route between two devices, no driver, an engine that does not exist
/// here.
class not_supported : public error {
  public:
    using error::error;
};

/// The library was set up wrongly: a topology file, an environment variable, or a header of another version.
class configuration_error : public error {
  public:
    using error::error;
};

/// The driver or the operating system refused; `driver_code()` is what it returned.
class driver_error : public error {
  public:
    using error::error;
};

/// Bytes arrived wrong. Only where verification is switched on.
class data_corruption : public error {
  public:
    using error::error;
};

/// Another process has ended, or has freed what it shared.
class peer_gone : public error {
  public:
    using error::error;
};

/// What was waited for has not come in time.
class timeout : public error {
  public:
    using error::error;
};

/// Another rank could not do its part of what all ranks do together, or their allgather has failed.
class rank_failed : public error {
  public:
    using error::error;
};

/// A message was not received, or not sent: it is longer than its buffer, it was cancelled, or there is no room.
class message_error : public error {
  public:
    using error::error;
};

/// A defect of the library itself.
class internal_error : public error {
  public:
    using error::error;
};

namespace detail {

/// Throws one class of exception; without exceptions, prints the message and aborts.
template <class Exception> [[noreturn]] void fail_as(error_details &&details) {
#if MPGPU_EXCEPTIONS
    throw Exception(std::move(details));
#else
    std::fprintf(stderr, "mpgpu: %s\n", details.message.c_str());
    std::abort();
#endif
}

/// Throws the exception of a status.
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

/// Refuses a call on an object that is empty.
[[noreturn]] inline void fail_empty(const char *what) {
    error_details details;
    details.status = status::invalid_handle;
    details.argument = what;
    details.message = std::string(what) + is_empty;
    fail(std::move(details));
}

} // namespace detail

/// How a call reports a failure: the last parameter of every function and constructor that can fail, and never written
/// out. Left out, a failure throws. Given a `std::error_code`, the call writes its outcome there, success included, and
/// throws at most `std::bad_alloc`, and only where it makes a string or stores a callable.
///
/// @code
/// stream.synchronize();                   // throws
/// std::error_code ec;
/// stream.synchronize(ec);                 // does not
/// if (ec == mpgpu::status::peer_gone) ...
/// @endcode
class on_error {
  public:
    /// A failure throws.
    constexpr on_error() noexcept = default;
    /// The outcome goes to `code`, which must live until the call returns.
    constexpr on_error(std::error_code &code) noexcept : code_(&code) {}

    /// Reports the outcome of a call of the C API.
    void report(mp_status_t outcome) const {
        if (code_ != nullptr) {
            *code_ = make_error_code(static_cast<status>(outcome));
        } else if (outcome != MP_SUCCESS) {
            error_details details = last_error();
            details.status = static_cast<status>(outcome);
            detail::fail(std::move(details));
        }
    }

    /// Reports a failure that this library's C++ part has found. `last_error()` does not know of it.
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

/// Lets `std::error_code` be made from, and compared with, `mpgpu::status`.
template <> struct std::is_error_code_enum<mpgpu::status> : std::true_type {};

#endif // MPGPU_ERROR_HPP
