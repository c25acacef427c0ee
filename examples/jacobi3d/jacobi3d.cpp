// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Jacobi relaxation in three dimensions by several processes with one GPU each, which exchange faces as messages. It is
// the proxy application of "GPU-aware Communication with UCX in Parallel Programming Models" (2021, section IV-C).
//
// The domain is divided into cuboid blocks with the smallest total surface. Each process has one or several blocks, and
// each block has its own stream. In an iteration, a block
//
//     pack       the outermost cells of up to six faces
//     messages   each face to the block beyond it, in another process or in this one
//     unpack     what has been received, into the ghost cells
//     sweep      new values of all cells; then old and new are swapped
//
// There are two forms of exchange: faces are staged through host memory, or sent directly between device memories. In
// jacobi3d_mpi, whose processes mpirun starts, both forms also exist with MPI. Convergence is not checked. After a few
// iterations, every cell is compared with a CPU computation of the whole domain as one block. After the last iteration,
// the results of all forms are compared with each other, bit by bit.
#include "device_code.hpp"
#include "domain.hpp"
#include "exchange.hpp"
#include "options.hpp"
#include "processes.hpp"

#include <mpgpu/message.hpp>
#include <mpgpu/mpgpu.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#ifdef JACOBI3D_MPI
#include "../gpu_aware.hpp"

#include <mpgpu/mpi.hpp>

#include <mpi.h>
#endif

namespace {

/// Communication of the processes that compute one domain, other than the exchange of faces.
class team {
  public:
    team(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device on, int own_rank, int rank_count)
        : rank(own_rank), ranks(rank_count), messenger(node), stream(ctx, on), number_(ctx, mpgpu::device::host(), 1) {}

    const int rank;
    const int ranks;
    const mpgpu::messenger messenger;
    const mpgpu::stream stream; ///< stream of the messages of this class

    /// Returns the maximum of `own` over all processes. Must be called by all of them, and acts as a barrier.
    double largest(double own) {
        for (int other = 1; other < ranks && rank == 0; ++other) {
            receive(other);
            own = std::max(own, number_.data()[0]);
        }
        number_.data()[0] = own;
        if (rank != 0) {
            send(0);
            receive(0);
        }
        for (int other = 1; other < ranks && rank == 0; ++other) {
            send(other);
        }
        return number_.data()[0];
    }
    void meet() { largest(0.0); }

    static constexpr std::uint64_t tag_of_cells = std::uint64_t{1} << 40U; // faces have smaller tags

  private:
    static constexpr std::uint64_t tag = tag_of_cells + 1;
    void send(int to) { messenger.send(number_, to, tag, stream).synchronize(); }
    void receive(int from) { messenger.receive(number_, from, tag, stream).synchronize(); }

    mpgpu::buffer<double> number_;
};

/// State of the computation with one form of exchange.
struct solver {
    const char *name = "";
    std::vector<part> parts;
    std::unique_ptr<exchange> halos;
    std::vector<double> iteration_us; // one for each round
    std::vector<double> exchange_us;

    void iterate(int iterations, bool sweeps) {
        for (int i = 0; i < iterations; ++i) {
            halos->run(parts);
            for (part &p : parts) {
                if (sweeps) {
                    const mpgpu::buffer<double> &before = p.values.at(p.now);
                    mpgpu::buffer<double> &after = p.values.at(1 - p.now);
                    code_for(before.data())
                        .sweep(p.stream, before.location().id(), p.where, before.data(), after.data());
                    p.now = 1 - p.now;
                }
            }
        }
        for (const part &p : parts) {
            p.stream.synchronize();
        }
    }
};

std::vector<part> parts_of(const mpgpu::context &ctx, mpgpu::device on, const division &whole, int first, int count) {
    std::vector<part> parts;
    for (int number = first; number < first + count; ++number) {
        part &p = parts.emplace_back(ctx, on, whole, number);
        for (mpgpu::buffer<double> &values : p.values) {
            code_for(values.data()).set(p.stream, on.id(), p.where, values.data());
        }
        p.stream.synchronize();
    }
    return parts;
}

/// Runs iterations and returns the time of one in microseconds, on the slowest process.
double timed(team &all, solver &s, int iterations, bool sweeps) {
    all.meet();
    const auto start = std::chrono::steady_clock::now();
    s.iterate(iterations, sweeps);
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    return all.largest(elapsed.count()) / iterations;
}

/// Copies all elements of a part to host memory and returns them.
mpgpu::buffer<double> fetched(const mpgpu::context &ctx, const part &p) {
    const mpgpu::buffer<double> &values = p.values.at(p.now);
    mpgpu::buffer<double> result(ctx, mpgpu::device::host(), values.size());
    mpgpu::plan(ctx, {mpgpu::make_transfer(result, values)}).execute(p.stream).synchronize();
    return result;
}

/// Compares the computed cells of a block with `expected(x, y, z)`, whose arguments are relative to the first cell of
/// the block. Prints the first wrong cell. Returns true if there is none.
template <class Expected>
bool right(const block &b, const mpgpu::buffer<double> &values, const char *what, Expected &&expected) {
    for (std::int64_t z = 0; z < b.cells[2]; ++z) {
        for (std::int64_t y = 0; y < b.cells[1]; ++y) {
            for (std::int64_t x = 0; x < b.cells[0]; ++x) {
                const double found = values.data()[element_of(b, x, y, z)];
                const double wanted = expected(x, y, z);
                if (found != wanted) {
                    const std::string cell = std::to_string(b.first[0] + x) + "_" + std::to_string(b.first[1] + y) +
                                             "_" + std::to_string(b.first[2] + z);
                    std::fprintf(stderr, "jacobi3d: WRONG: cell %s is %.17g and not %.17g: %s\n", cell.c_str(), found,
                                 wanted, what);
                    return false;
                }
            }
        }
    }
    return true;
}

/// Computes the whole domain as one block on the CPU. Returns all elements after `iterations` iterations.
std::vector<double> one_block_on_cpu(const mpgpu::context &ctx, const block &domain, int iterations) {
    const mpgpu::stream stream(ctx, mpgpu::device::gpu(0)); // stream in which the CPU code runs
    std::vector<double> before(static_cast<std::size_t>(element_count(domain)));
    on_virtual_devices.set(stream, 0, domain, before.data());
    stream.synchronize();
    std::vector<double> after = before;
    for (int i = 0; i < iterations; ++i) {
        on_virtual_devices.sweep(stream, 0, domain, before.data(), after.data());
        std::swap(before, after); // safe: the enqueued work holds the addresses
    }
    stream.synchronize();
    return before;
}

/// Compares every cell with a CPU computation of the whole domain as one block. Rank 0 computes it, and the other ranks
/// send their cells to rank 0.
bool same_as_one_block(const mpgpu::context &ctx, team &all, const division &whole, int blocks_each, const solver &s,
                       const std::vector<double> &reference) {
    const block domain = divide(whole.domain, 1).at(0);
    bool good = true;
    for (int number = 0; number < whole.count(); ++number) {
        const int owner = number / blocks_each;
        const block b = whole.at(number);
        mpgpu::buffer<double> values;
        if (owner == all.rank) {
            values = fetched(ctx, s.parts[static_cast<std::size_t>(number % blocks_each)]);
        } else if (all.rank == 0) {
            values = {ctx, mpgpu::device::host(), static_cast<std::size_t>(element_count(b))};
        }
        if (owner != 0 && owner == all.rank) {
            all.messenger.send(values, 0, team::tag_of_cells, all.stream).synchronize();
        }
        if (all.rank == 0) {
            if (owner != 0) {
                all.messenger.receive(values, owner, team::tag_of_cells, all.stream).synchronize();
            }
            good = good && right(b, values, s.name, [&](std::int64_t x, std::int64_t y, std::int64_t z) {
                       return reference[static_cast<std::size_t>(
                           element_of(domain, b.first[0] + x, b.first[1] + y, b.first[2] + z))];
                   });
        }
    }
    return all.largest(good ? 0.0 : 1.0) == 0.0;
}

/// Compares every cell of two forms of exchange after the same number of iterations. Returns true if all are bitwise
/// equal.
bool same(const mpgpu::context &ctx, team &all, const solver &a, const solver &b) {
    bool good = true;
    for (std::size_t i = 0; i < a.parts.size(); ++i) {
        const mpgpu::buffer<double> ours = fetched(ctx, a.parts[i]);
        const mpgpu::buffer<double> others = fetched(ctx, b.parts[i]);
        const block &where = a.parts[i].where;
        const std::string what = std::string(a.name) + " and " + b.name + " differ";
        good = good && right(where, ours, what.c_str(), [&](std::int64_t x, std::int64_t y, std::int64_t z) {
                   return others.data()[element_of(where, x, y, z)];
               });
    }
    return all.largest(good ? 0.0 : 1.0) == 0.0;
}

/// Returns the value below which the fraction `part` of the readings lies.
double quantile(std::vector<double> readings, double part) {
    std::sort(readings.begin(), readings.end());
    const double place = part * static_cast<double>(readings.size() - 1);
    const auto below = static_cast<std::size_t>(place);
    const std::size_t above = std::min(below + 1, readings.size() - 1);
    return readings[below] + (place - static_cast<double>(below)) * (readings[above] - readings[below]);
}

void print_header() {
    std::printf(
        "Microseconds, medians of rounds (quartiles); x: speed-up over staged. Exchange: an iteration without its "
        "sweep.\n%5s %6s  %-16s %-10s %28s %6s %28s %6s\n",
        "ranks", "blocks", "domain", "form", "iteration", "x", "exchange", "x");
}

void print(const solver &s, const solver &staged, int ranks, const division &whole) {
    const std::string domain =
        std::to_string(whole.domain[0]) + "_" + std::to_string(whole.domain[1]) + "_" + std::to_string(whole.domain[2]);
    std::printf("%5d %6d  %-16s %-10s", ranks, whole.count(), domain.c_str(), s.name);
    for (const auto readings : {&solver::iteration_us, &solver::exchange_us}) {
        if (readings == &solver::exchange_us && whole.count() == 1) {
            break; // a single block has no neighbour
        }
        const double median = quantile(s.*readings, 0.5);
        std::printf(" %10.1f (%7.1f,%8.1f) %6.2f", median, quantile(s.*readings, 0.25), quantile(s.*readings, 0.75),
                    quantile(staged.*readings, 0.5) / median);
    }
    std::printf("\n");
}

mpgpu::context context_of(const options &opt) {
    mpgpu::context_options machine;
    machine.topology = opt.topology;
#ifndef JACOBI3D_CUDA
    // The sweeps are CPU code, which can access only memory of virtual devices.
    machine.backend = mpgpu::backend::host;
#endif
    return mpgpu::context(machine);
}

/// Measures one number of ranks, in each of the processes, and prints a line of the table. `meet(ctx, on)` creates the
/// node of all processes.
template <class Meet> int run(const options &opt, int rank, int ranks, Meet &&meet) {
    const mpgpu::context ctx = context_of(opt);
    const mpgpu::device on = mpgpu::device::gpu(rank % ctx.devices().gpus);
    const auto node = meet(ctx, on);
    team all(ctx, node, on, rank, ranks);
    const division whole = divide(opt.weak ? scaled(opt.domain, ranks) : opt.domain, ranks * opt.blocks);
    const face_messages messages{all.messenger, whole, opt.blocks};

    std::vector<solver> solvers;
    const auto add = [&](const char *name) -> std::vector<part> & {
        solver &s = solvers.emplace_back();
        s.name = name;
        s.parts = parts_of(ctx, on, whole, rank * opt.blocks, opt.blocks);
        return s.parts;
    };
    if (opt.staged) {
        std::vector<part> &parts = add("staged");
        solvers.back().halos = through_host_memory(ctx, messages, parts);
    }
    if (opt.direct) {
        std::vector<part> &parts = add("direct");
        solvers.back().halos = from_device_memory(messages, parts);
    }
#ifdef JACOBI3D_MPI
    const bool on_gpu = ctx.backend() == mpgpu::backend::cuda;
    for (const bool staged : {true, false}) {
        const auto reason = !staged && on_gpu && !opt.gpu_aware ? why_not_gpu_aware() : std::nullopt;
        if (reason && opt.direct && rank == 0) {
            std::printf("MPI direct is left out: %s\n", reason->c_str());
        }
        if ((staged ? opt.staged : opt.direct) && !reason) {
            std::vector<part> &parts = add(staged ? "MPI staged" : "MPI direct");
            solvers.back().halos = by_mpi(ctx, whole, opt.blocks, parts, staged);
        }
    }
#endif
    bool good = true;
    if (opt.check > 0) {
        const std::vector<double> reference =
            rank == 0 ? one_block_on_cpu(ctx, divide(whole.domain, 1).at(0), opt.check) : std::vector<double>();
        for (solver &s : solvers) {
            all.meet();
            s.iterate(opt.check, true);
            good = same_as_one_block(ctx, all, whole, opt.blocks, s, reference) && good;
        }
    }
    for (int round = -1; round < opt.rounds; ++round) { // the first round is a warm-up
        for (solver &s : solvers) {
            const double iteration = timed(all, s, opt.iterations, true);
            const double exchange = timed(all, s, opt.iterations, false);
            if (round >= 0) {
                s.iteration_us.push_back(iteration);
                s.exchange_us.push_back(exchange);
            }
        }
    }
    for (std::size_t other = 1; other < solvers.size(); ++other) {
        good = same(ctx, all, solvers[0], solvers[other]) && good;
    }
    for (const solver &s : solvers) {
        if (rank == 0 && good) {
            print(s, solvers[0], ranks, whole);
        }
    }
    all.meet(); // no process may exit while others receive
    return good ? 0 : 1;
}

} // namespace

#ifdef JACOBI3D_MPI
int main(int argc, char *argv[]) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    int ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int code = 0;
    try {
        const options opt = parse(argc, argv);
        if (!opt.ranks.empty()) {
            throw std::invalid_argument("-ranks: set the number of ranks with mpirun -n");
        }
        if (opt.help) {
            std::fputs(rank == 0 ? usage : "", stdout);
        } else {
            if (rank == 0) {
                print_header();
            }
            code = run(opt, rank, ranks, [](const mpgpu::context &ctx, mpgpu::device on) {
                return mpgpu::mpi::node(ctx, MPI_COMM_WORLD, {on});
            });
            if (rank == 0 && code == 0) {
                std::printf("jacobi3d: every cell of every form is right\n");
            }
        }
    } catch (const std::exception &e) {
        std::fprintf(stderr, "jacobi3d_mpi: rank %d: %s\n", rank, e.what());
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    MPI_Finalize();
    return code;
}
#else
int main(int argc, char *argv[]) {
    try {
        options opt = parse(argc, argv);
        if (opt.gpu_aware) {
            throw std::invalid_argument("-gpu-aware: only jacobi3d_mpi has this flag");
        }
        if (opt.ranks.empty()) {
            opt.ranks = {2};
        }
        if (opt.help) {
            std::fputs(usage, stdout);
            return 0;
        }
        for (const int ranks : opt.ranks) {
            static_cast<void>(divide(opt.weak ? scaled(opt.domain, ranks) : opt.domain, ranks * opt.blocks));
        }
        // A separate process counts the GPUs, because a process that has used the driver must not fork.
        int gpus = 0;
        const int machine = in_process([&] {
            const mpgpu::context ctx = context_of(opt);
            return 10 + (ctx.backend() == mpgpu::backend::cuda ? std::min(ctx.devices().gpus, 100) : 0);
        });
        if (machine < 10) {
            return machine;
        }
        gpus = machine - 10;
        print_header();
        for (const int ranks : opt.ranks) {
            const int code = in_processes(ranks, gpus, [&](int rank, const std::string &meeting) {
                return run(opt, rank, ranks, [&](const mpgpu::context &ctx, mpgpu::device on) {
                    return mpgpu::node(ctx, static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(ranks),
                                       meeting, {on});
                });
            });
            if (code != 0) {
                return code;
            }
        }
        std::printf("jacobi3d: every cell of every form is right\n");
        return 0;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "jacobi3d: %s\n", e.what());
        return 2;
    }
}
#endif
