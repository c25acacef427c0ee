// SPDX-License-Identifier: MIT OR Apache-2.0
// A rank is killed in the middle of an exchange: every other rank gets the status peer_gone within a bounded time, and
// afterwards has nothing of the library mapped or open. Ranks that do not touch the dead one get it when their
// neighbours, who do, end in turn.
//
// Run by mpirun with three ranks or more. A launcher ends a job that has lost a rank, so survivors hold out against
// SIGTERM until they have looked; each prints a line, and the caller looks for all of them.
#include "halo_reference.hpp"

#include <mpgpu/mpi.hpp>

#include <mpgpu/halo.hpp> // again, after mpi.hpp: adds make_plan

#include <mpi.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
namespace reference = halo_reference;

constexpr double bound = 30.0; // seconds; the library notices a dead process at once, a machine under load takes longer
constexpr std::uint64_t healthy = 5;

int world_rank = 0;

[[noreturn]] void end(int code, const std::string &what) {
    std::printf("rank %d: %s\n", world_rank, what.c_str());
    std::fflush(stdout);
    _exit(code); // MPI_Finalize would wait for the dead
}

/// What the process has of the library's shared memory: mappings, descriptors, names.
std::string left_over() {
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

/// With what something fails, if it does.
template <class Work> std::optional<mpgpu::errc> failure_of(Work &&work) {
    try {
        work();
    } catch (const mpgpu::error &e) {
        return static_cast<mpgpu::errc>(e.code().value());
    }
    return std::nullopt;
}

/// Exchanges until one fails, and says with what. Ranks that do not touch the victim can make some before their
/// neighbours end, one more with each rank between.
mpgpu::errc exchange_until_it_fails(halo::plan &plan, const mpgpu::stream &stream, int ranks) {
    for (int succeeded = 0;; ++succeeded) {
        if (succeeded > ranks) {
            end(1, "exchanges go on succeeding without a neighbour");
        }
        const std::optional<mpgpu::errc> failure = failure_of([&] {
            plan.exchange(stream);
            stream.synchronize();
        });
        if (failure) {
            return *failure;
        }
    }
}

void run(std::uint64_t direct_pieces) {
    std::optional<mpgpu::context> ctx(std::in_place);
    std::optional<mpgpu::mpi::node> node(std::in_place, *ctx, MPI_COMM_WORLD);
    halo::grid g;
    g.cells = {16, 16, 16 * std::int64_t{node->size()}};
    g.ranks = {1, 1, node->size()};
    g.periodic = {true, true, true};
    g.ghost = {1, 1, 1};
    const mpgpu::device where = mpgpu::device::gpu(world_rank % ctx->devices().gpus);
    std::optional<mpgpu::memory> cells(std::in_place, *ctx, where, reference::elements(g, world_rank) * 8);
    halo::options how;
    how.direct_pieces = direct_pieces;
    std::optional<halo::plan> plan(
        halo::make_plan(*ctx, *node, g, {{cells->data(), where, 8, reference::elements(g, world_rank)}}, how));
    std::optional<mpgpu::stream> stream(std::in_place, *ctx, where);
    for (std::uint64_t i = 0; i < healthy; ++i) {
        plan->exchange(*stream);
    }
    stream->synchronize();
    MPI_Barrier(MPI_COMM_WORLD);
    if (left_over().empty()) {
        end(1, "nothing of the library is mapped in the middle: this test looks for the wrong names");
    }

    const int victim = node->size() - 1;
    const bool is_neighbour = world_rank == 0 || world_rank + 1 == victim;
    if (world_rank == victim) {
        plan->start(*stream);
        plan->start(*stream); // waits for neighbours, which may still be in the one before
    } else {
        for (int i = 0; i < 4; ++i) { // of which the last two wait for the victim
            plan->exchange(*stream);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank == victim) {
        std::raise(SIGKILL);
    }
    const auto begin = std::chrono::steady_clock::now();
    // The waits are in a stream of the plan's; the caller's own comes after it, and says so.
    if (is_neighbour && failure_of([&] { stream->synchronize(); }) != mpgpu::errc::peer_gone) {
        end(1, "exchanges have succeeded without a neighbour");
    }
    if (is_neighbour && failure_of([&] { plan->start(*stream); }) != mpgpu::errc::peer_gone) {
        end(1, "an exchange with a rank that is known to be gone was begun");
    }
    const mpgpu::errc status = exchange_until_it_fails(*plan, *stream, node->size());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (status != mpgpu::errc::peer_gone) {
        end(1, "the status is " + std::to_string(static_cast<int>(status)) + ", not peer_gone");
    }
    if (took.count() > bound) {
        end(1, "it took " + std::to_string(took.count()) + " s");
    }
    plan.reset();
    stream.reset();
    cells.reset();
    node.reset(); // frees communicators, which is local where ranks have gone
    ctx.reset();
    const std::string left = left_over();
    if (!left.empty()) {
        end(1, "after the end of the context something " + left);
    }
    end(0, "peer_gone in time, and nothing is left");
}

} // namespace

int main(int argc, char *argv[]) {
    std::signal(SIGTERM, SIG_IGN);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    try {
        run(argc > 1 ? std::stoull(argv[1]) : 1);
    } catch (const std::exception &e) {
        end(1, e.what());
    }
}
