// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests that the ranks of a node can map each other's memory and put bytes into it. Only streams and signals order the
// accesses. Run by mpirun with any number of ranks. At the first error the program ends all ranks with a message.
#include "ranks.hpp"

#include <mpgpu/collective.hpp>
#include <mpgpu/halo_mpi.hpp>
#include <mpgpu/message.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

/// Returns the message of the error that `call` throws. The text is empty if the call succeeds.
template <class Call> std::string refusal_of(Call &&call) {
    try {
        call();
    } catch (const mpgpu::error &e) {
        return e.what();
    }
    return {};
}

constexpr int rounds = 25;
constexpr std::size_t elements = 10007;

std::uint32_t pattern(int round, int from, int to, std::size_t i) {
    return static_cast<std::uint32_t>((((round * 31) + from) * 17) + to) * 2654435761U ^ static_cast<std::uint32_t>(i);
}

/// Puts data in rounds: in each round, every rank writes into a slot in the memory of every other rank. A slot is
/// reused only after its owner has acknowledged it. Only signals order these accesses.
void put_rounds(const mpgpu::context &ctx, const mpgpu::mpi::node &node, int rank) {
    const auto ranks = static_cast<std::size_t>(node.communicator_size());
    const auto me = static_cast<std::size_t>(rank);
    const auto gpu = mpgpu::device::gpu(rank % ctx.devices().gpus);

    mpgpu::buffer<std::uint32_t> inbox(ctx, gpu, ranks * elements);
    mpgpu::buffer<std::uint32_t> outbox(ctx, gpu, ranks * elements);
    // Counter r is the number of puts of rank r to this rank. Counter ranks + r is the number of this rank's puts that
    // rank r has acknowledged.
    mpgpu::signal_counters counters(ctx, 2 * ranks);

    auto inboxes = node.exchange(inbox);
    auto signals = node.exchange(counters);
    require(inboxes.size() == node.communicator_size(), "one entry for each rank");
    require(inboxes.of(rank) != nullptr && inboxes.of(rank)->data() == inbox.data(),
            "a rank's own memory has its own address");

    std::vector<mpgpu::transfer> transfers;
    std::vector<std::size_t> others;
    for (std::size_t other = 0; other < ranks; ++other) {
        const int number = static_cast<int>(other);
        require(node.contains(number) == (inboxes.of(number) != nullptr),
                "the memory of every rank of the node is mapped");
        if (!node.contains(number)) {
            require(inboxes.status(number) == mpgpu::status::not_supported && !inboxes.why(number).empty(),
                    "a reason for other nodes");
            continue;
        }
        require(inboxes.status(number) == mpgpu::status::success && inboxes.why(number).empty(), inboxes.why(number));
        require(inboxes.of(number)->size() == ranks * elements, "the size travels with the handle");
        require(inboxes.of(number)->location() == mpgpu::device::gpu(number % ctx.devices().gpus),
                "the device travels too");
        if (other != me) {
            others.push_back(other);
            transfers.push_back(mpgpu::make_transfer(inboxes.of(number)->subspan(me * elements, elements),
                                                     outbox.subspan(other * elements, elements)));
        }
    }

    const mpgpu::plan puts(ctx, mpgpu::array_view<const mpgpu::transfer>(transfers));
    const mpgpu::stream stream(ctx, gpu);
    for (int round = 1; round <= rounds; ++round) {
        for (const std::size_t other : others) {
            for (std::size_t i = 0; i < elements; ++i) {
                outbox.data()[(other * elements) + i] = pattern(round, rank, static_cast<int>(other), i);
            }
        }
        std::vector<mpgpu::signal_value> taken;
        std::vector<mpgpu::signal_value> put;
        std::vector<mpgpu::signal_value> arrived;
        std::vector<mpgpu::signal_value> take;
        const auto value = static_cast<std::uint64_t>(round);
        for (const std::size_t other : others) {
            std::uint64_t *theirs = signals.of(static_cast<int>(other))->data();
            taken.push_back({counters.data() + ranks + other, value - 1});
            put.push_back({theirs + me, value});
            arrived.push_back({counters.data() + other, value});
            take.push_back({theirs + ranks + me, value});
        }
        ctx.wait(stream, taken);
        puts.enqueue(stream);
        ctx.raise(stream, put);
        ctx.wait(stream, arrived);
        stream.synchronize();
        for (const std::size_t other : others) {
            for (std::size_t i = 0; i < elements; ++i) {
                require(inbox.data()[(other * elements) + i] == pattern(round, static_cast<int>(other), rank, i),
                        "round " + std::to_string(round) + ": a byte of rank " + std::to_string(other) + " is wrong");
            }
        }
        ctx.raise(stream, take);
    }
    for (const std::size_t other : others) {
        ctx.synchronize({counters.data() + ranks + other, static_cast<std::uint64_t>(rounds)}, 60.0);
    }
    stream.synchronize();
    // No rank may free memory in which another rank still sets signals.
    MPI_Barrier(node.communicator());
}

void devices_are_known_by_name(const mpgpu::context &ctx, const mpgpu::mpi::node &node, int rank) {
    const int gpus = ctx.devices().gpus;
    const auto devices = node.device_of_each(mpgpu::device::gpu(rank % gpus));
    require(devices.size() == node.ranks().size(), "one device for each rank of the node");
    for (std::size_t i = 0; i < devices.size(); ++i) {
        require(devices[i] == mpgpu::device::gpu(node.ranks()[i] % gpus), "a rank's device is found by its UUID");
    }
    require(mpgpu::mpi::uuid_of(ctx, mpgpu::device::gpu(0)) != mpgpu::mpi::uuid_of(ctx, mpgpu::device::gpu(1)),
            "names differ");
}

void a_node_that_is_default_constructed_refuses_calls() {
    const mpgpu::mpi::node none;
    require(!none && none.size() == 0 && none.communicator_size() == 0 && !none.contains(0), "it has no ranks");
    require(!refusal_of([&] { static_cast<void>(none.rank_on_node(0)); }).empty(), "no rank has a number there");
    bool refused = false;
    try {
        static_cast<void>(none.device_of_each(mpgpu::device::gpu(0)));
    } catch (const mpgpu::argument_error &) {
        refused = true;
    }
    require(refused, "a collective call says so");
}

void a_rank_without_memory_keeps_nobody_waiting(const mpgpu::context &ctx, const mpgpu::mpi::node &node, int rank) {
    // Rank 0 passes no memory, and rank 1 passes memory that cannot be exported.
    std::vector<double> ordinary(4);
    auto memory = mpgpu::buffer<double>::shared(ctx, mpgpu::device::host(), 4);
    mpgpu::device_span<double> mine = memory;
    if (rank == 0) {
        mine = {{}, mpgpu::device::host()};
    } else if (rank == 1) {
        mine = {{ordinary.data(), ordinary.size()}, mpgpu::device::host()};
    }
    auto shared = node.exchange(mine);
    for (const int other : node.ranks()) {
        require((shared.of(other) != nullptr) == (other > 1), "who offers memory has it mapped");
        require(shared.status(other) == (other == 1 ? mpgpu::status::invalid_pointer : mpgpu::status::success),
                "the reason");
        require(shared.why(other).empty() == (other != 1), "the reason in words");
    }
}

/// Tests that a rank can pass several memory ranges. Rank r passes r + 1 ranges. One of them is empty, and one on rank
/// 1 cannot be exported. Every rank writes to the ranges of all others.
void several_ranges_are_found_by_rank_and_index(const mpgpu::context &ctx, const mpgpu::mpi::node &node, int rank) {
    const auto ranks = static_cast<std::size_t>(node.communicator_size());
    const auto mine = static_cast<std::size_t>(rank) + 1;
    auto memory = mpgpu::buffer<int>::shared(ctx, mpgpu::device::host(), mine * ranks);
    mpgpu::buffer<int> source(ctx, mpgpu::device::host(), ranks + 1);
    std::vector<int> ordinary(4);
    std::vector<mpgpu::device_span<int>> ranges;
    for (std::size_t range = 0; range < mine; ++range) {
        ranges.push_back(memory.subspan(range * ranks, range == 0 ? 0 : ranks));
    }
    if (rank == 1) {
        ranges.push_back({{ordinary.data(), ordinary.size()}, mpgpu::device::host()});
    }
    auto shared = node.exchange(ranges);
    std::vector<mpgpu::transfer> transfers;
    for (int other = 0; other < node.communicator_size(); ++other) {
        const auto offered = static_cast<std::size_t>(other) + 1;
        for (std::size_t range = 0; range < ranks + 2; ++range) {
            const bool is_there = node.contains(other) && range > 0 && range < offered;
            const bool failed = other == 1 && range == 2;
            require((shared.of(other, range) != nullptr) == is_there, "what was offered is there, and nothing else");
            if (!node.contains(other)) {
                require(shared.status(other, range) == mpgpu::status::not_supported,
                        "another node, whatever the range");
            } else {
                require(shared.status(other, range) ==
                            (failed ? mpgpu::status::invalid_pointer : mpgpu::status::success),
                        "the reason");
                require(shared.why(other, range).empty() != failed, "the reason in words");
            }
            if (is_there) {
                const auto at = static_cast<std::size_t>(rank);
                source.data()[range] = 1000 * rank + static_cast<int>(range);
                require(shared.of(other, range)->size() == ranks, "each range has its own size");
                transfers.push_back(
                    mpgpu::make_transfer(shared.of(other, range)->subspan(at, 1), source.subspan(range, 1)));
            }
        }
    }
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0));
    mpgpu::plan(ctx, transfers).enqueue(stream);
    stream.synchronize();
    MPI_Barrier(node.communicator());
    for (std::size_t range = 1; range < mine; ++range) {
        for (const int other : node.ranks()) {
            require(memory.data()[range * ranks + static_cast<std::size_t>(other)] ==
                        1000 * other + static_cast<int>(range),
                    "what each rank wrote into each range");
        }
    }
    require(node.exchange(std::vector<mpgpu::device_span<int>>()).of(rank) == nullptr, "nobody offers anything");
    shared = {};
    MPI_Barrier(node.communicator());
}

/// Tests a ring of send and receive descriptors over the ranks of a node. Also tests that each call refuses a rank of
/// another node, with an error that contains its number.
void ranks_of_other_nodes_are_refused_by_name(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const auto gpu = mpgpu::device::gpu(world_rank % ctx.devices().gpus);
    mpgpu::buffer<int> sent(ctx, gpu, 1);
    mpgpu::buffer<int> received(ctx, gpu, 2);
    *sent.data() = world_rank;
    received.data()[0] = -1;
    received.data()[1] = -1;
    const auto ranks = static_cast<int>(node.ranks().size());
    const int outside = node.rank_on_node(MPI_PROC_NULL);
    const mpgpu::plan plan =
        node.plan_exchange({mpgpu::send_to(outside, 0, sent), mpgpu::receive_from(outside, 0, received.subspan(0, 1)),
                            mpgpu::send_to((node.rank() + 1) % ranks, 1, sent),
                            mpgpu::receive_from((node.rank() + ranks - 1) % ranks, 1, received.subspan(1, 1))});
    const mpgpu::stream stream(ctx, gpu);
    plan.enqueue(stream);
    stream.synchronize();
    require(received.data()[0] == -1, "where there is no neighbour nothing is moved");
    require(received.data()[1] == node.ranks()[static_cast<std::size_t>((node.rank() + ranks - 1) % ranks)],
            "the ring of the node");
    const int there = world_rank ^ 1;
    if (there >= node.communicator_size()) {
        return;
    }
    const int number = node.rank_on_node(there);
    const std::string name = "rank " + std::to_string(there) + " is on another node";
    const auto is_named = [&](auto &&call) {
        const std::string refusal = refusal_of(call);
        require(refusal.find(name) != std::string::npos, "expected '" + name + "', and got '" + refusal + "'");
    };
    is_named([&] { static_cast<void>(node.plan_exchange({mpgpu::send_to(number, 0, sent)})); });
    is_named([&] { static_cast<void>(node.plan_exchange({mpgpu::receive_from(number, 0, received)})); });
    is_named([&] {
        static_cast<void>(node.plan({mpgpu::make_window(received)},
                                    {{mpgpu::node_end(number, 0), mpgpu::node_end(node.rank(), 0), 4}}));
    });
    is_named([&] { static_cast<void>(mpgpu::broadcast(node, number, sent)); });
    const mpgpu::messenger messages(node);
    is_named([&] { static_cast<void>(messages.send(sent, number, 0, stream)); });
    is_named([&] { static_cast<void>(messages.receive(received, number, 0, stream)); });
    is_named([&] { static_cast<void>(messages.probe(number, 0)); });
    // These MPI constants do not denote a rank, so they cannot be used in messages.
    for (const int none : {MPI_PROC_NULL, MPI_ANY_SOURCE}) {
        require(!refusal_of([&] { static_cast<void>(messages.receive(received, none, 0, stream)); }).empty(),
                "MPI's constants are no ranks of messages");
    }
    auto shared = node.exchange(received);
    require(shared.of(number) == nullptr && shared.status(number) == mpgpu::status::invalid_argument &&
                !shared.why(number).empty(),
            "numbers of the node are not those of the communicator");
    require(shared.of(there) == nullptr && shared.why(there).find(name) == 0, "memory of another node is not here");
    shared = {};
    MPI_Barrier(node.communicator());
}

/// Tests that all ranks get an error if they are in different collective calls, and that the next call succeeds.
void calls_that_differ_are_errors(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    if (node.size() < 2) {
        return;
    }
    const auto gpu = mpgpu::device::gpu(0);
    auto memory = mpgpu::buffer<int>::shared(ctx, mpgpu::device::host(), 4);
    mpgpu::halo::grid g;
    g.cells = {4, 4, 4 * std::int64_t{node.communicator_size()}};
    g.ranks = {1, 1, node.communicator_size()};
    g.ghost = {1, 1, 1};
    mpgpu::buffer<int> cells(ctx, gpu, std::size_t{6} * 6 * 6);
    using call = std::pair<const char *, std::function<void()>>;
    const std::vector<call> calls = {
        {"exchange", [&] { static_cast<void>(node.exchange(memory)); }},
        {"device_of_each", [&] { static_cast<void>(node.device_of_each(gpu)); }},
        {"node plan creation", [&] { static_cast<void>(node.plan_exchange({})); }},
        {"messenger creation", [&] { const mpgpu::messenger made(node); }},
        {"halo::plan", [&] { const mpgpu::halo::plan made(ctx, node, g, {mpgpu::halo::array_of(cells)}); }},
    };
    for (std::size_t a = 0; a < calls.size(); ++a) {
        for (std::size_t b = a + 1; b < calls.size(); ++b) {
            const bool first = node.rank() == 0;
            const std::string refusal = refusal_of(calls[first ? a : b].second);
            std::string names = calls[a].first;
            names += " and ";
            names += calls[b].first;
            names += " that meet are named: ";
            names += refusal;
            require(refusal.find(calls[a].first) != std::string::npos &&
                        refusal.find(calls[b].first) != std::string::npos,
                    names);
            require(node.exchange(memory).of(node.communicator_rank()) != nullptr, "the next call goes well");
            MPI_Barrier(node.communicator()); // no rank frees memory that others have mapped
        }
    }
}

/// Tests sizes that exceed the memory of one rank. This rank reports the error to the other ranks.
void collectives_stay_within_their_memory(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const auto ranks = static_cast<std::size_t>(node.size());
    const int root = 0;
    auto part = mpgpu::buffer<int>::shared(ctx, mpgpu::device::host(), 4);
    auto whole = mpgpu::buffer<int>::shared(ctx, mpgpu::device::host(), 4 * ranks);
    std::vector<std::size_t> sizes(ranks, 4);
    const auto refused = [&](auto &&call, const std::string &words) {
        const std::string refusal = refusal_of(call);
        require(refusal.find(words) != std::string::npos, "expected '" + words + "', and got '" + refusal + "'");
    };
    const auto all = [&](const std::vector<std::size_t> &given, const std::string &words) {
        refused([&] { static_cast<void>(mpgpu::scatter(node, root, whole, part, given)); }, words);
        refused([&] { static_cast<void>(mpgpu::gather(node, root, part, whole, given)); }, words);
        refused([&] { static_cast<void>(mpgpu::all_gather(node, part, whole, given)); }, words);
    };
    const auto own = static_cast<std::size_t>(node.rank());
    sizes[own] = 5;
    all(sizes, "has 16 bytes, but 20 are transferred there");
    sizes[own] = 3;
    all(sizes, "has 16 bytes, but 12 are transferred there");
    sizes[own] = (std::size_t{1} << 62) + 4; // 16 bytes if products wrap around
    all(sizes, "more bytes than an address can count");
    sizes.assign(ranks, std::size_t{1} << 61); // sums wrap around too
    all(sizes, ranks > 1 ? "more bytes than an address can count" : "are transferred there");
    sizes.assign(ranks + 1, 4);
    all(sizes, "elements has " + std::to_string(ranks + 1) + " sizes, and " + std::to_string(ranks) + " are needed");
    refused([&] { static_cast<void>(mpgpu::all_to_all(node, whole, whole, sizes)); }, "sent has");
    refused([&] { static_cast<void>(mpgpu::broadcast(node, node.size(), part)); }, "is not one of the");
    refused([&] { static_cast<void>(mpgpu::broadcast(node, -1, part)); }, "root -1 is not one of the");
    // Only one rank makes an error. The other ranks, which are in their call, get the error too.
    const bool is_wrong = node.rank() == node.size() - 1;
    refused(
        [&] {
            sizes.assign(ranks, 4);
            sizes[own] = is_wrong ? 5 : 4;
            static_cast<void>(node.plan_exchange(mpgpu::all_gather(node, part, whole, sizes)));
        },
        "the source has 16 bytes, but 20 are transferred there");
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    try {
        mpgpu::context made;
        a_node_that_is_default_constructed_refuses_calls();
        mpgpu::mpi::node node;
        node = mpgpu::mpi::node(made, MPI_COMM_WORLD);
        const mpgpu::context ctx = std::move(made); // a node finds the context after it is moved
        require(node.size() == node.communicator_size() && node.communicator_rank() == world_rank,
                "all ranks are of this node");
        // The node group is created later than the object of which it is a member, and with one GPU.
        std::optional<mpgpu::mpi::node> later;
        later.emplace(ctx, MPI_COMM_WORLD, mpgpu::device::gpu(world_rank % ctx.devices().gpus));
        require(later->size() == node.size(), "it is made in place");
        later.reset();
        devices_are_known_by_name(ctx, node, world_rank);
        put_rounds(ctx, node, world_rank);
        a_rank_without_memory_keeps_nobody_waiting(ctx, node, world_rank);
        several_ranges_are_found_by_rank_and_index(ctx, node, world_rank);
        calls_that_differ_are_errors(ctx, node);
        collectives_stay_within_their_memory(ctx, node);

        // The ranks are divided into two nodes, each with half of the ranks.
        MPI_Comm half = MPI_COMM_NULL;
        MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, 0, &half);
        {
            const mpgpu::mpi::node part(ctx, MPI_COMM_WORLD, half);
            const int ranks = part.communicator_size();
            require(!part.contains(world_rank ^ 1) && !part.contains(-1) && !part.contains(ranks),
                    "the other half is elsewhere");
            require(part.rank_on_node(world_rank) == world_rank / 2 && part.rank() == world_rank / 2 &&
                        part.communicator_rank() == world_rank,
                    "ranks of a node have numbers of their own");
            require(part.size() == (ranks + 1 - world_rank % 2) / 2 && ranks == node.communicator_size(),
                    "sizes are of the node, or of the communicator");
            require(refusal_of([&] { static_cast<void>(part.rank_on_node(ranks)); }).find("numbered from 0") !=
                        std::string::npos,
                    "a rank that the communicator does not have is refused");
            ranks_of_other_nodes_are_refused_by_name(ctx, part);
            calls_that_differ_are_errors(ctx, part);
            put_rounds(ctx, part, world_rank);
            several_ranges_are_found_by_rank_and_index(ctx, part, world_rank);
        }
        MPI_Comm_free(&half);
        MPI_Barrier(MPI_COMM_WORLD);
    } catch (const std::exception &error) {
        require(false, error.what());
    }
    MPI_Finalize();
    if (world_rank == 0) {
        std::puts("ok");
    }
    return 0;
}
