// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures two uses of node plans, alternately with their references.
// - One way: a message goes from rank 0 to rank 1 and back, each time by a node plan, in stream order. The result is
//   half of the round trip.
// - Load: rank 0 copies bytes from its host memory to its GPU, or back, and the other ranks provide the links of their
//   GPUs. The references are the plain copy and, if rank 0 sees all GPUs, the plan of one process.
// All bytes are checked. Prints medians of the rounds and their spread.
//   mpirun -n RANKS node_steps [BYTES TO LOAD]
// With MPGPU_SIGNAL_WAIT=kernel, kernels wait for other ranks.
#include <mpgpu/mpi.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr int rounds = 7;

int rank = 0;
int ranks = 1;
std::size_t wrong = 0;

std::byte pattern(std::size_t i, std::size_t round) {
    return static_cast<std::byte>((i * 7 + i / 4099 + round * 31) & 0xffU);
}

/// Returns the time of `work` on the slowest rank, in seconds. All ranks start together.
double timed(const std::function<void()> &work) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double started = MPI_Wtime();
    work();
    double elapsed = MPI_Wtime() - started;
    MPI_Allreduce(MPI_IN_PLACE, &elapsed, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return elapsed;
}

/// Returns the median and the spread of `seconds` as text, in microseconds.
std::string text(std::vector<double> seconds) {
    std::sort(seconds.begin(), seconds.end());
    std::array<char, 96> line{};
    std::snprintf(line.data(), line.size(), "%.1f us (%.1f to %.1f)", seconds[seconds.size() / 2] * 1e6,
                  seconds.front() * 1e6, seconds.back() * 1e6);
    return line.data();
}

void one_way(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu, std::size_t bytes) {
    constexpr int turns = 200;
    mpgpu::buffer<std::byte> ball(ctx, gpu, bytes); // the data of rank 0 returns to it through rank 1
    mpgpu::buffer<std::byte> seen(ctx, mpgpu::device::host(), bytes);
    const mpgpu::stream stream(ctx, gpu);
    const auto pass = [&](std::uint32_t from, std::uint32_t to) {
        std::vector<mpgpu::node_transfer> mine;
        if (rank == static_cast<int>(from)) {
            mine.push_back({{to, 0, 0}, {from, 0, 0}, bytes});
        }
        return node.plan({mpgpu::make_window(ball)}, mine);
    };
    const mpgpu::plan there = pass(0, 1);
    const mpgpu::plan back = pass(1, 0);
    const mpgpu::plan fill(ctx, {mpgpu::make_transfer(ball, seen)});
    const mpgpu::plan look(ctx, {mpgpu::make_transfer(seen, ball)});
    std::vector<double> seconds;
    for (std::size_t round = 0; round <= rounds; ++round) { // the first round is for warm-up
        for (std::size_t i = 0; i < bytes; ++i) {
            seen.data()[i] = rank == 0 ? pattern(i, round) : std::byte{0xEE};
        }
        fill.enqueue(stream);
        stream.synchronize();
        const double elapsed = timed([&] {
            for (int turn = 0; turn < turns; ++turn) {
                there.enqueue(stream);
                back.enqueue(stream);
            }
            stream.synchronize();
        });
        look.enqueue(stream);
        stream.synchronize();
        for (std::size_t i = 0; i < bytes && rank < 2; ++i) {
            wrong += seen.data()[i] == pattern(i, round) ? 0 : 1;
        }
        if (round > 0) {
            seconds.push_back(elapsed / (2 * turns));
        }
    }
    if (rank == 0) {
        std::printf("one way, %zu bytes: %s\n", bytes, text(seconds).c_str());
    }
}

void load(const mpgpu::context &ctx, const mpgpu::node &node, mpgpu::device gpu, std::size_t bytes, bool to_gpu,
          bool sees_all) {
    const bool asks = rank == 0;
    auto host = mpgpu::buffer<std::byte>::shared(ctx, mpgpu::device::host(), asks ? bytes : 0);
    mpgpu::buffer<std::byte> check(ctx, mpgpu::device::host(), asks ? bytes : 0);
    mpgpu::buffer<std::byte> there(ctx, gpu, asks ? bytes : 0);
    const std::array<mpgpu::window, 2> windows{mpgpu::make_window(host), mpgpu::make_window(there)};
    const mpgpu::node_transfer transfer{{0, to_gpu ? 1U : 0U, 0}, {0, to_gpu ? 0U : 1U, 0}, bytes};
    // A rank without transfers copies nothing.
    const auto copy = [&](mpgpu::buffer<std::byte> &to, mpgpu::buffer<std::byte> &from, std::uint32_t most_paths) {
        mpgpu::plan_options how;
        how.max_paths = most_paths;
        return mpgpu::plan(
            ctx, asks ? std::vector<mpgpu::transfer>{mpgpu::make_transfer(to, from)} : std::vector<mpgpu::transfer>{},
            how);
    };
    mpgpu::buffer<std::byte> &from = to_gpu ? host : there;
    mpgpu::buffer<std::byte> &to = to_gpu ? there : host;
    const mpgpu::plan fill = copy(from, check, 0);
    const mpgpu::plan look = copy(check, to, 0);
    struct form {
        const char *name;
        mpgpu::plan step;
    };
    std::vector<form> forms;
    forms.push_back({"plain copy", copy(to, from, 1)});
    forms.push_back({"all ranks", asks ? node.plan(windows, {transfer}) : node.plan(windows, {})});
    if (sees_all) {
        forms.push_back({"one process", copy(to, from, 0)});
    }
    const mpgpu::stream stream(ctx, gpu);
    std::vector<std::vector<double>> seconds(forms.size());
    for (std::size_t round = 0; round <= rounds; ++round) {
        for (std::size_t f = 0; f < forms.size(); ++f) {
            if (asks && round == 0) {
                for (std::size_t i = 0; i < bytes; ++i) {
                    check.data()[i] = pattern(i, f);
                }
                fill.enqueue(stream);
                stream.synchronize();
            }
            const double elapsed = timed([&] {
                forms[f].step.enqueue(stream);
                stream.synchronize();
            });
            if (round > 0) {
                seconds[f].push_back(elapsed);
            } else if (asks) {
                look.enqueue(stream);
                stream.synchronize();
                for (std::size_t i = 0; i < bytes; ++i) {
                    wrong += check.data()[i] == pattern(i, f) ? 0 : 1;
                }
            }
        }
    }
    if (asks) {
        std::printf("%s, %zu bytes, %d ranks:", to_gpu ? "host to GPU" : "GPU to host", bytes, ranks);
        for (std::size_t f = 0; f < forms.size(); ++f) {
            std::printf(" %s %s;", forms[f].name, text(seconds[f]).c_str());
        }
        std::printf("\n%s", forms[1].step.describe().c_str());
        std::fflush(stdout);
    }
}

void run(std::optional<std::size_t> asked) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const mpgpu::context ctx;
    const bool is_virtual =
        ctx.backend() == mpgpu::backend::host; // this shows that the program is correct, but nothing about GPUs
    const int gpus = ctx.devices().gpus;
    const mpgpu::device gpu = mpgpu::device::gpu(rank % gpus);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu});
    for (const std::size_t bytes : {8, 512, 4096, 16'384, 65'536, 131'072, 262'144}) {
        if (ranks > 1) {
            one_way(ctx, node, gpu, bytes);
        }
    }
    const std::size_t most = asked.value_or(std::size_t{is_virtual ? 4U : 1024U} << 20U);
    for (const std::size_t bytes : {most / 16, most}) {
        for (const bool to_gpu : {true, false}) {
            load(ctx, node, gpu, bytes, to_gpu, gpus >= ranks);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD); // no rank frees memory that another still maps
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    try {
        run(argc > 1 ? std::optional<std::size_t>(std::strtoull(argv[1], nullptr, 10)) : std::nullopt);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "node_steps: %s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    unsigned long long all = wrong;
    MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        std::printf("%llu bytes wrong\n", all);
    }
    MPI_Finalize();
    return all == 0 ? 0 : 1;
}
