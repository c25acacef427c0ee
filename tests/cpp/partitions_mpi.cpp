// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests partitioned transfers of ranks in a ring. Each rank sees all GPUs or only one. Threads produce the partitions
// in random order, and every rank checks each partition as soon as it has arrived. Run by mpirun with any number of
// ranks, on the host backend, because threads can write its device memory. At the first error the program ends all
// ranks with a message. An argument is the number of steps.
#include "ranks.hpp"

#include <mpgpu/mpi.hpp>
#include <mpgpu/trigger.cuh>

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

unsigned char byte(std::uint64_t offset, std::uint64_t sender, std::uint64_t step) {
    return static_cast<unsigned char>((offset * 31) ^ (offset >> 9U) ^ (sender * 101) ^ (step * 59));
}

/// Rank of a ring, with the plan that moves its partitions.
class part {
  public:
    part(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu, std::size_t bytes,
         const mpgpu::partitioning &how, std::uint32_t ranks)
        : rank_(static_cast<std::uint32_t>(world_rank)), before_((rank_ + ranks - 1) % ranks), how_(how),
          sent_(ctx, gpu, bytes), received_(ctx, gpu, bytes),
          plan_(node.plan({mpgpu::make_window(sent_), mpgpu::make_window(received_)},
                          {{{(rank_ + 1) % ranks, 1, 0}, {rank_, 0, 0}, bytes}}, how)),
          stream_(ctx, gpu) {}

    void step(std::uint64_t number, std::mt19937_64 &random) {
        const mpgpu::trigger out(plan_.trigger(rank_, 0));
        plan_.arm(stream_);
        stream_.synchronize();
        std::vector<std::uint32_t> order(out.partitions());
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), random);
        const std::uint64_t pieces = 1 + random() % 3;
        std::thread producer([&] { produce(out, order, pieces, number); });
        if (how_.mover == mpgpu::agent::producer || how_.stores) {
            producer.join();
            plan_.enqueue(stream_);
            consume(number);
        } else {
            plan_.enqueue(stream_);
            consume(number);
            producer.join();
        }
        plan_.synchronize(60);
        look(0, received_.size(), number);
    }

  private:
    static void produce(const mpgpu::trigger &out, const std::vector<std::uint32_t> &order, std::uint64_t pieces,
                        std::uint64_t step) {
        for (const std::uint32_t partition : order) {
            const std::uint64_t each = (out.end(partition) - out.begin(partition) + pieces - 1) / pieces;
            for (std::uint64_t first = out.begin(partition); first < out.end(partition); first += each) {
                const std::uint64_t bytes = std::min(each, out.end(partition) - first);
                for (std::uint64_t at = first; at < first + bytes; ++at) {
                    static_cast<unsigned char *>(out.destination())[at] =
                        byte(at, static_cast<std::uint64_t>(world_rank), step);
                }
                out.ready_range(first, bytes);
            }
        }
    }

    /// Checks the partitions of one step as they arrive.
    void consume(std::uint64_t step) const {
        if (!how_.arrivals) {
            return;
        }
        const mpgpu::trigger in(plan_.trigger(before_, 0));
        std::vector<std::uint32_t> missing(in.partitions());
        std::iota(missing.begin(), missing.end(), 0U);
        while (!missing.empty()) {
            const auto here =
                std::partition(missing.begin(), missing.end(), [&](std::uint32_t p) { return !in.arrived(p); });
            std::for_each(here, missing.end(), [&](std::uint32_t p) { look(in.begin(p), in.end(p), step); });
            missing.erase(here, missing.end());
            std::this_thread::yield();
        }
    }

    void look(std::uint64_t first, std::uint64_t end, std::uint64_t step) const {
        for (std::uint64_t at = first; at < end; ++at) {
            if (received_.data()[at] != byte(at, before_, step)) {
                require(false, "step " + std::to_string(step) + ": byte " + std::to_string(at) + " is wrong");
            }
        }
    }

    std::uint32_t rank_;
    std::uint32_t before_;
    mpgpu::partitioning how_;
    mpgpu::buffer<unsigned char> sent_;
    mpgpu::buffer<unsigned char> received_;
    mpgpu::plan plan_;
    mpgpu::stream stream_;
};

/// Tests that tuning returns the same result on all ranks, and that no rank waits forever.
void tune(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu, std::uint32_t ranks) {
    constexpr std::size_t bytes = 70'001;
    const auto rank = static_cast<std::uint32_t>(world_rank);
    mpgpu::buffer<unsigned char> sent(ctx, gpu, bytes);
    mpgpu::buffer<unsigned char> received(ctx, gpu, bytes);
    const auto produce = [&](mpgpu::array_view<const mp_trigger_t> triggers, mpgpu::stream_view stream) {
        const mpgpu::trigger out(triggers[0]);
        ctx.launch_host(stream, [out] {
            for (std::uint64_t at = 0; at < out.bytes(); ++at) {
                static_cast<unsigned char *>(out.destination())[at] =
                    byte(at, static_cast<std::uint64_t>(world_rank), 3);
            }
            out.ready_range(0, out.bytes());
        });
    };
    mpgpu::partition_tuning trials;
    trials.rounds = 1;
    const mpgpu::partitioning best =
        node.tune_partitions({mpgpu::make_window(sent), mpgpu::make_window(received)},
                             {{{(rank + 1) % ranks, 1, 0}, {rank, 0, 0}, bytes}}, produce, trials);
    const std::vector<unsigned> mine{best.count, static_cast<unsigned>(best.mover)};
    std::vector<unsigned> first = mine;
    MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_UNSIGNED, 0, MPI_COMM_WORLD);
    require(mine == first, "ranks have found different partitionings");
    for (std::uint64_t at = 0; at < bytes; ++at) {
        require(received.data()[at] == byte(at, (rank + ranks - 1) % ranks, 3), "byte " + std::to_string(at));
    }
}

void with_sight_of(bool all_gpus, std::uint64_t steps) {
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (!all_gpus) {
        setenv("MPGPU_HOST_VISIBLE_DEVICES", std::to_string(world_rank % 4).c_str(), 1);
    }
    const mpgpu::context ctx;
    const mpgpu::device gpu = mpgpu::device::gpu(all_gpus ? world_rank % ctx.devices().gpus : 0);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu});
    tune(ctx, node, gpu, static_cast<std::uint32_t>(ranks));
    std::mt19937_64 same(7);
    std::mt19937_64 own(static_cast<std::uint64_t>(world_rank));
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{70'001}, std::size_t{5} << 20U}) {
        for (const mpgpu::partitioning &how :
             {mpgpu::partitioning{}, mpgpu::partitioning{static_cast<std::uint32_t>(1 + same() % 20)},
              mpgpu::partitioning{5, mpgpu::agent::copy_engine, false}, mpgpu::partitioning{7, mpgpu::agent::producer},
              mpgpu::partitioning{6, mpgpu::agent::automatic, false, true}}) {
            part mine(ctx, node, gpu, bytes, how, static_cast<std::uint32_t>(ranks));
            for (std::uint64_t step = 1; step <= (bytes > 100'000 ? 3 : steps); ++step) {
                mine.step(step, own);
            }
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    return ranks_test::run_together(argc, argv, "ok", [&] {
        const std::uint64_t steps = argc > 1 ? std::stoull(argv[1]) : std::getenv("LONG_TESTS") != nullptr ? 2'000 : 20;
        with_sight_of(true, steps);
        with_sight_of(false, steps);
    });
}
