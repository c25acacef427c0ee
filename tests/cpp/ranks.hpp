// SPDX-License-Identifier: MIT OR Apache-2.0
// What tests of several ranks share: they end together, and look for what is left of the library.
#ifndef MPGPU_TEST_RANKS_HPP
#define MPGPU_TEST_RANKS_HPP

#include <mpgpu/mpgpu.hpp>

#include <mpi.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <unistd.h>

namespace ranks_test {

/// This rank in `MPI_COMM_WORLD`.
inline int world_rank = 0;

/// Ends all ranks with a message at the first thing that is wrong.
inline void require(bool holds, const std::string &what) {
    if (!holds) {
        std::fprintf(stderr, "rank %d: %s\n", world_rank, what.c_str());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/// Ends this rank alone. `MPI_Finalize` would wait for ranks that were killed.
[[noreturn]] inline void end(int code, const std::string &what) {
    std::printf("rank %d: %s\n", world_rank, what.c_str());
    std::fflush(stdout);
    _exit(code);
}

/// With what something fails, if it does.
template <class Work> std::optional<mpgpu::status> failure_of(Work &&work) {
    try {
        work();
    } catch (const mpgpu::error &e) {
        return static_cast<mpgpu::status>(e.code().value());
    }
    return std::nullopt;
}

/// What the process has of the library's shared memory: mappings, descriptors, names.
inline std::string left_over() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        if (line.find("memfd:mpgpu") != std::string::npos) {
            return "is mapped: " + line;
        }
    }
    std::error_code ec;
    for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        const std::string target = std::filesystem::read_symlink(entry.path(), ec).string();
        if (!ec && target.find("memfd:mpgpu") != std::string::npos) {
            return "is open: " + target;
        }
    }
    for (const auto &entry : std::filesystem::directory_iterator("/dev/shm", ec)) {
        if (entry.path().filename().string().find("mpgpu") != std::string::npos) {
            return "is a name in /dev/shm: " + entry.path().string();
        }
    }
    return "";
}

} // namespace ranks_test

#endif // MPGPU_TEST_RANKS_HPP
