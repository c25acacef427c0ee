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

/// Device: a GPU or a host NUMA domain. A separate type, so that a device is not confused with a size or a rank. A
/// plain value.
class device {
  public:
    /// Returns the device for the GPU with this index. Indices start at 0. On CUDA it is the ordinal that
    /// `cudaSetDevice` takes in this process, after `CUDA_VISIBLE_DEVICES`. A negative index returns a device that no
    /// machine has.
    [[nodiscard]] static constexpr device gpu(int index) noexcept {
        return device(index >= 0 ? index : std::numeric_limits<std::int32_t>::max());
    }

    /// Returns the device for the host memory of a NUMA domain. Domains are numbered from 0. A negative domain returns
    /// a device that no machine has.
    [[nodiscard]] static constexpr device host(int domain = 0) noexcept {
        return device(domain >= 0 ? -1 - domain : std::numeric_limits<std::int32_t>::min());
    }

    /// Returns `MP_DEVICE_AUTO`, which in a transfer stands for the device that the address belongs to. An address that
    /// the library does not know counts as pageable host memory.
    [[nodiscard]] static constexpr device automatic() noexcept { return device(MP_DEVICE_AUTO); }

    /// Returns the device with this number in the C API. GPUs count up from 0, host NUMA domains down from -1.
    [[nodiscard]] static constexpr device from_id(std::int32_t id) noexcept { return device(id); }

    /// Returns the number of this device in the C API.
    [[nodiscard]] constexpr std::int32_t id() const noexcept { return id_; }

    /// Returns true if the device is host memory.
    [[nodiscard]] constexpr bool is_host() const noexcept { return id_ < 0; }

    /// True if both devices are the same.
    friend constexpr bool operator==(device a, device b) noexcept { return a.id_ == b.id_; }
    /// True if the devices are different.
    friend constexpr bool operator!=(device a, device b) noexcept { return a.id_ != b.id_; }

  private:
    constexpr explicit device(std::int32_t id) noexcept : id_(id) {}
    std::int32_t id_;
};

/// Number of devices of a context.
struct device_count {
    /// Number of GPUs, `device::gpu(0)` to `device::gpu(gpus - 1)`.
    int gpus = 0;
    /// Number of host NUMA domains, `device::host(0)` to `device::host(host_domains - 1)`.
    int host_domains = 0;
};

} // namespace mpgpu

#endif // MPGPU_DEVICE_HPP
