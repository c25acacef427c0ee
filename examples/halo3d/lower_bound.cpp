// SPDX-License-Identifier: MIT OR Apache-2.0
#include "lower_bound.hpp"

#include "messages.hpp"

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace halo = mpgpu::halo;

namespace {

using steady = std::chrono::steady_clock;

double seconds_since(steady::time_point begin) {
    return std::chrono::duration<double>(steady::now() - begin).count();
}

double of_all(double own, MPI_Op what) {
    double found = 0;
    MPI_Allreduce(&own, &found, 1, MPI_DOUBLE, what, MPI_COMM_WORLD);
    return found;
}

/// Returns the time in seconds of packing or unpacking one message, averaged over many back-to-back launches. This is
/// the time on the fastest rank.
double seconds_of_copy(const mpgpu::context &ctx, const halo::grid &g, part &mine, const message &m, std::byte *at,
                       halo::direction way) {
    constexpr int in_a_row = 20;
    const mpgpu::stream stream(ctx, mine.where);
    const halo::launch_function launch =
        mine.code->copier()(ctx, mine.where, pieces_of(g, mine.rank, m, mine.arrays(), at), way);
    steady::time_point begin;
    for (const int copies : {2, in_a_row}) { // the first launches load the kernel
        begin = steady::now();
        for (int i = 0; i < copies; ++i) {
            launch(stream);
        }
        stream.synchronize();
    }
    return of_all(seconds_since(begin) / in_a_row, MPI_MIN);
}

/// Sends messages from each rank of the first half to a rank of the second half, and back: either between the first
/// pair alone, or between all pairs at the same time. Returns the median time of one message in seconds, on the slowest
/// pair.
double seconds_of_messages(std::byte *out, std::byte *in, std::uint64_t bytes, bool all_pairs) {
    constexpr int times = 51;
    int rank = 0;
    int ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const int half = ranks / 2;
    const int peer = rank < half ? rank + half : rank - half;
    const bool sends = rank < 2 * half && (all_pairs || std::min(rank, peer) == 0);
    std::vector<double> seconds(1, 0.0);
    for (int i = 0; i < times; ++i) {
        MPI_Barrier(MPI_COMM_WORLD);
        const steady::time_point begin = steady::now();
        if (sends) {
            MPI_Sendrecv(out, static_cast<int>(bytes), MPI_BYTE, peer, 0, in, static_cast<int>(bytes), MPI_BYTE, peer,
                         0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            seconds.push_back(seconds_since(begin));
        }
    }
    return of_all(sends ? median({seconds.begin() + 1, seconds.end()}) : 0.0, MPI_MAX);
}

} // namespace

double lower_bound::communication() const {
    const double sending = share * ranks;
    return latency + sending * static_cast<double>(bytes) / (alone + std::max(0.0, sending - 1) * more);
}

lower_bound measure_lower_bound(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::grid &g,
                                part &mine, bool device_memory) {
    lower_bound found;
    const messages all = messages_of(g, mine.rank, mine.vars.size());
    const auto to_other_ranks = [&](const message &m) { return m.rank != mine.rank; };
    const auto to_other_nodes = [&](const message &m) { return !node.contains(m.rank); };
    const auto counts = [&](const std::vector<message> &of) {
        return std::vector<double>{
            static_cast<double>(std::count_if(of.begin(), of.end(), to_other_nodes)),
            static_cast<double>(std::count_if(of.begin(), of.end(), to_other_ranks)),
        };
    };
    std::vector<double> messages_counted = counts(all.sent);
    MPI_Allreduce(MPI_IN_PLACE, messages_counted.data(), 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    if (of_all(counts(all.sent)[0], MPI_MIN) == 0) {
        return found; // at least one rank has no neighbour on another node
    }
    found.share = messages_counted[0] / messages_counted[1];
    MPI_Comm machine = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, &found.ranks);
    MPI_Comm_free(&machine);

    std::vector<message> sent = all.sent;
    sent.erase(std::remove_if(sent.begin(), sent.end(), [&](const message &m) { return !to_other_nodes(m); }),
               sent.end());
    const auto shorter = [](const message &a, const message &b) { return a.bytes < b.bytes; };
    const auto shortest = std::min_element(sent.begin(), sent.end(), shorter);
    const auto longest = std::max_element(sent.begin(), sent.end(), shorter);
    // The maximum over all ranks is used, although the size is equal if all ranks have equally many cells.
    found.bytes = static_cast<std::uint64_t>(of_all(static_cast<double>(longest->bytes), MPI_MIN));
    const mpgpu::device box = device_memory ? mine.where : mpgpu::device::host();
    mpgpu::memory out(ctx, box, longest->bytes);
    mpgpu::memory in(ctx, box, longest->bytes);
    found.pack = seconds_of_copy(ctx, g, mine, *shortest, out.data(), halo::direction::pack);
    const message opposite = *std::find_if(all.received.begin(), all.received.end(),
                                           [&](const message &m) { return m.bytes == longest->bytes; });
    found.unpack = seconds_of_copy(ctx, g, mine, opposite, in.data(), halo::direction::unpack);
    found.latency = seconds_of_messages(out.data(), in.data(), 8, false);
    const auto rate = [&](bool all_pairs) {
        const double seconds = seconds_of_messages(out.data(), in.data(), found.bytes, all_pairs);
        return static_cast<double>(found.bytes) / std::max(seconds - found.latency, 1e-9);
    };
    found.alone = rate(false);
    const int pairs = found.ranks / 2 * 2; // ranks of this machine that send if all pairs are active
    found.more = pairs > 1 ? std::max(0.0, (rate(true) * pairs - found.alone) / (pairs - 1)) : 0;
    return found;
}

void print(const lower_bound &bound) {
    std::printf("Lower bound: %.1f us = pack %.1f us (shortest message) + communication %.1f us + unpack %.1f us "
                "(longest, %llu bytes)\n",
                bound.seconds() * 1e6, bound.pack * 1e6, bound.communication() * 1e6, bound.unpack * 1e6,
                static_cast<unsigned long long>(bound.bytes));
    std::printf("K-model: latency %.2f us, fraction of messages to other nodes %.2f, %d ranks, %.2f GB/s for the first "
                "and %.2f GB/s for each further rank\n",
                bound.latency * 1e6, bound.share, bound.ranks, bound.alone / 1e9, bound.more / 1e9);
}
