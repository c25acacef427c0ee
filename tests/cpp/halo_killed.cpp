// SPDX-License-Identifier: MIT OR Apache-2.0
// Removes a rank in the middle of a halo exchange. The rank is killed, throws an exception (third argument `throws`),
// or assigns an empty plan to its plan (`assigns`). Every other rank must get the status peer_gone within a bounded
// time. After that it must not have memory of other ranks mapped or open. Ranks that are not neighbours of the victim
// get the status when their neighbours exit.
//
// Run by mpirun with three ranks or more, on the host backend, or on GPUs, where forms that pack require nvcc. A
// launcher ends a job that has lost a rank, so the surviving ranks ignore SIGTERM until they have finished their
// checks. Each survivor prints a line, and the caller checks that all of them have printed it.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace {

namespace halo = mpgpu::halo;

constexpr double bound = 30.0; // seconds; the library notices a dead process at once, a machine under load takes longer
constexpr std::uint64_t healthy = 5;

using ranks_test::end;
using ranks_test::failure_of;
using ranks_test::left_over;
using ranks_test::world_rank;

struct thrown {};

/// Returns the addresses at which this process has mapped arrays of other ranks on GPUs. The list is empty on the host
/// backend. /proc does not show these mappings, but the driver knows the memory at an address.
std::vector<const std::byte *> on_gpus([[maybe_unused]] const mpgpu::context &ctx,
                                       [[maybe_unused]] mpgpu::mpi::shared_memory<std::byte> &arrays,
                                       [[maybe_unused]] int ranks) {
    std::vector<const std::byte *> found;
#ifdef __CUDACC__
    for (int rank = 0; rank < ranks && !halo_test::on_host_backend(ctx); ++rank) {
        if (arrays.of(rank) == nullptr) {
            end(1, "the array of rank " + std::to_string(rank) + " is not mapped: " + arrays.why(rank));
        }
        if (rank != world_rank) {
            found.push_back(arrays.of(rank)->data());
        }
    }
#endif
    return found;
}

/// Returns true if GPU memory is mapped at `address`, which was returned by `on_gpus`.
bool is_mapped([[maybe_unused]] const std::byte *address) {
#ifdef __CUDACC__
    cudaPointerAttributes attributes{};
    halo::detail::check_cuda(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeDevice;
#else
    return false;
#endif
}

/// Makes exchanges until one fails, and returns the status of the failure. Ranks that are not neighbours of the victim
/// can complete some exchanges before their neighbours exit: one more for each rank in between.
mpgpu::status exchange_until_it_fails(halo::plan &plan, const mpgpu::stream &stream, int ranks) {
    for (int succeeded = 0;; ++succeeded) {
        if (succeeded > ranks) {
            end(1, "exchanges go on succeeding without a neighbour");
        }
        const std::optional<mpgpu::status> failure = failure_of([&] {
            plan.exchange(stream);
            stream.synchronize();
        });
        if (failure) {
            return *failure;
        }
    }
}

void run(std::uint64_t direct_pieces, const std::string &form, const std::string &leaves) {
    std::optional<mpgpu::context> ctx(std::in_place);
    halo_test::select_device(*ctx, world_rank);
    std::optional<mpgpu::mpi::node> node(std::in_place, *ctx, MPI_COMM_WORLD,
                                         std::vector<mpgpu::device>{halo_test::device_of(*ctx, world_rank)});
    halo::grid g;
    g.cells = {16, 16, 16 * std::int64_t{node->size()}};
    g.ranks = {1, 1, node->size()};
    g.periodic = {true, true, true};
    g.ghost = {1, 1, 1};
    std::optional<halo_test::part> mine(std::in_place, *ctx, g, world_rank, std::vector<std::size_t>{8});
    halo::options how = halo_test::options_for(*ctx);
    how.direct_pieces = direct_pieces;
    how.pushed = form == "pushed";
    std::optional<halo::plan> plan(std::in_place, *ctx, *node, g, mine->arrays(), how);
    std::optional<mpgpu::stream> stream(std::in_place, *ctx, mine->where());
    // An allocation is mapped only once per process, so the plan uses the same addresses when it writes to arrays
    // directly.
    const halo::rank_array &own = mine->arrays().front();
    const mpgpu::array_view<std::byte> bytes(static_cast<std::byte *>(own.data), own.size * own.element_bytes);
    mpgpu::mpi::shared_memory<std::byte> arrays = node->exchange(mpgpu::device_span<std::byte>(bytes, own.location));
    const std::vector<const std::byte *> mapped = on_gpus(*ctx, arrays, node->size());
    for (std::uint64_t i = 0; i < healthy; ++i) {
        plan->exchange(*stream);
    }
    stream->synchronize();
    MPI_Barrier(MPI_COMM_WORLD);
    if (left_over().empty()) {
        end(1, "nothing of the library is mapped in the middle: this test looks for the wrong names");
    }
    if (!std::all_of(mapped.begin(), mapped.end(), is_mapped)) {
        end(1, "an array of another rank is not mapped in the middle: this test looks at the wrong addresses");
    }

    const int victim = node->size() - 1;
    const bool is_neighbour = world_rank == 0 || world_rank + 1 == victim;
    if (world_rank == victim) {
        plan->start(*stream);
        plan->start(*stream); // waits for neighbours, which may still be in the previous exchange
    } else {
        for (int i = 0; i < 4; ++i) { // the last two wait for the victim
            plan->exchange(*stream);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank == victim) {
        if (leaves == "throws") {
            throw thrown{};
        }
        if (leaves == "assigns") {
            *plan = halo::plan();
            ranks_test::end_after_others("has assigned an empty plan");
        }
        std::raise(SIGKILL);
    }
    const auto begin = std::chrono::steady_clock::now();
    // The waits are in a stream of the plan. The caller's stream is ordered after that stream and reports the error.
    if (is_neighbour && failure_of([&] { stream->synchronize(); }) != mpgpu::status::peer_gone) {
        end(1, "exchanges have succeeded without a neighbour");
    }
    if (is_neighbour && failure_of([&] { plan->start(*stream); }) != mpgpu::status::peer_gone) {
        end(1, "an exchange with a rank that is known to be gone was begun");
    }
    const mpgpu::status status = exchange_until_it_fails(*plan, *stream, node->size());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (status != mpgpu::status::peer_gone) {
        end(1, "the status is " + std::to_string(static_cast<int>(status)) + ", not peer_gone");
    }
    if (took.count() > bound) {
        end(1, "it took " + std::to_string(took.count()) + " s");
    }
    plan.reset();
    arrays = {};
    // The check comes before the context is destroyed, because destroying the context unmaps all memory.
    if (std::any_of(mapped.begin(), mapped.end(), is_mapped)) {
        end(1, "after the end of the plan an array of another rank is mapped");
    }
    stream.reset();
    mine.reset();
    node.reset(); // frees communicators, which is a local operation if ranks have exited
    ctx.reset();
    if (!leaves.empty()) {
        ranks_test::tell(victim);
    }
    ranks_test::end_with_nothing_left();
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_surviving(argc, argv, [&] {
        try {
            run(argc > 1 ? std::stoull(argv[1]) : 1, argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : "");
        } catch (const thrown &) {
            ranks_test::end_after_others("ended by an exception");
        }
    });
}
