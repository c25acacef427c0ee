// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_EXCHANGE_HPP
#define MPGPU_EXAMPLES_JACOBI_EXCHANGE_HPP

#include <mpgpu/mpgpu.hpp>

#include <array>
#include <cstddef>
#include <vector>

/// Transfers and streams of a halo exchange.
struct halo_exchange {
    /// Transfers for each of the two arrays that swap.
    std::array<std::vector<mpgpu::transfer>, 2> copies;
    /// Streams in which the devices sweep, by the index of the device.
    std::vector<mpgpu::stream_view> sweeps;
};

/// Halo exchange as used by the time loop. All work is enqueued; only `finish` blocks.
class exchange {
  public:
    exchange() = default;
    exchange(const exchange &) = delete;
    exchange(exchange &&) = delete;
    exchange &operator=(const exchange &) = delete;
    exchange &operator=(exchange &&) = delete;
    virtual ~exchange() = default;

    /// Makes later work in a device's sweep stream start after the last exchange, as far as it concerns the device.
    virtual void before_sweep(std::size_t device) = 0;
    /// Starts the exchange for one of the two arrays, after all sweeps that are enqueued.
    virtual void start(std::size_t parity) = 0;
    /// Blocks until the last exchange is done.
    virtual void finish() = 0;
};

#endif // MPGPU_EXAMPLES_JACOBI_EXCHANGE_HPP
