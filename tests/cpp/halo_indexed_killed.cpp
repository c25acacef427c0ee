// SPDX-License-Identifier: MIT OR Apache-2.0
// Kills a rank in the middle of an exchange by index lists, or ends its exchange by an exception. Every other rank must
// get the status peer_gone within a bounded time. After that it must not have memory of other ranks mapped or open.
//
// Run by mpirun with three ranks or more, on the host backend, or on GPUs if nvcc has compiled this file. The ranks
// form a ring: a rank that is not a neighbour of the victim gets the status when its neighbours end. A launcher ends a
// job that has lost a rank, so the surviving ranks ignore SIGTERM until they have finished their checks. Each survivor
// prints a line, and the caller checks that all of them have printed it.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_indexed.hpp>

#include <mpi.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace {

namespace halo = mpgpu::halo;

using ranks_test::end;
using ranks_test::failure_of;
using ranks_test::left_over;
using ranks_test::world_rank;

// Seconds. The library notices a dead process at once, but a machine under load takes longer.
constexpr double bound = 30.0;
constexpr std::size_t entries = 1000;
constexpr std::size_t sent = 100;

struct thrown {};

/// Returns the neighbours of this rank in the ring.
std::vector<halo::index_neighbour> ring(int ranks) {
    const auto range = [](std::int64_t place) {
        return halo::index_list::range(place * static_cast<std::int64_t>(sent), sent);
    };
    const int next = (world_rank + 1) % ranks;
    const int previous = (world_rank + ranks - 1) % ranks;
    return {{next, range(0), range(1)}, {previous, range(2), range(3)}};
}

/// Executes exchanges until one fails, and returns the status of the failure.
mpgpu::status exchange_until_it_fails(halo::indexed &ex, mpgpu::buffer<double> &x, const mpgpu::stream &stream,
                                      int ranks) {
    for (int succeeded = 0; succeeded <= ranks + 4; ++succeeded) {
        const std::optional<mpgpu::status> failure = failure_of([&] {
            ex.exchange(stream, x);
            stream.synchronize();
        });
        if (failure) {
            return *failure;
        }
    }
    end(1, "exchanges go on succeeding without a neighbour");
}

/// Executes exchanges that succeed, and checks that memory of other ranks is mapped.
void exchange_together(halo::indexed &ex, mpgpu::buffer<double> &x, const mpgpu::stream &stream) {
    for (int i = 0; i < 5; ++i) {
        ex.exchange(stream, x);
    }
    stream.synchronize();
    MPI_Barrier(MPI_COMM_WORLD);
    if (left_over().empty()) {
        end(1, "no shared memory of the library was found between exchanges: this test looks for the wrong names");
    }
}

void run(bool throws) {
    std::optional<mpgpu::context> ctx(std::in_place);
    halo_test::select_device(*ctx, world_rank);
    const mpgpu::device where = halo_test::device_of(*ctx, world_rank);
    std::optional<mpgpu::mpi::node> node(std::in_place, *ctx, MPI_COMM_WORLD, where);
    halo::index_options how;
#ifdef __CUDACC__
    if (!halo_test::on_host_backend(*ctx)) {
        how.kernel = halo::cuda_indexed();
    }
#endif
    std::optional<halo::indexed> ex(std::in_place, *ctx, *node, where, entries, ring(node->size()), how);
    std::optional<mpgpu::buffer<double>> x(std::in_place, *ctx, where, entries);
    std::optional<mpgpu::stream> stream(std::in_place, *ctx, where);
    exchange_together(*ex, *x, *stream);
    const int ranks = node->size();
    const int victim = ranks - 1;
    if (world_rank == victim) {
        ex->start(*stream, *x); // sends its messages of one exchange; its neighbours wait for those of the next one
    } else {
        ex->exchange(*stream, *x);
        ex->start(*stream, *x);
        ex->finish(*stream);
        ex->add(*stream, *x);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (world_rank == victim) {
        if (throws) {
            throw thrown{};
        }
        std::raise(SIGKILL);
    }
    const auto begin = std::chrono::steady_clock::now();
    const bool is_neighbour = world_rank == 0 || world_rank + 1 == victim;
    if (is_neighbour && failure_of([&] { stream->synchronize(); }) != mpgpu::status::peer_gone) {
        end(1, "exchanges have succeeded without a neighbour");
    }
    if (is_neighbour && failure_of([&] { ex->start(*stream, *x); }) != mpgpu::status::peer_gone) {
        end(1, "an exchange with a rank that is known to be gone was begun");
    }
    const mpgpu::status status = exchange_until_it_fails(*ex, *x, *stream, ranks);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (status != mpgpu::status::peer_gone) {
        end(1, "the status is " + std::to_string(static_cast<int>(status)) + ", not peer_gone");
    }
    if (took.count() > bound) {
        end(1, "the failure was reported after " + std::to_string(took.count()) + " s; the limit is " +
                   std::to_string(bound) + " s");
    }
    ex.reset();
    stream.reset();
    x.reset();
    node.reset(); // frees communicators, which is a local operation if ranks have exited
    ctx.reset();
    if (throws) {
        ranks_test::tell(victim);
    }
    ranks_test::end_with_nothing_left();
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_surviving(argc, argv, [&] {
        try {
            run(argc > 1);
        } catch (const thrown &) {
            ranks_test::end_after_others("ended by an exception");
        }
    });
}
