// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device_code.hpp"

namespace {

void select(int /*device*/) {}

void multiply(const mpgpu::stream &stream, matrix a, std::int32_t first, std::int32_t end, const double *x, double *y) {
    stream.launch_host([=] {
        for (std::int32_t row = first; row < end; ++row) {
            double sum = 0.0;
            for (std::int32_t i = a.starts[row]; i < a.starts[row + 1]; ++i) {
                sum += a.values[i] * x[a.columns[i]];
            }
            y[row] = sum;
        }
    });
}

void dot(const mpgpu::stream &stream, std::int32_t count, const double *x, const double *y, double *sums) {
    stream.launch_host([=] {
        for (std::int64_t part = 0; part < partial_sums; ++part) {
            sums[part] = 0.0;
            for (std::int64_t i = part * count / partial_sums; i < (part + 1) * count / partial_sums; ++i) {
                sums[part] += x[i] * y[i];
            }
        }
    });
}

void step(const mpgpu::stream &stream, std::int32_t count, double factor, const double *p, const double *q, double *x,
          double *r) {
    stream.launch_host([=] {
        for (std::int32_t i = 0; i < count; ++i) {
            x[i] += factor * p[i];
            r[i] -= factor * q[i];
        }
    });
}

void turn(const mpgpu::stream &stream, std::int32_t count, double factor, const double *r, double *p) {
    stream.launch_host([=] {
        for (std::int32_t i = 0; i < count; ++i) {
            p[i] = r[i] + factor * p[i];
        }
    });
}

void pack(const mpgpu::stream &stream, std::int32_t count, const std::int32_t *list, const double *x, double *packed) {
    stream.launch_host([=] {
        for (std::int32_t i = 0; i < count; ++i) {
            packed[i] = x[list[i]];
        }
    });
}

/// Returns no kernel. `mpgpu::halo::indexed` then packs and unpacks by CPU threads.
mpgpu::halo::index_kernel no_kernel() {
    return {};
}

} // namespace

const device_code on_virtual_devices = {select, multiply, dot, step, turn, pack, no_kernel};
