// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_LOG_HPP
#define MPGPU_LOG_HPP

/// @file
/// The library's log.

#include <mpgpu/error.hpp>

namespace mpgpu {

/// Sends the library's messages up to `max_level` to `callback`, from whatever thread they arise on; a null callback
/// ends it. `user` must outlive that. Throws `argument_error`, `not_supported`.
inline void set_log_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user, on_error failed = {}) {
    failed.report(mp_log_set_callback(max_level, callback, user));
}

} // namespace mpgpu

#endif // MPGPU_LOG_HPP
