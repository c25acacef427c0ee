// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests `options::time_limit`: the error of an exchange whose messages do not arrive from ranks of other nodes.
//
//   halo_time_limit               a rank does not take part in an exchange
//   halo_time_limit killed [block_each|all_blocks] [caller|thread] [large] [nodes]
//                                 a rank is killed in the middle of an exchange
//
//   block_each, all_blocks  persistent form
//   caller, thread          who makes progress
//   large                   messages that MPI sends by rendezvous
//
// Run by mpirun with two or three ranks on one machine, each of which counts as a node of its own. With `nodes`, the
// ranks may be on several machines or on nodes that tests/cpp/nodes emulates. A launcher ends a job that has lost a
// rank, unless it is told otherwise. The surviving ranks ignore SIGTERM until they have finished their checks. Each
// survivor prints a line, and the caller checks that all of them have printed it.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
using namespace std::chrono_literals;
using ranks_test::end;
using ranks_test::left_over;
using ranks_test::require;
using ranks_test::world_rank;

constexpr auto bound = 10s; // from the death of a rank to the errors of its neighbours
constexpr int healthy = 3;

/// Returns the grid of a ring, in which each rank has two neighbours. MPI sends small messages eagerly and large
/// messages by rendezvous.
halo::grid ring(int ranks, bool large) {
    halo::grid g;
    g.cells = {large ? 40000 : 8, 4 * std::int64_t{ranks}, 1};
    g.ranks = {1, ranks, 1};
    g.periodic = {false, true, false};
    g.ghost = {0, 1, 0};
    g.reach = halo::neighbours::faces;
    return g;
}

halo::options options_of(const mpgpu::context &ctx, halo::persistent_form form, halo::progress_by progress) {
    halo::options how = halo_test::options_for(ctx);
    how.direct_pieces = 0;
    how.persistent = form;
    how.progress = progress;
    return how;
}

void exchange(halo::plan &plan, const mpgpu::stream &stream, halo::progress_by progress) {
    plan.start(stream);
    while (progress == halo::progress_by::caller && !plan.progress().is_done()) {
        std::this_thread::yield();
    }
    plan.finish(stream);
    stream.synchronize();
}

/// Tests an exchange in which the last rank does not take part. The other ranks get an error that names it. After that,
/// the plans may be destroyed, and exchanges of another plan succeed.
void wait_for_a_silent_rank(const mpgpu::context &ctx, const mpgpu::mpi::node &node, bool large, halo::options how) {
    const int silent = node.communicator_size() - 1;
    const halo::grid g = ring(node.communicator_size(), large);
    const halo_test::part mine(ctx, g, world_rank, {8});
    const mpgpu::stream stream(ctx, mine.where());
    how.time_limit = 200ms;
    {
        halo::plan plan(ctx, node, g, mine.arrays(), how);
        if (world_rank != silent) {
            const auto begin = std::chrono::steady_clock::now();
            std::string why;
            try {
                exchange(plan, stream, how.progress);
            } catch (const mpgpu::timeout &e) {
                why = e.what();
            }
            const auto took = std::chrono::steady_clock::now() - begin;
            require(why.find("time_limit, 200 ms") != std::string::npos, "the error is '" + why + "'");
            require(why.find("arrived from rank") != std::string::npos &&
                        why.find(' ' + std::to_string(silent)) != std::string::npos,
                    "the silent rank is not named: " + why);
            require(!large || why.find("accepted by rank") != std::string::npos,
                    "the messages that were not sent are not named: " + why);
            require(took >= *how.time_limit, "the error came before the limit");
            require(ranks_test::failure_of([&] { plan.start(stream); }) == mpgpu::status::rank_failed,
                    "an exchange of a plan that has failed was begun");
        }
        MPI_Barrier(MPI_COMM_WORLD); // the silent rank takes part in nothing before
    }
    how.time_limit = 10min;
    halo::plan plan(ctx, node, g, mine.arrays(), how);
    for (std::uint64_t cycle = 1; cycle <= 3; ++cycle) {
        mine.fill(cycle);
        mine.upload(stream);
        exchange(plan, stream, how.progress);
        mine.download(stream);
        stream.synchronize();
        const std::string difference = mine.first_difference(cycle);
        require(difference.empty(), "after an exchange that has failed: " + difference);
    }
    plan.destroy();
}

/// Tests that an interval without polls counts as at most a sixteenth of the limit.
void the_clock_counts_polls() {
    constexpr auto limit = 16ms;
    halo::detail::wait_clock clock;
    clock.restart();
    std::this_thread::sleep_for(2 * limit);
    require(!clock.has_reached(limit), "the program has polled once, and MPI could not receive anything");
    for (int poll = 0; poll < 14; ++poll) {
        std::this_thread::sleep_for(limit / 16);
        require(!clock.has_reached(limit), "the limit is reached after fewer polls than it takes");
    }
    std::this_thread::sleep_for(limit / 8);
    require(clock.has_reached(limit), "the limit is not reached by sixteen polls");
    require(halo::detail::text_of_ranks({5, 3, 5}) == "ranks 3, 5" && halo::detail::text_of_ranks({2}) == "rank 2",
            "ranks are listed once, in order");
    require(halo::detail::text_of_time(60s) == "60 s" && halo::detail::text_of_time(1500ms) == "1500 ms" &&
                halo::detail::text_of_time(1ns) == "1 ns",
            "times are in the largest unit that divides them");
}

void refuse_limits_that_are_not_positive(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const halo::grid g = ring(node.communicator_size(), false);
    const halo_test::part mine(ctx, g, world_rank, {8});
    for (const std::chrono::nanoseconds limit : {0ns, -1ns}) {
        halo::options how = halo_test::options_for(ctx);
        how.time_limit = limit;
        require(ranks_test::failure_of([&] { const halo::plan made(ctx, node, g, mine.arrays(), how); }) ==
                    mpgpu::status::invalid_argument,
                "a time limit of no time is accepted");
    }
}

void run() {
    the_clock_counts_polls();
    const mpgpu::context ctx;
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, MPI_COMM_SELF, {halo_test::device_of(ctx, world_rank)});
    refuse_limits_that_are_not_positive(ctx, node);
    for (const auto form :
         {halo::persistent_form::none, halo::persistent_form::block_each, halo::persistent_form::all_blocks}) {
        for (const auto progress : {halo::progress_by::start, halo::progress_by::caller, halo::progress_by::thread}) {
            for (const bool large : {false, true}) {
                wait_for_a_silent_rank(ctx, node, large, options_of(ctx, form, progress));
            }
        }
    }
}

struct killed_test {
    halo::persistent_form form = halo::persistent_form::none;
    halo::progress_by progress = halo::progress_by::start;
    bool large = false;
    bool nodes = false; ///< true if the launcher has placed the ranks on nodes
};

/// Kills the last rank in the middle of an exchange. The other ranks get an error and end.
void run_killed(const killed_test &test) {
    std::optional<mpgpu::context> ctx(std::in_place);
    std::optional<mpgpu::mpi::node> node(std::in_place, *ctx, MPI_COMM_WORLD,
                                         test.nodes ? MPI_COMM_NULL : MPI_COMM_SELF,
                                         halo_test::device_of(*ctx, world_rank));
    const int ranks = node->communicator_size();
    const int victim = ranks - 1;
    const halo::grid g = ring(ranks, test.large);
    std::optional<halo_test::part> mine(std::in_place, *ctx, g, world_rank, std::vector<std::size_t>{8});
    halo::options how = options_of(*ctx, test.form, test.progress);
    how.time_limit = 3s;
    std::optional<mpgpu::stream> stream(std::in_place, *ctx, mine->where());
    std::optional<halo::plan> plan(std::in_place, *ctx, *node, g, mine->arrays(), how);
    for (int i = 0; i < healthy; ++i) {
        exchange(*plan, *stream, how.progress);
    }
    char token = 0;
    if (world_rank == victim) {
        plan->start(*stream);
        for (int rank = 0; rank < victim; ++rank) { // all others are past the healthy exchanges
            MPI_Recv(&token, 1, MPI_CHAR, rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        }
        std::raise(SIGKILL);
    }
    MPI_Send(&token, 1, MPI_CHAR, victim, 0, MPI_COMM_WORLD);
    const auto begin = std::chrono::steady_clock::now();
    std::string why;
    mpgpu::status status = mpgpu::status::success;
    for (int succeeded = 0; why.empty(); ++succeeded) {
        if (succeeded > ranks) { // ranks between this rank and the victim can complete one exchange each
            end(1, "exchanges go on succeeding without a neighbour");
        }
        try {
            exchange(*plan, *stream, how.progress);
        } catch (const mpgpu::error &e) {
            why = e.what();
            status = static_cast<mpgpu::status>(e.code().value());
        }
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    // In place of `timeout`, a rank may get an error of MPI itself, or `peer_gone` if the killed rank is on its node.
    const bool is_alone = node->size() == 1;
    const bool is_neighbour = world_rank == 0 || world_rank + 1 == victim;
    if (status == mpgpu::status::timeout) {
        if (is_alone && is_neighbour && why.find(' ' + std::to_string(victim)) == std::string::npos) {
            end(1, "the killed rank is not named: " + why);
        }
    } else if (status != mpgpu::status::driver && (is_alone || status != mpgpu::status::peer_gone)) {
        end(1, "another error: " + why);
    }
    if (took > bound) {
        end(1, "it took " + std::to_string(std::chrono::duration<double>(took).count()) + " s: " + why);
    }
    plan.reset();
    stream.reset();
    mine.reset();
    node.reset();
    ctx.reset();
    const std::string left = left_over();
    if (!left.empty()) {
        end(1, "something " + left);
    }
    std::printf("rank %d: an error in time, and nothing is left: %s\n", world_rank, why.c_str());
    std::fflush(stdout);
    // The launcher ends the job when a rank exits without MPI_Finalize, which would wait for the killed rank. Therefore
    // the survivors exit together.
    for (int rank = 1; rank < victim && world_rank == 0; ++rank) {
        MPI_Recv(&token, 1, MPI_CHAR, rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    for (int rank = 1; rank < victim && world_rank == 0; ++rank) {
        MPI_Send(&token, 1, MPI_CHAR, rank, 1, MPI_COMM_WORLD);
    }
    if (world_rank > 0) {
        MPI_Sendrecv_replace(&token, 1, MPI_CHAR, 0, 1, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    _exit(0);
}

} // namespace

int main(int argc, char *argv[]) {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    if (arguments.empty()) {
        return ranks_test::run_together(argc, argv, "every silent rank was named", run);
    }
    const auto is_given = [&](const char *name) {
        return std::find(arguments.begin(), arguments.end(), name) != arguments.end();
    };
    killed_test test;
    test.form = is_given("block_each")   ? halo::persistent_form::block_each
                : is_given("all_blocks") ? halo::persistent_form::all_blocks
                                         : halo::persistent_form::none;
    test.progress = is_given("caller")   ? halo::progress_by::caller
                    : is_given("thread") ? halo::progress_by::thread
                                         : halo::progress_by::start;
    test.large = is_given("large");
    test.nodes = is_given("nodes");
    return ranks_test::run_surviving(argc, argv, [&] { run_killed(test); });
}
