// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests that MPI and mpgpu can use the same buffers, in both orders, with buffers freed and allocated again in between.
// A program does this if it uses GPU-aware MPI for some of its communication. If MPI has a rank's memory open, or had
// it open before it was freed, mpgpu may be unable to map that memory. Messages and halo exchanges must work
// nevertheless. Puts and node plans may be refused as `not_supported` on all ranks; the program prints how often. Every
// byte is checked. On GPUs the program requires an MPI that supports GPU pointers. Run by mpirun with any number of
// ranks; an argument is the number of rounds.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>
#include <mpgpu/message.hpp>

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

namespace halo = mpgpu::halo;
using bytes_on_device = mpgpu::buffer<unsigned char>;

constexpr unsigned char untouched = 0xC7;
std::size_t rounds = 2;
int world_size = 0;

unsigned char byte(int rank, std::uint64_t turn, std::size_t offset) {
    return static_cast<unsigned char>((offset * 31) ^ (offset >> 9U) ^ (turn * 59) ^
                                      (static_cast<std::size_t>(rank) * 101));
}

bool on_all(bool here) {
    const int mine = here ? 1 : 0;
    int least = 0;
    MPI_Allreduce(&mine, &least, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return least != 0;
}

/// Context, node and other objects that a rank uses in all rounds.
struct machine {
    const mpgpu::context ctx;
    mpgpu::device where = halo_test::device_of(ctx, world_rank);
    mpgpu::mpi::node node{ctx, MPI_COMM_WORLD, std::vector<mpgpu::device>{where}};
    mpgpu::messenger messages{node};
    mpgpu::stream stream{ctx, where};
    int right = (world_rank + 1) % world_size;
    int left = (world_rank + world_size - 1) % world_size;
    std::uint64_t turn = 0;
    std::map<std::string, std::array<int, 2>> outcomes{}; ///< for each method: number of successes and refusals
};

/// Buffers from which each rank sends to its right neighbour, and into which it receives.
class ring {
  public:
    ring(machine &of, std::size_t bytes, bool shared)
        : on_(of), bytes_(bytes), out_(allocate(of, bytes, shared)), in_(allocate(of, bytes, shared)),
          host_(of.ctx, mpgpu::device::host(), bytes) {}

    void by_mpi() {
        begin();
        MPI_Sendrecv(out_.data(), static_cast<int>(bytes_), MPI_BYTE, on_.right, 0, in_.data(),
                     static_cast<int>(bytes_), MPI_BYTE, on_.left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        end("MPI", true);
    }

    void by_put() {
        begin();
        auto inboxes = on_.node.exchange(in_);
        auto *const there = inboxes.of(on_.right);
        require(there != nullptr || inboxes.status(on_.right) == mpgpu::status::not_supported,
                "a put is refused for another reason: " + inboxes.why(on_.right));
        const bool taken = on_all(there != nullptr);
        if (taken) {
            mpgpu::plan(on_.ctx, {mpgpu::make_transfer(*there, out_)}).execute(on_.stream).synchronize();
        }
        MPI_Barrier(MPI_COMM_WORLD);
        end("puts", taken);
        inboxes = {};
        MPI_Barrier(MPI_COMM_WORLD); // no rank frees memory that another has mapped
    }

    void by_node_plan() {
        begin();
        bool taken = true;
        try {
            const std::vector<mpgpu::window> windows = {mpgpu::make_window(out_), mpgpu::make_window(in_)};
            const mpgpu::node_transfer mine{mpgpu::node_end(on_.right, 1), mpgpu::node_end(world_rank, 0), bytes_};
            const mpgpu::plan plan = on_.node.plan(windows, {mine});
            plan.enqueue(on_.stream);
            on_.stream.synchronize();
            MPI_Barrier(MPI_COMM_WORLD);
        } catch (const mpgpu::not_supported &) {
            taken = false;
        } catch (const mpgpu::rank_failed &) {
            taken = false; // it was refused on another rank
        }
        require(on_all(taken) == taken, "a node plan is refused on some ranks alone");
        end("node plans", taken);
    }

    void by_message() {
        begin();
        const auto tag = on_.turn;
        const auto send = [&] {
            return on_.messages.send(mpgpu::message_memory<const void>(out_.data(), bytes_), on_.right, tag,
                                     on_.stream);
        };
        // In even rounds the send is posted first, and in odd rounds the receive.
        mpgpu::message_request sent;
        const bool sends_first = (on_.turn / 2 + static_cast<std::uint64_t>(world_rank)) % 2 == 0;
        if (sends_first) {
            sent = send();
        }
        mpgpu::message_request received =
            on_.messages.receive(mpgpu::message_memory<void>(in_.data(), bytes_), on_.left, tag, on_.stream);
        if (!sends_first) {
            sent = send();
        }
        received.synchronize();
        sent.synchronize();
        end("messages", true);
        MPI_Barrier(MPI_COMM_WORLD);
    }

  private:
    static bytes_on_device allocate(machine &of, std::size_t bytes, bool shared) {
        return shared ? bytes_on_device::shared(of.ctx, of.where, bytes) : bytes_on_device(of.ctx, of.where, bytes);
    }

    void copy(bytes_on_device &to, bytes_on_device &from) const {
        mpgpu::plan(on_.ctx, {mpgpu::make_transfer(to, from)}).execute(on_.stream).synchronize();
    }

    void begin() {
        ++on_.turn;
        std::fill_n(host_.data(), bytes_, untouched);
        copy(in_, host_);
        for (std::size_t i = 0; i < bytes_; ++i) {
            host_.data()[i] = byte(world_rank, on_.turn, i);
        }
        copy(out_, host_);
        MPI_Barrier(MPI_COMM_WORLD);
    }

    void end(const std::string &way, bool taken) {
        ++on_.outcomes[way].at(taken ? 0 : 1);
        copy(host_, in_);
        for (std::size_t i = 0; i < bytes_; ++i) {
            const unsigned char expected = taken ? byte(on_.left, on_.turn, i) : untouched;
            require(host_.data()[i] == expected, way + ": byte " + std::to_string(i) + " of " + std::to_string(bytes_) +
                                                     " is wrong, turn " + std::to_string(on_.turn));
        }
    }

    machine &on_;
    std::size_t bytes_;
    bytes_on_device out_;
    bytes_on_device in_;
    bytes_on_device host_;
};

void by_mpgpu(ring &buffers) {
    buffers.by_put();
    buffers.by_node_plan();
    buffers.by_message();
    buffers.by_message();
}

/// Exchanges halos of arrays that MPI sends too: before the exchange if `mpi_first` is true, and otherwise afterwards.
void halos(machine &on, std::size_t round, bool mpi_first) {
    halo::grid g;
    const auto cells = static_cast<std::int64_t>(12 + (20 * round));
    g.cells = {cells, cells * world_size, cells};
    g.ranks = {1, world_size, 1};
    g.periodic = {true, true, false};
    g.ghost = {1, 1, 1};
    const halo_test::part mine(on.ctx, g, world_rank, {8, 8});
    const halo::rank_arrays &arrays = mine.arrays();
    const auto by_mpi = [&] {
        const int bytes = static_cast<int>(arrays[0].size * arrays[0].element_bytes);
        MPI_Sendrecv(arrays[0].data, bytes, MPI_BYTE, on.right, 1, arrays[1].data, bytes, MPI_BYTE, on.left, 1,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    };
    if (mpi_first) {
        by_mpi();
    }
    halo::options how = halo_test::options_for(on.ctx);
    if (round % 2 == 1 && halo_test::can_pack(on.ctx)) {
        how.direct_pieces = 0;
    }
    halo::plan exchange(on.ctx, on.node, g, arrays, how);
    for (std::uint64_t cycle = 1; cycle <= 5; ++cycle) {
        mine.fill(cycle);
        mine.upload(on.stream);
        exchange.exchange(on.stream);
        mine.download(on.stream);
        on.stream.synchronize();
        const std::string difference = mine.first_difference(cycle);
        require(difference.empty(), "halo exchange: " + difference);
        MPI_Barrier(MPI_COMM_WORLD);
        by_mpi();
        MPI_Barrier(MPI_COMM_WORLD);
    }
    ++on.outcomes["halo exchanges"][0];
    exchange.destroy();
}

void run() {
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    machine on{std::move(ctx)};
    constexpr std::size_t mebibyte = std::size_t{1} << 20U;
    const std::array<std::size_t, 4> sizes = {mebibyte + 4096, 40'000, 8 * mebibyte, 3 * mebibyte + 8};
    for (std::size_t round = 0; round < rounds; ++round) {
        const std::size_t bytes = sizes.at(round % sizes.size());
        for (const bool mpi_first : {true, false}) {
            {
                ring buffers(on, bytes, false);
                // This buffer is another allocation in the same memory block of the driver.
                ring beside(on, 5000, false);
                if (mpi_first) {
                    buffers.by_mpi();
                    by_mpgpu(beside);
                }
                by_mpgpu(buffers);
                buffers.by_mpi();
                by_mpgpu(buffers);
                MPI_Barrier(MPI_COMM_WORLD);
            }
            {
                ring buffers(on, std::min<std::size_t>(bytes, 300'000), true);
                by_mpgpu(buffers);
                MPI_Barrier(MPI_COMM_WORLD);
            }
            halos(on, round % 3, mpi_first);
        }
    }
    if (world_rank == 0) {
        for (const auto &[way, times] : on.outcomes) {
            std::printf("%-16s %4d right, %4d refused\n", way.c_str(), times[0], times[1]);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

} // namespace

int main(int argc, char *argv[]) {
    if (argc > 1) {
        rounds = std::strtoull(argv[1], nullptr, 10);
    }
    return ranks_test::run_together(argc, argv, "beside MPI: every byte right", run);
}
