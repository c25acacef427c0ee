// SPDX-License-Identifier: MIT OR Apache-2.0
// Kills a rank while the ranks of a node execute a plan. Every other rank must get the status peer_gone within a
// bounded time, even if it depends on the dead rank only through other ranks. After that it must not have memory of
// other ranks mapped or open. The argument selects the moment: between steps, with enqueued steps that wait for others,
// or a random time. The random time may also be during partitioned transfers by copy engines or by polling kernels. In
// one case no rank is killed, and one rank ends by an exception.
//
// Run by mpirun with three ranks or more. A launcher ends a job that has lost a rank, so the surviving ranks ignore
// SIGTERM until they have finished their checks. Each survivor prints a line, and the caller checks that all of them
// have printed it.
#include "ranks.hpp"

#include <mpgpu/mpi.hpp>
#include <mpgpu/trigger.cuh>

#include <mpi.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using ranks_test::end;
using ranks_test::failure_of;
using ranks_test::left_over;
using ranks_test::world_rank;

constexpr double bound = 30.0; // seconds; the library notices a dead process at once, a machine under load takes longer
constexpr std::size_t bytes = 3U << 20U; // for several paths, some of them through GPUs of other ranks
constexpr int healthy = 5;
constexpr int most = 1'000'000;

/// Rank of a ring, with the plan whose steps it executes.
struct part {
    mpgpu::context ctx;
    mpgpu::device gpu;
    mpgpu::mpi::node node;
    mpgpu::buffer<unsigned char> sent;
    mpgpu::buffer<unsigned char> received;
    mpgpu::plan plan;
    mpgpu::stream stream;

    bool in_partitions;

    part(std::uint32_t ranks, const std::string &when)
        : gpu(mpgpu::device::gpu(world_rank % ctx.devices().gpus)), node(ctx, MPI_COMM_WORLD, {gpu}),
          sent(ctx, gpu, bytes), received(ctx, gpu, bytes), plan(planned(ranks, when)), stream(ctx, gpu),
          in_partitions(when == "partitions") {}

    mpgpu::plan planned(std::uint32_t ranks, const std::string &when) {
        const auto rank = static_cast<std::uint32_t>(world_rank);
        const std::vector<mpgpu::window> windows{mpgpu::make_window(sent), mpgpu::make_window(received)};
        const mpgpu::node_transfer to_next{{(rank + 1) % ranks, 1, 0}, {rank, 0, 0}, bytes};
        if (when == "partitions") {
            return node.plan(windows, {to_next}, {6, mpgpu::agent::copy_engine});
        }
        return node.plan(windows, {to_next});
    }

    void step(int times) {
        for (int i = 0; i < times; ++i) {
            if (in_partitions) {
                plan.arm(stream);
                stream.synchronize();
                const mpgpu::trigger out(plan.trigger(static_cast<std::uint32_t>(world_rank), 0));
                for (std::uint32_t partition = 0; partition < out.partitions(); ++partition) {
                    out.ready(partition);
                }
            }
            plan.enqueue(stream);
        }
        stream.synchronize();
    }
};

/// Runs the last actions of the victim, and ends the victim.
void meet_the_end(part &mine, const std::string &when) {
    if (when == "enqueued") {
        for (int i = 0; i < 4; ++i) {
            mine.plan.enqueue(mine.stream);
        }
    } else if (when == "anytime" || mine.in_partitions) {
        std::thread([] {
            std::this_thread::sleep_for(std::chrono::microseconds(std::random_device()() % 20'000));
            std::raise(SIGKILL);
        }).detach();
        mine.step(most);
    } else if (when == "exception") {
        throw std::runtime_error("the program's own");
    }
    std::raise(SIGKILL);
}

void survive(part &mine) {
    std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
    std::optional<mpgpu::status> failure;
    for (int i = 0; i < most && !failure; ++i) {
        last = std::chrono::steady_clock::now();
        failure = failure_of([&] { mine.step(1 + (world_rank % 3)); });
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - last;
    if (failure != mpgpu::status::peer_gone) {
        end(1, failure ? "the status is " + std::to_string(static_cast<int>(*failure)) + ", not peer_gone"
                       : "steps go on without a rank");
    }
    if (took.count() > bound) {
        end(1, "it took " + std::to_string(took.count()) + " s");
    }
}

void run(const std::string &when) {
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    try {
        part mine(static_cast<std::uint32_t>(ranks), when);
        mine.step(healthy);
        if (left_over().empty()) {
            end(1, "nothing of the library is mapped in the middle: this test looks for the wrong names");
        }
        MPI_Barrier(MPI_COMM_WORLD);
        if (world_rank == ranks - 1) {
            meet_the_end(mine, when);
        }
        survive(mine);
    } catch (const std::runtime_error &e) {
        if (std::string(e.what()) != "the program's own") {
            throw;
        }
    }
    ranks_test::end_with_nothing_left();
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_surviving(argc, argv, [&] { run(argc > 1 ? argv[1] : "between"); });
}
