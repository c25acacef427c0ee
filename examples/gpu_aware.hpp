// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_GPU_AWARE_HPP
#define MPGPU_EXAMPLES_GPU_AWARE_HPP

#include <mpi.h>
#if defined(OPEN_MPI)
#include <mpi-ext.h> // reports whether it was built for CUDA, and declares the query in that case
#endif

#include <array>
#include <optional>
#include <string>

/// Returns the reason why this MPI may not accept GPU pointers. Returns nothing if MPI reports that it does.
inline std::optional<std::string> why_not_gpu_aware() {
#if defined(MPIX_CUDA_AWARE_SUPPORT)
    if (MPIX_Query_cuda_support() == 1) {
        return std::nullopt;
    }
    const std::string what = "reports that it is not GPU-aware";
#else
    const std::string what = "has no MPIX_Query_cuda_support, so it is unknown whether it is GPU-aware";
#endif
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> version{};
    int length = 0;
    MPI_Get_library_version(version.data(), &length);
    const std::string text(version.data());
    return text.substr(0, text.find_first_of(",\n")) + " " + what;
}

#endif // MPGPU_EXAMPLES_GPU_AWARE_HPP
