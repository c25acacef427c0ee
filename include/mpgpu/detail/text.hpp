// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_DETAIL_TEXT_HPP
#define MPGPU_DETAIL_TEXT_HPP

#include <mpgpu/error.hpp>

#include <cstddef>
#include <string>

namespace mpgpu::detail {

/// Returns the text that `write(text, capacity, length)` writes. Calls `write` repeatedly until the text fits, because
/// a description may become longer between two calls. The result is empty if `write` fails.
template <class Write> [[nodiscard]] std::string text_of(const on_error &failed, const Write &write) {
    std::string text;
    std::size_t length = 0; // including the final NUL
    mp_status_t status = write(nullptr, 0, &length);
    while (status == MP_SUCCESS) {
        text.resize(length);
        status = write(text.data(), text.size(), &length);
        if (status == MP_SUCCESS) {
            text.resize(length - 1);
            break;
        }
        if (length > text.size()) {
            status = MP_SUCCESS; // the text has become longer; other failures do not change the length
        }
    }
    failed.report(status);
    return status == MP_SUCCESS ? text : std::string();
}

} // namespace mpgpu::detail

#endif // MPGPU_DETAIL_TEXT_HPP
