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

/// Device: a GPU or the host memory of a NUMA domain. It is a separate type, so that the compiler detects a size or
/// rank passed as a device. A plain value.
class device {
  public:
    /// Returns the GPU with this index, from 0. On CUDA it is the ordinal that `cudaSetDevice` accepts in this process,
    /// after `CUDA_VISIBLE_DEVICES`. For a negative index it returns a device that does not exist on any machine.
    [[nodiscard]] static constexpr device gpu(int index) noexcept {
        return device(index >= 0 ? index : std::numeric_limits<std::int32_t>::max());
    }

    /// Returns the host memory of a NUMA domain. Domains are numbered from 0. For a negative number it returns a device
    /// that does not exist on any machine.
    [[nodiscard]] static constexpr device host(int domain = 0) noexcept {
        return device(domain >= 0 ? -1 - domain : std::numeric_limits<std::int32_t>::min());
    }

    /// Returns the placeholder `MP_DEVICE_AUTO`. The library then determines the device that owns the address of a
    /// transfer. An address that the library does not know counts as pageable host memory.
    [[nodiscard]] static constexpr device automatic() noexcept { return device(MP_DEVICE_AUTO); }

    /// Returns the device with this number in the C API. GPUs have the numbers 0, 1, 2 and so on; host NUMA domains
    /// have -1, -2, -3 and so on.
    [[nodiscard]] static constexpr device from_id(std::int32_t id) noexcept { return device(id); }

    /// Returns the number of this device in the C API.
    [[nodiscard]] constexpr std::int32_t id() const noexcept { return id_; }

    /// Returns true if the device is host memory.
    [[nodiscard]] constexpr bool is_host() const noexcept { return id_ < 0; }

    /// Returns true if both devices are the same.
    friend constexpr bool operator==(device a, device b) noexcept { return a.id_ == b.id_; }
    /// Returns true if the devices are different.
    friend constexpr bool operator!=(device a, device b) noexcept { return a.id_ != b.id_; }

  private:
    constexpr explicit device(std::int32_t id) noexcept : id_(id) {}
    std::int32_t id_;
};

/// Numbers of devices of a context, by kind.
struct device_count {
    /// Number of GPUs, `device::gpu(0)` to `device::gpu(gpus - 1)`.
    int gpus = 0;
    /// Number of host NUMA domains, `device::host(0)` to `device::host(host_domains - 1)`.
    int host_domains = 0;
};

} // namespace mpgpu

#endif // MPGPU_DEVICE_HPP
