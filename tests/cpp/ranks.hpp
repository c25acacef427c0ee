// SPDX-License-Identifier: MIT OR Apache-2.0
// Provides functions for tests with several ranks. All ranks end together, and check that no resources of the library
// remain.
#ifndef MPGPU_TEST_RANKS_HPP
#define MPGPU_TEST_RANKS_HPP

#include <mpgpu/mpgpu.hpp>

#include <mpi.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <unistd.h>

namespace ranks_test {

/// Number of this rank in `MPI_COMM_WORLD`.
inline int world_rank = 0;

/// Ends all ranks with the message `what` if `holds` is false.
inline void require(bool holds, const std::string &what) {
    if (!holds) {
        std::fprintf(stderr, "rank %d: %s\n", world_rank, what.c_str());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/// Ends only this rank. `MPI_Finalize` is not called, because it would wait for ranks that were killed.
[[noreturn]] inline void end(int code, const std::string &what) {
    std::printf("rank %d: %s\n", world_rank, what.c_str());
    std::fflush(stdout);
    _exit(code);
}

/// Returns the status with which `work` fails, or nothing if it succeeds.
template <class Work> std::optional<mpgpu::status> failure_of(Work &&work) {
    try {
        work();
    } catch (const mpgpu::error &e) {
        return static_cast<mpgpu::status>(e.code().value());
    }
    return std::nullopt;
}

/// Returns a list of the shared memory of the library that remains in this process: mappings, descriptors and names.
/// The text is empty if nothing remains.
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
        const std::string name = entry.path().filename().string();
        // The table of the interposer belongs to another library, and any process may use it.
        if (name.find("mpgpu") != std::string::npos && name.rfind("mpgpu-owners-", 0) != 0) {
            return "is a name in /dev/shm: " + entry.path().string();
        }
    }
    return "";
}

/// Ends this rank. The exit status is success if no resources of the library remain in the process.
[[noreturn]] inline void end_with_nothing_left() {
    const std::string left = left_over();
    if (!left.empty()) {
        end(1, "after the end of the context something " + left);
    }
    end(0, "peer_gone in time, and nothing is left");
}

/// Tells rank `last` that this rank has finished its checks; see `end_after_others`.
inline void tell(int last) {
    const char token = 0;
    MPI_Send(&token, 1, MPI_CHAR, last, 1, MPI_COMM_WORLD);
}

/// Ends this rank, which is the last one, after all other ranks have called `tell`. It does not call MPI_Finalize,
/// because the launcher then sometimes waits for it forever.
[[noreturn]] inline void end_after_others(const std::string &why) {
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int rank = 0; rank + 1 < ranks; ++rank) {
        char token = 0;
        MPI_Recv(&token, 1, MPI_CHAR, rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    end(0, why);
}

/// Implements `main` of a test whose ranks all end together. Rank 0 prints a message if the test succeeds.
template <class Run> int run_together(int argc, char **argv, const char *right, const Run &run) {
    int provided = MPI_THREAD_SINGLE; // as much as available: some tests check it
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    try {
        run();
    } catch (const std::exception &e) {
        require(false, e.what());
    }
    MPI_Finalize();
    if (world_rank == 0) {
        std::puts(right);
    }
    return 0;
}

/// Implements `main` of a test in which one rank is killed. The launcher then ends the other ranks, so they ignore
/// SIGTERM until they have finished their checks. `run` ends the process.
template <class Run> int run_surviving(int argc, char **argv, const Run &run) {
    std::signal(SIGTERM, SIG_IGN);
    int provided = MPI_THREAD_SINGLE;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    try {
        run();
    } catch (const std::exception &e) {
        end(1, e.what());
    }
    return 1;
}

} // namespace ranks_test

#endif // MPGPU_TEST_RANKS_HPP
