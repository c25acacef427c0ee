// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_LOG_HPP
#define MPGPU_LOG_HPP

/// @file
/// Log records of the library.

#include <mpgpu/error.hpp>

namespace mpgpu {

/// Sends the library's log records up to `max_level` to `callback`, on the thread that logs. A null callback stops
/// this. `user` must remain valid until then. Throws `argument_error`, `not_supported`.
inline void set_log_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user, on_error failed = {}) {
    failed.report(mp_log_set_callback(max_level, callback, user));
}

} // namespace mpgpu

#endif // MPGPU_LOG_HPP
