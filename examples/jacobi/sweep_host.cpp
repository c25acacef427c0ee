// SPDX-License-Identifier: MIT OR Apache-2.0
#include "sweep.hpp"

#include <array>
#include <cstddef>
#include <cstring>

namespace {

/// Computes the new values of one row. Everywhere the same operands are added in the same order, so the value of a
/// point does not depend on how the rows are divided among devices. The result of N devices is therefore bitwise equal
/// to the result of one device.
void sweep_row(const float *above, const float *here, const float *below, float *out, std::size_t nx) {
    for (std::size_t x = 1; x + 1 < nx; ++x) {
        out[x] = 0.25F * ((here[x + 1] + here[x - 1]) + (below[x] + above[x]));
    }
}

/// Returns the sum of the squared changes of a row. It is computed as eight partial sums, so that additions do not
/// depend on each other. The number of partial sums is fixed, so the sum of a row does not depend on its device.
double squared_change(const float *before, const float *after, std::size_t nx) {
    constexpr std::size_t lanes = 8;
    std::array<double, lanes> sums{};
    std::size_t x = 1;
    for (; x + lanes < nx; x += lanes) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const double change = double{after[x + lane]} - double{before[x + lane]};
            sums[lane] += change * change;
        }
    }
    for (; x + 1 < nx; ++x) {
        const double change = double{after[x]} - double{before[x]};
        sums[0] += change * change;
    }
    double sum = 0.0;
    for (const double part : sums) {
        sum += part;
    }
    return sum;
}

void launch(const mpgpu::stream &stream, const sweep &work) {
    stream.launch_host([work] {
        const auto nx = static_cast<std::size_t>(work.nx);
        const auto rows = static_cast<std::size_t>(work.rows);
        for (std::size_t row = 0; row < rows; ++row) {
            const float *above = work.a + row * nx;
            const float *here = above + nx;
            float *out = work.a_new + (row + 1) * nx;
            sweep_row(above, here, here + nx, out, nx);
            if (work.row_norm != nullptr) {
                work.row_norm[row] = squared_change(here, out, nx);
            }
        }
    });
}

/// Exchange by plain copies of CPU threads. Each row is copied in a stream of the device that sends it, as in
/// exchange_cuda.cu, and the next sweep of a device waits for the rows that the device receives.
class by_memcpy final : public exchange {
  public:
    by_memcpy(const mpgpu::context &ctx, const halo_exchange &halos) : ctx_(ctx), halos_(halos) {
        for (std::size_t device = 0; device < halos.sweeps.size(); ++device) {
            swept_.emplace_back(ctx);
        }
        for (const mpgpu::transfer &copy : halos.copies[0]) {
            lanes_.emplace_back(ctx, mpgpu::device::gpu(copy.src_device));
            arrived_.emplace_back(ctx);
        }
    }

    void before_sweep(std::size_t device) override {
        for (std::size_t i = 0; i < lanes_.size(); ++i) {
            if (halos_.copies[0][i].dst_device == static_cast<int>(device)) {
                ctx_.wait(halos_.sweeps[device], arrived_[i]);
            }
        }
    }

    void start(std::size_t parity) override {
        for (std::size_t device = 0; device < swept_.size(); ++device) {
            swept_[device].record(halos_.sweeps[device]);
        }
        for (std::size_t i = 0; i < lanes_.size(); ++i) {
            const mpgpu::transfer copy = halos_.copies.at(parity)[i];
            lanes_[i].wait(swept_[static_cast<std::size_t>(copy.src_device)]);
            lanes_[i].launch_host([copy] { std::memcpy(copy.dst, copy.src, copy.bytes); });
            arrived_[i].record(lanes_[i]);
        }
    }

    void finish() override {
        for (const mpgpu::event &row : arrived_) {
            row.synchronize();
        }
    }

  private:
    const mpgpu::context &ctx_;
    halo_exchange halos_;
    std::vector<mpgpu::event> swept_;   // by device
    std::vector<mpgpu::stream> lanes_;  // by copy
    std::vector<mpgpu::event> arrived_; // by copy
};

std::unique_ptr<exchange> plain_exchange(const mpgpu::context &ctx, const halo_exchange &halos) {
    return std::make_unique<by_memcpy>(ctx, halos);
}

} // namespace

const device_code on_virtual_devices = {launch, plain_exchange};
