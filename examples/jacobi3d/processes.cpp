// SPDX-License-Identifier: MIT OR Apache-2.0
#include "processes.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <system_error>
#include <vector>

namespace {

constexpr int failed = 2;

pid_t start(const std::function<int()> &task) {
    // Flush all output, because otherwise both processes would print the contents of the buffers.
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child < 0) {
        throw std::system_error(errno, std::generic_category(), "fork");
    }
    if (child == 0) {
        int code = failed;
        try {
            code = task();
        } catch (const std::exception &e) {
            std::fprintf(stderr, "jacobi3d: %s\n", e.what());
        }
        std::exit(code);
    }
    return child;
}

int code_of(pid_t child) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) {
            throw std::system_error(errno, std::generic_category(), "waitpid");
        }
    }
    if (WIFSIGNALED(status)) {
        std::fprintf(stderr, "jacobi3d: a process was ended by signal %d\n", WTERMSIG(status));
        return 1;
    }
    return WEXITSTATUS(status);
}

/// Returns the name of GPU number `gpu` for CUDA_VISIBLE_DEVICES. If that variable is already set, the name comes from
/// its list.
std::string name_of(int gpu) {
    const char *given = std::getenv("CUDA_VISIBLE_DEVICES");
    std::string_view names = given != nullptr ? given : "";
    if (names.empty()) {
        return std::to_string(gpu);
    }
    for (int skipped = 0; skipped < gpu && names.find(',') != std::string_view::npos; ++skipped) {
        names.remove_prefix(names.find(',') + 1);
    }
    return std::string(names.substr(0, names.find(',')));
}

} // namespace

int in_process(const std::function<int()> &task) {
    return code_of(start(task));
}

int in_processes(int ranks, int gpus, const std::function<int(int rank, const std::string &meeting)> &task) {
    const char *temporary = std::getenv("TMPDIR");
    std::string folder = std::string(temporary != nullptr ? temporary : "/tmp") + "/jacobi3d-XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) {
        throw std::system_error(errno, std::generic_category(), folder);
    }
    const std::string meeting = folder + "/ranks";
    std::vector<pid_t> children;
    children.reserve(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
        children.push_back(start([&] {
            if (gpus > 0) {
                setenv("CUDA_VISIBLE_DEVICES", name_of(rank % gpus).c_str(), 1);
            }
            return task(rank, meeting);
        }));
    }
    int worst = 0;
    for (const pid_t child : children) {
        worst = std::max(worst, code_of(child));
    }
    unlink(meeting.c_str());
    rmdir(folder.c_str());
    return worst;
}
