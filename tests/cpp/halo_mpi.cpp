// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests halo exchanges between processes. Every cell of every rank's arrays is compared with an undivided mesh. Run by
// mpirun with any number of ranks, on the host backend or on GPUs. At the first error the program ends all ranks with a
// message. On GPUs it packs only if it is compiled by nvcc.
//
// Without an argument, all ranks are on one machine, and the program also treats groups of them as nodes. On several
// machines, or on nodes that tests/cpp/nodes emulates, the argument is the number of ranks on each machine, for example
// 2+1.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

namespace halo = mpgpu::halo;
namespace reference = halo_reference;

constexpr int problems = 12;
constexpr std::uint64_t few_cycles = 40;
constexpr std::uint64_t many_cycles = 400;

std::uint64_t usual_cycles = few_cycles; // fewer over a real network, or an emulated one

bool shown = false; // one description, for the log
std::string tried;  // properties of the current run, for errors

/// Returns a random value of `direct_pieces`. If packing is not possible, returns the value with which nothing is
/// packed.
std::optional<std::uint64_t> random_form(std::mt19937 &random, const mpgpu::context &ctx) {
    constexpr std::uint64_t never_pack = std::numeric_limits<std::uint64_t>::max();
    constexpr std::array<std::optional<std::uint64_t>, 5> forms{0, 1, 5, never_pack, std::nullopt};
    const std::optional<std::uint64_t> drawn = forms.at(random() % forms.size());
    return halo_test::can_pack(ctx) ? drawn : never_pack;
}

/// Runs cycles without host synchronisation. Each cycle sets the arrays, exchanges them and compares them, in stream
/// order.
void run_cycles(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::grid &g,
                const std::vector<std::size_t> &sizes, const halo::options &how, std::uint64_t cycles, bool in_two) {
    const halo_test::part mine(ctx, g, world_rank, sizes);
    const mpgpu::stream stream(ctx, mine.where());
    halo::plan halo(ctx, node, g, mine.arrays(), how);
    require(!(how.pushed.value_or(false) || how.direct_pieces) || halo.measured().empty(),
            "nothing is measured where the form is given");
    require(halo.pushed() == how.pushed.value_or(halo.pushed() && !how.direct_pieces),
            "the form that was asked for is taken");
    for (const halo::measured_form &form : halo.measured()) {
        std::array<double, 2> readings = {form.seconds, -form.seconds};
        MPI_Allreduce(MPI_IN_PLACE, readings.data(), 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        require(readings[0] == -readings[1] && form.seconds > 0, "all ranks choose by the same readings");
    }
    if (world_rank == 0 && !halo.measured().empty() && !std::exchange(shown, true)) {
        std::printf("%s", halo.describe().c_str());
    }
    std::uint64_t sent = halo.direct_bytes() + halo.packed_bytes();
    MPI_Allreduce(MPI_IN_PLACE, &sent, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    require(sent == reference::exchanged_bytes(g, sizes), "the ranks send as many bytes as there are ghost cells");

    std::string difference;
    for (std::uint64_t cycle = 1; cycle <= cycles; ++cycle) {
        stream.launch_host([&mine, cycle] { mine.fill(cycle); });
        mine.upload(stream);
        if (in_two) {
            halo.start(stream);
            if (cycle % 3 == 0) {
                halo.start(stream); // the previous exchange is completed first
            }
            while (cycle % 3 == 1 && !halo.progress().is_done()) {
                std::this_thread::yield();
            }
            halo.finish(stream);
        } else {
            halo.exchange(stream);
        }
        mine.download(stream);
        stream.launch_host([&mine, &difference, cycle] {
            if (difference.empty()) {
                difference = mine.first_difference(cycle);
            }
        });
    }
    stream.synchronize();
    require(difference.empty(), tried + (in_two ? ", in two steps: " : ": ") + difference);
    halo.destroy();
}

/// Tests halo exchanges that push messages (write them into the receiver's memory), with random problems, randomly
/// delayed ranks and two alternating streams.
void push(const mpgpu::context &ctx, const mpgpu::mpi::node &node, std::mt19937 &random) {
    halo::options how = halo_test::options_for(ctx);
    how.pushed = true;
    const std::uint64_t cycles = std::getenv("LONG_TESTS") != nullptr ? 10000 : few_cycles;
    tried = "pushed";
    for (int problem = 0; problem < problems; ++problem) {
        const auto [g, sizes] = reference::random_problem(random, node.communicator_size());
        run_cycles(ctx, node, g, sizes, how, cycles, problem % 2 == 1);
    }
    // The problem is large enough that every block copies part of each message.
    halo::grid g;
    g.ranks = {node.communicator_size(), 1, 1};
    g.cells = {3 * std::int64_t{node.communicator_size()}, 40, 30};
    g.periodic = {true, true, true};
    g.ghost = {2, 1, 1};
    run_cycles(ctx, node, g, {8, 4, 1, 12}, how, few_cycles, false);

    g.cells = {2 * std::int64_t{node.communicator_size()} + 1, 5, 4};
    const halo_test::part mine(ctx, g, world_rank, {8, 4});
    const std::array<mpgpu::stream, 2> streams = {mpgpu::stream(ctx, mine.where()), mpgpu::stream(ctx, mine.where())};
    mpgpu::event before(ctx);
    halo::plan halo(ctx, node, g, mine.arrays(), how);
    std::string difference;
    std::mt19937 own(static_cast<unsigned>(world_rank));                                 // different on each rank
    const std::uint64_t many = (halo_test::on_host_backend(ctx) ? 10 : 2) * many_cycles; // ranks may share a GPU
    for (std::uint64_t cycle = 1; cycle <= many; ++cycle) {
        const mpgpu::stream &stream = streams.at(own() % 2);
        stream.wait(before);
        const auto pause = std::chrono::microseconds(own() % 8 == 0 ? own() % 300 : 0);
        stream.launch_host([&mine, cycle, pause] {
            std::this_thread::sleep_for(pause);
            mine.fill(cycle);
        });
        mine.upload(stream);
        if (own() % 3 == 0) {
            halo.start(stream);
            halo.finish(stream);
        } else {
            halo.exchange(stream);
        }
        mine.download(stream);
        stream.launch_host([&mine, &difference, cycle] {
            difference = difference.empty() ? mine.first_difference(cycle) : difference;
        });
        before.record(stream);
    }
    before.synchronize();
    require(difference.empty(), difference);
    // No other work is between the exchanges. Each follows the last one, whatever stream it is in.
    mine.fill(1);
    mine.upload(streams[0]);
    streams[0].synchronize();
    for (std::uint64_t cycle = 0; cycle < many; ++cycle) {
        halo.exchange(streams.at(cycle % 2));
    }
    halo.finish(streams[0]);
    mine.download(streams[0]);
    streams[0].synchronize();
    difference = mine.first_difference(1);
    require(difference.empty(), difference);
    halo.destroy();
}

/// Tests that ranks which see only one GPU each also push messages. The other forms are refused or measured as usual.
void push_with_one_gpu_in_sight(std::mt19937 &random) {
    int gpus = 0;
    {
        const mpgpu::context ctx;
        if (!halo_test::on_host_backend(ctx)) {
            return; // the caller sets CUDA_VISIBLE_DEVICES
        }
        gpus = ctx.devices().gpus;
    }
    setenv("MPGPU_HOST_VISIBLE_DEVICES", std::to_string(world_rank % gpus).c_str(), 1);
    {
        const mpgpu::context ctx;
        require(ctx.devices().gpus == 1, "one GPU is in sight");
        const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {halo_test::device_of(ctx, world_rank)});
        push(ctx, node, random);
    }
    unsetenv("MPGPU_HOST_VISIBLE_DEVICES");
}

/// Tests that an error on one rank is thrown on all ranks, and that no rank waits forever.
void refuse_on_all_ranks(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.communicator_size()}, 1};
    g.ranks = {1, node.communicator_size(), 1};
    g.ghost = {1, 1, 0};
    const halo_test::part mine(ctx, g, world_rank, {8, 4});
    const halo::options how = halo_test::options_for(ctx);
    const auto refused = [&](const halo::grid &with, const halo::rank_arrays &arrays,
                             const halo::options *form = nullptr) {
        try {
            const halo::plan made(ctx, node, with, arrays, form != nullptr ? *form : how);
            return false;
        } catch (const mpgpu::argument_error &) {
            return true;
        }
    };
    const bool last = world_rank + 1 == node.communicator_size();
    halo::rank_arrays arrays = mine.arrays();
    arrays[1].size -= last ? 1 : 0;
    require(refused(g, arrays), "an array of the wrong size on one rank is refused on all");
    halo::grid other = g;
    other.ranks[1] += 1;
    require(refused(other, mine.arrays()), "a grid of more ranks than the communicator has is refused");
    halo::options bad = how;
    bad.pushed = true;
    bad.direct_pieces = 3;
    require(refused(g, mine.arrays(), &bad), "pushed messages and direct pieces are refused");
    if (node.communicator_size() > 1) {
        other = g;
        other.periodic[1] = last;
        require(refused(other, mine.arrays()), "grids that differ are refused on all ranks");
        bad = how;
        bad.pushed = last;
        require(refused(g, mine.arrays(), &bad), "forms that differ are refused on all ranks");
    }
    halo::plan(ctx, node, g, mine.arrays(), how).destroy(); // the errors have had no lasting effect
}

/// Tests that a form of the exchange is excluded on all ranks if one rank refuses it, either when it is created or in
/// its first exchange. No rank may wait forever. If no form remains, all ranks throw.
void leave_out_what_one_rank_refuses(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    if (node.communicator_size() < 2 || !halo_test::on_host_backend(ctx)) {
        return; // the CPU packs below
    }
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.communicator_size()}, 1};
    g.ranks = {1, node.communicator_size(), 1};
    g.ghost = {1, 1, 0};
    const std::vector<std::size_t> sizes = {8, 4};
    const halo_test::part mine(ctx, g, world_rank, sizes);
    const bool last = world_rank + 1 == node.communicator_size();
    const auto refuse = [] {
        mpgpu::detail::fail({mpgpu::status::not_supported, 0, "", "no packing on the last rank"});
    };
    for (const bool when_made : {true, false}) {
        int launched = 0;
        halo::options how;
        how.pushed = false;
        how.copy = [&](const mpgpu::context &context, mpgpu::device where, mpgpu::array_view<const halo::piece> pieces,
                       halo::direction way) -> halo::launch_function {
            if (last && when_made) {
                refuse();
            }
            return [&, copy = halo::detail::cpu_copier()(context, where, pieces, way)](mpgpu::stream_view stream) {
                if (last && ++launched > 2) { // in the second measured exchange
                    refuse();
                }
                copy(stream);
            };
        };
        const mpgpu::stream stream(ctx, mine.where());
        halo::plan plan(ctx, node, g, mine.arrays(), how);
        require(plan.direct_pieces() == 1 && plan.packed_bytes() == 0, "the form that nobody refuses is taken");
        const std::string why =
            std::string("planned, up to 0: ") + (last ? "no packing on the last rank" : "refused on another rank");
        require(plan.describe().find(why) != std::string::npos, plan.describe());
        mine.fill(1);
        mine.upload(stream);
        plan.exchange(stream);
        mine.download(stream);
        stream.synchronize();
        const std::string difference = mine.first_difference(1);
        require(difference.empty(), difference);
        plan.destroy();

        how.direct_pieces = 0;
        bool thrown = !when_made; // with one form nothing is measured
        if (when_made) {
            try {
                const halo::plan made(ctx, node, g, mine.arrays(), how);
            } catch (const mpgpu::not_supported &) {
                thrown = last;
            } catch (const mpgpu::argument_error &) {
                thrown = !last;
            }
        }
        require(thrown, "where every form is refused, all ranks throw, and the one that refused says why");
    }
}

/// Tests that a pushing kernel is excluded on all ranks if one rank refuses it. If the kernel was explicitly requested,
/// all ranks throw.
void leave_out_kernels_that_one_rank_refuses(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    if (node.communicator_size() < 2 || !halo_test::on_host_backend(ctx)) {
        return;
    }
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.communicator_size()}, 1};
    g.ranks = {1, node.communicator_size(), 1};
    g.ghost = {1, 1, 0};
    const halo_test::part mine(ctx, g, world_rank, {8, 4});
    const bool last = world_rank + 1 == node.communicator_size();
    const auto refuse = [] {
        mpgpu::detail::fail({mpgpu::status::not_supported, 0, "", "no pushing on the last rank"});
    };
    for (const bool when_made : {true, false}) {
        int launched = 0;
        halo::options how;
        how.pushed_copy = [&](const mpgpu::context &context, mpgpu::device where,
                              const halo::detail::pushed_messages &messages, int sharing) -> halo::launch_function {
            if (last && when_made) {
                refuse();
            }
            return
                [&, launch = halo::detail::cpu_pushed()(context, where, messages, sharing)](mpgpu::stream_view stream) {
                    if (last && ++launched > 1) { // in a series: the others wait for this rank's messages
                        refuse();
                    }
                    launch(stream);
                };
        };
        const mpgpu::stream stream(ctx, mine.where());
        halo::plan plan(ctx, node, g, mine.arrays(), how);
        require(!plan.pushed(), "a form that nobody refuses is taken");
        const std::string why =
            std::string("pushed: ") + (last ? "no pushing on the last rank" : "refused on another rank");
        require(plan.describe().find(why) != std::string::npos, plan.describe());
        mine.fill(1);
        mine.upload(stream);
        plan.exchange(stream);
        mine.download(stream);
        stream.synchronize();
        const std::string difference = mine.first_difference(1);
        require(difference.empty(), difference);
        plan.destroy();
        how.pushed = true;
        if (when_made) {
            bool thrown = false;
            try {
                const halo::plan made(ctx, node, g, mine.arrays(), how);
            } catch (const mpgpu::not_supported &) {
                thrown = last;
            } catch (const mpgpu::argument_error &) {
                thrown = !last;
            }
            require(thrown, "all ranks throw, and the one that refused says why");
        }
    }
}

/// Tests that arrays in host memory that no other rank can map are sent as messages, even if a direct form was
/// requested.
void send_what_cannot_be_shared(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    if (node.communicator_size() < 2 || !halo_test::on_host_backend(ctx)) {
        return; // the CPU packs host memory
    }
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.communicator_size()}, 1};
    g.ranks = {1, node.communicator_size(), 1};
    g.periodic = {false, true, false};
    g.ghost = {1, 1, 0};
    for (const bool by_library : {true, false}) {
        for (const std::optional<std::uint64_t> pieces : {std::optional<std::uint64_t>(), {1}, {100}}) {
            const std::size_t elements = reference::elements(g, world_rank);
            mpgpu::memory allocated(ctx, mpgpu::device::host(), by_library ? elements * 8 : 0);
            std::vector<std::byte> ordinary(by_library ? 0 : elements * 8);
            const halo::rank_arrays arrays = {
                {by_library ? allocated.data() : ordinary.data(), mpgpu::device::host(), 8, elements}};
            const mpgpu::stream stream(ctx, mpgpu::device::host());
            halo::options how;
            how.direct_pieces = pieces;
            how.pushed = false;
            halo::plan plan(ctx, node, g, arrays, how);
            require(plan.direct_pieces() == 0 && plan.direct_bytes() == 0, "messages are taken");
            require(plan.describe().find("not possible here: planned, up to " + std::to_string(pieces.value_or(1))) !=
                        std::string::npos,
                    plan.describe());
            for (std::uint64_t cycle = 1; cycle <= few_cycles; ++cycle) {
                reference::fill(g, world_rank, arrays, cycle);
                plan.exchange(stream);
                stream.synchronize();
                const std::string difference = reference::first_difference(g, world_rank, arrays, cycle);
                require(difference.empty(), difference);
            }
            plan.destroy();
        }
    }
}

/// Makes many exchanges back to back with each persistent kernel. All neighbours of all ranks are in one mesh.
void run_in_a_row(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const std::uint64_t cycles = std::getenv("LONG_TESTS") != nullptr ? 10000 : usual_cycles;
    halo::grid g;
    g.ranks = {1, 1, node.communicator_size()};
    if (node.communicator_size() % 4 == 0) {
        g.ranks = {2, 2, node.communicator_size() / 4};
    }
    g.periodic = {true, true, true};
    g.ghost = {1, 2, 1};
    for (std::size_t d = 0; d < 3; ++d) {
        g.cells.at(d) = 5 * std::int64_t{g.ranks.at(d)} + 1;
    }
    halo::grid large = g; // with messages that are sent in several parts
    large.ranks = {1, 1, node.communicator_size()};
    large.cells = {80, 90, 3 * std::int64_t{node.communicator_size()}};
    halo::options how = halo_test::options_for(ctx);
    how.direct_pieces = 0;
    for (const halo::persistent_form form : {halo::persistent_form::block_each, halo::persistent_form::all_blocks}) {
        how.persistent = form;
        run_cycles(ctx, node, g, {8, 4, 1}, how, cycles, false);
        run_cycles(ctx, node, large, {8, 4, 8}, how, 4, false);
    }
}

/// Tests that a plan may be destroyed between `start` and `finish`, which ends the kernel that waits for messages to
/// unpack. No rank receives the messages that are then in flight. They must not reach the plans of later tests.
void give_up_in_the_middle(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.communicator_size()}, 1};
    g.ranks = {1, node.communicator_size(), 1};
    g.ghost = {1, 1, 0};
    const halo_test::part mine(ctx, g, world_rank, {8});
    for (const halo::persistent_form form : {halo::persistent_form::block_each, halo::persistent_form::all_blocks}) {
        halo::options how = halo_test::options_for(ctx);
        how.direct_pieces = 0;
        how.persistent = form;
        how.progress = form == halo::persistent_form::all_blocks ? halo::progress_by::thread : halo::progress_by::start;
        const mpgpu::stream stream(ctx, mine.where());
        halo::plan plan(ctx, node, g, mine.arrays(), how);
        plan.exchange(stream);
        plan.start(stream);
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

/// Tests that messages to ranks of other nodes are not pushed.
void refuse_to_push(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    halo::grid g;
    g.cells = {8, 8 * std::int64_t{node.communicator_size()}, 1};
    g.ranks = {1, node.communicator_size(), 1};
    g.ghost = {1, 1, 0};
    const halo_test::part mine(ctx, g, world_rank, {8});
    halo::options how = halo_test::options_for(ctx);
    how.pushed = true;
    bool refused = false;
    try {
        const halo::plan made(ctx, node, g, mine.arrays(), how);
    } catch (const mpgpu::not_supported &) {
        refused = true;
    }
    require(refused, "pushing to ranks of other nodes is refused");
}

/// Tests a mesh of slabs with every form of the exchange and every kind of progress. Slabs in the middle of a node have
/// no neighbour on another node.
void run_slabs(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const int ranks = node.communicator_size();
    halo::grid g;
    g.cells = {5, 6, 3 * std::int64_t{ranks} + 1};
    g.ranks = {1, 1, ranks};
    g.ghost = {1, 1, 2};
    for (const bool periodic : {false, true}) {
        g.periodic = {true, false, periodic};
        for (const auto kernel :
             {halo::persistent_form::none, halo::persistent_form::block_each, halo::persistent_form::all_blocks}) {
            for (const auto progress :
                 {halo::progress_by::start, halo::progress_by::caller, halo::progress_by::thread}) {
                halo::options how = halo_test::options_for(ctx);
                how.persistent = kernel;
                how.progress = progress;
                how.direct_pieces = 0;
                how.time_limit = std::chrono::minutes(10); // never reached; must have no effect
                tried = "slabs";
                run_cycles(ctx, node, g, {8, 4}, how, usual_cycles, !periodic);
            }
        }
    }
}

/// Tests exchanges in which each rank reaches some neighbours by a node plan and the others by MPI.
void run_between_nodes(const mpgpu::context &ctx, const mpgpu::mpi::node &node, std::mt19937 &random,
                       const std::string &nodes) {
    refuse_on_all_ranks(ctx, node);
    refuse_to_push(ctx, node);
    for (int problem = 0; problem < problems; ++problem) {
        const auto [g, sizes] = reference::random_problem(random, node.communicator_size());
        constexpr std::array<halo::persistent_form, 3> kernels = {
            halo::persistent_form::none, halo::persistent_form::block_each, halo::persistent_form::all_blocks};
        const auto which = static_cast<std::size_t>(problem) % kernels.size();
        halo::options how = halo_test::options_for(ctx);
        how.direct_pieces = random_form(random, ctx);
        how.between_nodes = problem % 4 < 2 ? halo::mpi_memory::automatic : halo::mpi_memory::staged;
        how.persistent = kernels.at(which);
        constexpr std::array<halo::progress_by, 3> progress = {halo::progress_by::start, halo::progress_by::caller,
                                                               halo::progress_by::thread};
        how.progress = progress.at(static_cast<std::size_t>(problem / 3) % progress.size());
        tried = nodes + ", problem " + std::to_string(problem);
        run_cycles(ctx, node, g, sizes, how, usual_cycles, problem % 2 == 1);
    }
    tried = nodes + ", in a row";
    run_in_a_row(ctx, node);
}

/// Divides the ranks of one machine among virtual nodes. Rank r is on node r modulo `nodes`.
void run_on_nodes(const mpgpu::context &ctx, std::mt19937 &random, int nodes) {
    MPI_Comm local = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % nodes, world_rank, &local);
    {
        const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, local);
        run_between_nodes(ctx, node, random, std::to_string(nodes) + " nodes");
        if (nodes == node.communicator_size()) {
            give_up_in_the_middle(ctx, node);
        }
    }
    MPI_Comm_free(&local);
}

/// Divides the ranks of one machine among virtual nodes. Ranks of a node have consecutive numbers.
void run_slabs_on_nodes(const mpgpu::context &ctx, int nodes) {
    MPI_Comm local = MPI_COMM_NULL;
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_split(MPI_COMM_WORLD, world_rank * nodes / ranks, world_rank, &local);
    {
        const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, local);
        run_slabs(ctx, node);
    }
    MPI_Comm_free(&local);
}

/// Returns the ranks on the node of this rank, where the launcher has placed consecutive ranks on nodes. `shape`
/// contains the number of ranks of each node: "2+1".
std::vector<int> ranks_of_own_node(const std::string &shape) {
    std::istringstream numbers(shape);
    std::vector<int> own;
    int next = 0;
    for (std::string number; std::getline(numbers, number, '+') && next <= world_rank;) {
        own.clear();
        for (int i = std::stoi(number); i > 0; --i) {
            own.push_back(next++);
        }
    }
    return own;
}

/// Tests that calls for one node refuse ranks of another machine, with an error that states the reason on all ranks.
void refuse_ranks_of_other_machines(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const auto refusal_of = [](const auto &call) -> std::string {
        try {
            call();
        } catch (const mpgpu::error &e) {
            return e.what();
        }
        return "nothing was refused";
    };
    const int there = node.contains(0) ? node.communicator_size() - 1 : 0;
    const std::string name = "rank " + std::to_string(there) + " is on another node";
    auto memory = mpgpu::memory::shared(ctx, halo_test::device_of(ctx, world_rank), 8);
    const auto number = node.rank_on_node(there);
    for (const mpgpu::half_transfer &one :
         {mpgpu::send_to(number, 0, memory), mpgpu::receive_from(number, 0, memory)}) {
        const std::string why = refusal_of([&] { static_cast<void>(node.plan_exchange({one})); });
        require(why.find(name) != std::string::npos, ("expected '" + name + "', and got '").append(why).append("'"));
    }
    const mpgpu::mpi::shared_memory<std::byte> shared = node.exchange(memory);
    require(shared.of(there) == nullptr && shared.why(there).find(name) == 0, "got '" + shared.why(there) + "'");
    const std::string why =
        refusal_of([&] { static_cast<void>(mpgpu::mpi::node(ctx, MPI_COMM_WORLD, MPI_COMM_WORLD)); });
    require(why.find("another node") != std::string::npos, "ranks of several machines as one node: got '" + why + "'");
    MPI_Barrier(MPI_COMM_WORLD);
}

/// Tests ranks on several machines or emulated nodes, whose numbers of ranks are in `shape`.
void run_on_machines(const std::string &shape) {
    const mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {halo_test::device_of(ctx, world_rank)});
    require(node.ranks() == ranks_of_own_node(shape), "the node has other ranks than the launcher has placed on it");
    require(node.size() < node.communicator_size(), "there are several nodes");
    refuse_ranks_of_other_machines(ctx, node);
    usual_cycles = 5;
    std::mt19937 random(20261130); // the same problems on all ranks
    run_between_nodes(ctx, node, random, shape);
    run_slabs(ctx, node);
    if (shape.find_first_not_of("1+") == std::string::npos) { // each rank is alone on its node
        give_up_in_the_middle(ctx, node);
    }
}

void run() {
    const mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {halo_test::device_of(ctx, world_rank)});
    refuse_on_all_ranks(ctx, node);
    leave_out_what_one_rank_refuses(ctx, node);
    leave_out_kernels_that_one_rank_refuses(ctx, node);
    send_what_cannot_be_shared(ctx, node);
    std::mt19937 random(20261121); // the same problems on all ranks
    for (int problem = 0; problem < problems; ++problem) {
        const auto [g, sizes] = reference::random_problem(random, node.communicator_size());
        halo::options how = halo_test::options_for(ctx);
        how.direct_pieces = random_form(random, ctx);
        how.persistent = // has no effect within a node
            problem % 3 == 0 ? halo::persistent_form::block_each : halo::persistent_form::none;
        tried = "one node, problem " + std::to_string(problem);
        run_cycles(ctx, node, g, sizes, how, problem < 4 ? many_cycles : few_cycles, problem % 2 == 1);
    }
    if (halo_test::can_pack(ctx)) {
        push(ctx, node, random);
        push_with_one_gpu_in_sight(random);
    }
    if (!halo_test::can_pack(ctx)) {
        if (world_rank == 0) {
            std::printf("no kernel that packs, which all that goes to another node takes: several nodes not tried\n");
        }
        return;
    }
    for (int nodes = 2; nodes <= node.communicator_size();
         nodes = nodes < node.communicator_size() && 2 * nodes > node.communicator_size() ? node.communicator_size()
                                                                                          : 2 * nodes) {
        run_on_nodes(ctx, random, nodes);
    }
    if (node.communicator_size() > 3) {
        run_slabs_on_nodes(ctx, 2);
    }
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_together(argc, argv, "every cell right", [&] {
        if (argc > 1) {
            run_on_machines(argv[1]);
        } else {
            run();
        }
    });
}
