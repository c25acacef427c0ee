// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device_code.hpp"

namespace {

void set(const mpgpu::stream &stream, int /*device*/, const block &b, double *values) {
    stream.launch_host([b, values] {
        for (std::int64_t i = 0; i < element_count(b); ++i) {
            values[i] = initial_value(b, i);
        }
    });
}

void pack(const mpgpu::stream &stream, int /*device*/, const block &b, const double *values, const packed_faces &out) {
    stream.launch_host([b, values, out] {
        for (int face = 0; face < faces; ++face) {
            for (std::int64_t i = 0; out.at[face] != nullptr && i < face_cells(b, face); ++i) {
                out.at[face][i] = values[face_element(b, face, i, false)];
            }
        }
    });
}

void unpack(const mpgpu::stream &stream, int /*device*/, const block &b, double *values, const packed_faces &in) {
    stream.launch_host([b, values, in] {
        for (int face = 0; face < faces; ++face) {
            for (std::int64_t i = 0; in.at[face] != nullptr && i < face_cells(b, face); ++i) {
                values[face_element(b, face, i, true)] = in.at[face][i];
            }
        }
    });
}

void sweep(const mpgpu::stream &stream, int /*device*/, const block &b, const double *before, double *after) {
    stream.launch_host([b, before, after] {
        const std::int64_t row = b.cells[0] + 2;
        const std::int64_t layer = row * (b.cells[1] + 2);
        for (std::int64_t z = 0; z < b.cells[2]; ++z) {
            for (std::int64_t y = 0; y < b.cells[1]; ++y) {
                const double *here = before + element_of(b, 0, y, z);
                double *out = after + element_of(b, 0, y, z);
                for (std::int64_t x = 0; x < b.cells[0]; ++x) {
                    out[x] = relaxed(here[x - 1], here[x + 1], here[x - row], here[x + row], here[x - layer],
                                     here[x + layer]);
                }
            }
        }
    });
}

} // namespace

const device_code on_virtual_devices = {set, pack, unpack, sweep};
