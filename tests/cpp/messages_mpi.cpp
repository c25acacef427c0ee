// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests messages between ranks of a node that each see only one GPU. It tests a ring in stream order without host
// waits, receives from any rank, and descriptors that are sent by MPI. Run by mpirun with any number of ranks, on the
// host backend or on GPUs. At the first error the program ends all ranks with a message. An argument is the number of
// steps.
#include "ranks.hpp"

#include <mpgpu/entry.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

int world_size = 0;
std::uint64_t steps = 200;

constexpr std::size_t most_bytes = 3U << 20U;

unsigned char byte(int rank, std::uint64_t step, std::size_t offset) {
    return static_cast<unsigned char>((offset * 31) ^ (offset >> 9U) ^ (step * 59) ^
                                      (static_cast<std::size_t>(rank) * 101));
}

std::vector<unsigned char> bytes_of(int rank, std::uint64_t step, std::size_t bytes) {
    std::vector<unsigned char> all(bytes);
    for (std::size_t offset = 0; offset < bytes; ++offset) {
        all[offset] = byte(rank, step, offset);
    }
    return all;
}

std::size_t size_of_step(std::uint64_t step) {
    std::mt19937_64 random(step);
    return random() % (random() % 8 == 0 ? most_bytes : 20'000);
}

/// GPU memory of a rank, with functions that copy to and from host memory on both backends.
struct card {
    const mpgpu::context &ctx;
    mpgpu::buffer<unsigned char> memory{ctx, mpgpu::device::gpu(0), most_bytes};

    void copy(mpgpu::device_span<unsigned char> to, mpgpu::device_span<unsigned char> from) const {
        mpgpu::plan(ctx, {mpgpu::make_transfer(to, from)}).execute(mpgpu::stream_view::default_stream()).synchronize();
    }
    void set(std::vector<unsigned char> bytes) {
        if (!bytes.empty()) {
            const mpgpu::device_span<unsigned char> whole(memory);
            copy(whole.subspan(0, bytes.size()), {mpgpu::array_view<unsigned char>(bytes), mpgpu::device::host()});
        }
    }
    [[nodiscard]] std::vector<unsigned char> get(std::size_t size) {
        std::vector<unsigned char> bytes(size);
        if (size > 0) {
            const mpgpu::device_span<unsigned char> whole(memory);
            copy({mpgpu::array_view<unsigned char>(bytes), mpgpu::device::host()}, whole.subspan(0, size));
        }
        return bytes;
    }
};

mpgpu::message_memory<void> first_bytes(card &of, std::size_t bytes) {
    return {of.memory.data(), bytes};
}

void run() {
    const mpgpu::context ctx;
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);
    mpgpu::messenger messages(node);
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    card token{ctx};
    card other{ctx};
    const int right = (world_rank + 1) % world_size;
    const int left = (world_rank + world_size - 1) % world_size;

    // Data of rank 0 moves around the ring. Each rank forwards the data in stream order.
    for (std::uint64_t step = 0; step < steps; ++step) {
        const std::size_t bytes = size_of_step(step);
        if (world_rank == 0) {
            token.set(bytes_of(0, step, bytes));
        }
        const auto send = [&] {
            return messages.send(mpgpu::message_memory<const void>(token.memory.data(), bytes), right, step, stream);
        };
        mpgpu::message_request sent;
        if (world_rank == 0) {
            sent = send();
        }
        mpgpu::message_request got =
            messages.receive(first_bytes(world_rank == 0 ? other : token, most_bytes), left, step, stream);
        got.wait(stream);
        if (world_rank != 0) {
            sent = send();
        }
        const mpgpu::message_info info = got.synchronize();
        require(info.bytes() == bytes && info.tag() == step && static_cast<int>(info.rank()) == left,
                "step " + std::to_string(step) + " is another message");
        sent.synchronize();
        if (world_rank == 0) {
            require(other.get(bytes) == bytes_of(0, step, bytes), "step " + std::to_string(step) + " has wrong bytes");
        }
    }

    // All ranks send from pageable memory to rank 0, which receives the messages in the order of their arrival.
    const auto sent_bytes = bytes_of(world_rank, 1, 5000);
    mpgpu::message_request sent = messages.send(sent_bytes, 0, 1, stream);
    if (world_rank == 0) {
        std::vector<bool> seen(static_cast<std::size_t>(world_size));
        for (int count = 0; count < world_size; ++count) {
            std::vector<unsigned char> room(6000);
            const mpgpu::message_info info =
                messages.receive(room, mpgpu::any_rank, mpgpu::message_tag::any(), stream).synchronize();
            require(!seen.at(info.rank()), "a message has come twice");
            seen.at(info.rank()) = true;
            room.resize(info.bytes());
            require(room == bytes_of(static_cast<int>(info.rank()), 1, 5000), "wrong bytes from any rank");
        }
    }
    sent.synchronize();

    // MPI sends the descriptors of buffers. The receiver fetches the buffers at any later time.
    token.set(bytes_of(world_rank, 2, most_bytes));
    mpgpu::described_buffer described = messages.describe(token.memory, stream);
    mpgpu::message_descriptor theirs{};
    MPI_Sendrecv(&described.descriptor, sizeof(theirs), MPI_BYTE, static_cast<int>(right), 0, &theirs, sizeof(theirs),
                 MPI_BYTE, left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    messages.fetch(theirs, other.memory, stream).synchronize();
    require(other.get(most_bytes) == bytes_of(left, 2, most_bytes), "wrong bytes of a descriptor");
    described.released.synchronize();

    // The right neighbour calls functions with arguments in GPU memory and in host memory.
    mpgpu::entries entries(ctx, messages);
    constexpr std::uint64_t method = 3;
    constexpr std::uint64_t calls = 8;
    std::vector<unsigned char> room(5000);
    std::uint64_t called = 0;
    token.set(bytes_of(world_rank, 3, most_bytes));
    entries.on_message(
        method,
        [&](mpgpu::arrival &m) {
            require(static_cast<int>(m.rank()) == left && m.parts() == 2 && m.bytes(0) == most_bytes, "another call");
            m.into(0, other.memory, stream).into(1, room, stream);
        },
        [&](mpgpu::arrival &m) {
            require(m.arguments_as<std::uint64_t>() == calls, "wrong arguments of a call");
            require(other.get(most_bytes) == bytes_of(left, 3, most_bytes) && room == bytes_of(left, 1, 5000),
                    "wrong bytes of a call");
            ++called;
        });
    for (std::uint64_t call = 0; call < calls; ++call) {
        mpgpu::entry_request under_way =
            entries.send(static_cast<std::uint32_t>(right), method, mpgpu::entry_arguments(calls),
                         {token.memory, sent_bytes}, stream);
        while (!under_way.test() || called <= call) {
            entries.progress();
        }
    }
    require(!messages.probe(mpgpu::any_rank, mpgpu::message_tag::any()), "a message is left");
}

} // namespace

int main(int argc, char **argv) {
    if (argc > 1) {
        steps = std::strtoull(argv[1], nullptr, 10);
    }
    return ranks_test::run_together(argc, argv, "messages: every byte right", [] {
        MPI_Comm_size(MPI_COMM_WORLD, &world_size);
        run();
    });
}
