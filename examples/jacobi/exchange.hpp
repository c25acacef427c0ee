// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_EXCHANGE_HPP
#define MPGPU_EXAMPLES_JACOBI_EXCHANGE_HPP

#include <mpgpu/mpgpu.hpp>

#include <array>
#include <cstddef>
#include <vector>

/// Transfers of a halo exchange, and the streams with which it is ordered.
struct halo_exchange {
    /// Transfers of the halo rows of each of the two arrays, which alternate as old and new values.
    std::array<std::vector<mpgpu::transfer>, 2> copies;
    /// Stream in which each device sweeps, by the index of the device.
    std::vector<mpgpu::stream_view> sweeps;
};

/// Method of halo exchange for the time loop. All functions enqueue work without waiting, except `finish`, which
/// blocks.
class exchange {
  public:
    exchange() = default;
    exchange(const exchange &) = delete;
    exchange(exchange &&) = delete;
    exchange &operator=(const exchange &) = delete;
    exchange &operator=(exchange &&) = delete;
    virtual ~exchange() = default;

    /// Makes later work in the sweep stream of a device wait for the last exchange, if that exchange reads or writes
    /// memory of the device.
    virtual void before_sweep(std::size_t device) = 0;
    /// Starts the exchange of the array with index `parity`, after all sweeps that are enqueued so far.
    virtual void start(std::size_t parity) = 0;
    /// Blocks until the last exchange has finished.
    virtual void finish() = 0;
};

#endif // MPGPU_EXAMPLES_JACOBI_EXCHANGE_HPP
