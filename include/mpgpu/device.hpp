// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_DEVICE_HPP
#define MPGPU_DEVICE_HPP

/// @file
/// Devices: GPUs and host NUMA domains.

#include <mpgpu/detail/cpp17.hpp>
#include <mpgpu/mpgpu.h>

#include <cstdint>
#include <limits>

namespace mpgpu {

/// The memory of a GPU or of a host NUMA domain. A type of its own, so that a device is never mistaken for a size or a
/// rank. A plain value.
class device {
  public:
    /// The GPU with this index, from 0: on CUDA the ordinal that `cudaSetDevice` takes in this process, that is after
    /// `CUDA_VISIBLE_DEVICES`. A negative index gives a device that no machine has.
    [[nodiscard]] static constexpr device gpu(int index) noexcept {
        return device(index >= 0 ? index : std::numeric_limits<std::int32_t>::max());
    }

    /// The host memory of a NUMA domain, from 0. A negative domain gives a device that no machine has.
    [[nodiscard]] static constexpr device host(int domain = 0) noexcept {
        return device(domain >= 0 ? -1 - domain : std::numeric_limits<std::int32_t>::min());
    }

    /// In a transfer: whichever device the address belongs to, `MP_DEVICE_AUTO`. An address that the library does not
    /// know is ordinary host memory.
    [[nodiscard]] static constexpr device automatic() noexcept { return device(MP_DEVICE_AUTO); }

    /// The device with this number in the C API: GPUs count up from 0, host NUMA domains down from -1.
    [[nodiscard]] static constexpr device from_id(std::int32_t id) noexcept { return device(id); }

    /// Its number in the C API.
    [[nodiscard]] constexpr std::int32_t id() const noexcept { return id_; }

    /// Whether it is host memory.
    [[nodiscard]] constexpr bool is_host() const noexcept { return id_ < 0; }

    /// Whether both are the same device.
    friend constexpr bool operator==(device a, device b) noexcept { return a.id_ == b.id_; }
    /// Whether they are different devices.
    friend constexpr bool operator!=(device a, device b) noexcept { return a.id_ != b.id_; }

  private:
    constexpr explicit device(std::int32_t id) noexcept : id_(id) {}
    std::int32_t id_;
};

/// How many devices a context has.
struct device_count {
    /// GPUs, `device::gpu(0)` to `device::gpu(gpus - 1)`.
    int gpus = 0;
    /// Host NUMA domains, `device::host(0)` to `device::host(host_domains - 1)`.
    int host_domains = 0;
};

} // namespace mpgpu

#endif // MPGPU_DEVICE_HPP
