// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_LOG_HPP
#define MPGPU_LOG_HPP

/// @file
/// Log records of the library.

#include <mpgpu/error.hpp>

namespace mpgpu {

/// Sets the callback that receives the library's log records of `max_level` and all lower levels. It may be called on
/// any thread. A null `callback` removes the current one. `user` is passed to the callback, and must stay valid until
/// the callback is replaced or removed. Throws `argument_error`, `not_supported`.
inline void set_log_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user, on_error failed = {}) {
    failed.report(mp_log_set_callback(max_level, callback, user));
}

} // namespace mpgpu

#endif // MPGPU_LOG_HPP
