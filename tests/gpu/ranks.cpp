// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures a communication step in several forms, alternately. There is one process (rank) for each GPU. In every step
// each rank puts data into the memory of its right neighbour (ring) or of all others (all-to-all). The forms are:
// - one path for each put;
// - separate plans of each rank;
// - separate plans of each rank as the model predicts them, without measurements;
// - one plan of all ranks;
// - one plan of one process, if a rank sees all GPUs.
// The first three use signals in both directions, as in docs/guide/put.md. Prints the time per step in microseconds
// (median and spread of the rounds), and the total bandwidth of all ranks relative to one path. The data of each form
// is checked; of large puts only a part is checked.
//
//   mpirun -n RANKS ranks [BYTES...]
//
// If each rank sees one GPU (CUDA_VISIBLE_DEVICES), only the plan of all ranks is measured.
#include <mpgpu/mpi.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int rounds = 5;

int rank = 0;
int ranks = 1;

/// Returns the rank at distance `by` after rank `from`.
int after(int from, int by) {
    return (from + by + ranks) % ranks;
}

std::byte sent_byte(std::size_t i, int from) {
    return static_cast<std::byte>((i * 7 + i / 4099 + static_cast<std::size_t>(from) * 31) & 0xffU);
}

/// Returns the ranges of a put that are checked: all bytes, or 64 pieces of 1 MiB.
std::vector<std::pair<std::size_t, std::size_t>> looked_at(std::size_t bytes) {
    constexpr std::size_t pieces = 64;
    constexpr std::size_t piece = std::size_t{1} << 20;
    if (bytes <= pieces * piece) {
        return {{0, bytes}};
    }
    std::vector<std::pair<std::size_t, std::size_t>> all;
    for (std::size_t i = 0; i < pieces; ++i) {
        all.emplace_back((bytes - piece) / (pieces - 1) * i, piece);
    }
    return all;
}

/// Form of the step (such as one plan of all ranks), with the memory that this rank uses for it.
struct form {
    std::string name;
    std::function<void()> step; ///< enqueues one step
    const mpgpu::stream *stream;
    mpgpu::buffer<std::byte> *inbox; ///< null if this rank has none
};

/// Memory of a rank: the source, and space for the puts of each other rank.
struct part {
    mpgpu::buffer<std::byte> source;
    mpgpu::buffer<std::byte> inbox;

    part(const mpgpu::context &ctx, const mpgpu::stream &stream, mpgpu::device gpu, int of, std::size_t most)
        : source(ctx, gpu, most), inbox(ctx, gpu, most * static_cast<std::size_t>(std::max(ranks - 1, 1))) {
        mpgpu::buffer<std::byte> made(ctx, mpgpu::device::host(), most);
        for (std::size_t i = 0; i < most; ++i) {
            made.data()[i] = sent_byte(i, of);
        }
        mpgpu::plan(ctx, {mpgpu::make_transfer(source, made)}).enqueue(stream);
        stream.synchronize();
    }
};

/// Copies the checked ranges of each put to or from the host: clears them, or counts wrong bytes.
std::size_t clear_or_count(const mpgpu::context &ctx, const form &one, std::size_t bytes, int puts, bool clear) {
    std::size_t wrong = 0;
    for (int by = 1; by <= puts; ++by) {
        for (const auto &[at, length] : looked_at(bytes)) {
            mpgpu::buffer<std::byte> here(ctx, mpgpu::device::host(), length);
            std::fill_n(here.data(), length, std::byte{0xEE});
            const auto there = one.inbox->subspan((static_cast<std::size_t>(by - 1) * bytes) + at, length);
            mpgpu::plan(ctx, {clear ? mpgpu::make_transfer(there, here) : mpgpu::make_transfer(here, there)})
                .enqueue(*one.stream);
            one.stream->synchronize();
            for (std::size_t i = 0; !clear && i < length; ++i) {
                wrong += here.data()[i] == sent_byte(at + i, after(rank, -by)) ? 0 : 1;
            }
        }
    }
    return wrong;
}

/// Signals of ranks that plan separately: `[r]`, the puts of r to this rank, and `[ranks + r]`, the puts of this rank
/// that r has acknowledged.
struct signals {
    mpgpu::signal_counters counters;
    mpgpu::mpi::shared_memory<std::uint64_t> all;
    std::uint64_t step = 0;

    signals(const mpgpu::context &ctx, const mpgpu::mpi::node &node)
        : counters(ctx, 2 * static_cast<std::size_t>(ranks)), all(node.exchange(counters)) {}

    void enqueue(const mpgpu::context &ctx, const mpgpu::stream &stream, const mpgpu::plan &put, int puts) {
        ++step;
        std::array<std::vector<mpgpu::signal_value>, 4> values;
        auto &[taken, arrive, arrived, take] = values;
        for (int by = 1; by <= puts; ++by) {
            const int to = after(rank, by);
            const int from = after(rank, -by);
            taken.push_back({counters.data() + ranks + to, step - 1});
            arrive.push_back({all.of(to)->data() + rank, step});
            arrived.push_back({counters.data() + from, step});
            take.push_back({all.of(from)->data() + ranks + rank, step});
        }
        ctx.wait(stream, taken);
        put.enqueue(stream);
        ctx.raise(stream, arrive);
        ctx.wait(stream, arrived);
        ctx.raise(stream, take);
    }
};

/// Returns the seconds that the slowest rank takes for a number of steps, for each form. The forms are measured
/// alternately.
std::vector<std::vector<double>> timed(const mpgpu::context &ctx, const std::vector<form> &forms, std::size_t bytes,
                                       int puts, int steps, std::size_t &wrong) {
    std::vector<std::vector<double>> seconds(forms.size());
    for (int round = 0; round <= rounds; ++round) { // the first round is for warm-up, and is checked
        for (std::size_t f = 0; f < forms.size(); ++f) {
            const form &one = forms[f];
            if (round == 0 && one.inbox != nullptr) {
                clear_or_count(ctx, one, bytes, puts, true);
            }
            MPI_Barrier(MPI_COMM_WORLD);
            const double started = MPI_Wtime();
            for (int i = 0; i < steps; ++i) {
                one.step();
            }
            one.stream->synchronize();
            double elapsed = MPI_Wtime() - started;
            MPI_Allreduce(MPI_IN_PLACE, &elapsed, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (round > 0) {
                seconds[f].push_back(elapsed / steps);
            } else if (one.inbox != nullptr) {
                wrong += clear_or_count(ctx, one, bytes, puts, false);
            }
        }
    }
    return seconds;
}

void print(const char *pattern, std::size_t bytes, int puts, const std::vector<form> &forms,
           std::vector<std::vector<double>> seconds) {
    std::printf("%d ranks, %s, %zu bytes each:", ranks, pattern, bytes);
    double first = 0;
    for (std::size_t f = 0; f < forms.size(); ++f) {
        std::sort(seconds[f].begin(), seconds[f].end());
        const double median = seconds[f][rounds / 2];
        first = f == 0 ? median : first;
        std::printf("  %s %.1f us (%.1f to %.1f), %.1f GB/s, %.3f;", forms[f].name.c_str(), median * 1e6,
                    seconds[f].front() * 1e6, seconds[f].back() * 1e6,
                    static_cast<double>(bytes) * ranks * puts / median / 1e9, first / median);
    }
    std::printf("\n");
    std::fflush(stdout);
}

std::vector<std::size_t> sizes_of(int count, char **arguments, bool is_virtual) {
    std::vector<std::size_t> sizes;
    for (int i = 0; i < count; ++i) {
        sizes.push_back(std::strtoull(arguments[i], nullptr, 10));
    }
    if (sizes.empty() && is_virtual) {
        sizes = {8, 65'536, std::size_t{1} << 20};
    } else if (sizes.empty()) {
        for (const std::size_t kibibytes : {4, 64, 256, 1024, 4096, 16'384, 65'536, 262'144, 1'048'576}) {
            sizes.push_back(kibibytes << 10);
        }
        sizes.insert(sizes.begin(), 8);
    }
    return sizes;
}

std::size_t run(int count, char **arguments) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const mpgpu::context ctx;
    // Virtual devices show that the program is correct. Their times say nothing about GPUs.
    const bool is_virtual = ctx.backend() == mpgpu::backend::host;
    const std::vector<std::size_t> sizes = sizes_of(count, arguments, is_virtual);
    const std::size_t most = *std::max_element(sizes.begin(), sizes.end());
    const int gpus = ctx.devices().gpus;
    const auto gpu = [&](int of) { return mpgpu::device::gpu(of % gpus); };
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu(rank)});
    const mpgpu::stream stream(ctx, gpu(rank));
    part mine(ctx, stream, gpu(rank), rank, most);
    auto inboxes = node.exchange(mine.inbox);
    int sees_all = inboxes.of(after(rank, 1)) != nullptr && gpus >= ranks ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &sees_all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    std::vector<part> here; // of one process, which is rank 0
    for (int of = 0; of < ranks && sees_all != 0 && rank == 0; ++of) {
        here.emplace_back(ctx, stream, gpu(of), of, most);
    }

    std::size_t wrong = 0;
    std::vector<std::pair<const char *, int>> patterns{{"ring", 1}};
    if (ranks > 2) {
        patterns.emplace_back("all-to-all", ranks - 1);
    }
    for (const auto &pattern : patterns) {
        const int puts = ranks > 1 ? pattern.second : 1;
        signals order(ctx, node); // they count the steps of the pairs in this pattern
        for (const std::size_t bytes : sizes) {
            // Offset in bytes of the space for the put of the rank at distance `by`.
            const auto room = [&](int by) { return static_cast<std::size_t>(by - 1) * bytes; };
            std::vector<mpgpu::plan> plans;
            plans.reserve(5);
            std::vector<form> forms;
            for (int k = 0; k < 3 && sees_all != 0; ++k) {
                mpgpu::plan_options how;
                how.max_paths = k == 0 ? 1 : 0;
                how.adapt = k == 2 ? std::optional<bool>(false) : std::nullopt;
                std::vector<mpgpu::transfer> transfers;
                for (int by = 1; by <= puts; ++by) {
                    transfers.push_back(mpgpu::make_transfer(inboxes.of(after(rank, by))->subspan(room(by), bytes),
                                                             mine.source.subspan(0, bytes)));
                }
                const mpgpu::plan &put = plans.emplace_back(ctx, transfers, how);
                constexpr std::array<const char *, 3> names{"one path", "alone", "alone by the model"};
                forms.push_back({names.at(static_cast<std::size_t>(k)),
                                 [&, puts] { order.enqueue(ctx, stream, put, puts); }, &stream, &mine.inbox});
            }
            std::vector<mpgpu::node_transfer> handed_in;
            for (int by = 1; by <= puts; ++by) {
                handed_in.push_back({mpgpu::node_end(after(rank, by), 1, room(by)), mpgpu::node_end(rank, 0), bytes});
            }
            const mpgpu::plan &joint = plans.emplace_back(
                node.plan({mpgpu::make_window(mine.source), mpgpu::make_window(mine.inbox)}, handed_in));
            forms.push_back({"jointly", [&] { joint.enqueue(stream); }, &stream, &mine.inbox});
            if (sees_all != 0) {
                std::vector<mpgpu::transfer> transfers;
                for (int of = 0; of < static_cast<int>(here.size()); ++of) {
                    for (int by = 1; by <= puts; ++by) {
                        transfers.push_back(mpgpu::make_transfer(
                            here[static_cast<std::size_t>(after(of, by))].inbox.subspan(room(by), bytes),
                            here[static_cast<std::size_t>(of)].source.subspan(0, bytes)));
                    }
                }
                const mpgpu::plan &all = plans.emplace_back(ctx, transfers);
                const bool is_first = rank == 0;
                forms.push_back({"one process",
                                 [&, is_first] {
                                     if (is_first) {
                                         all.enqueue(stream);
                                     }
                                 },
                                 &stream, is_first ? &here.front().inbox : nullptr});
            }
            const int steps = is_virtual ? 3 : bytes >= std::size_t{256} << 20U ? 20 : 60;
            std::vector<std::vector<double>> seconds = timed(ctx, forms, bytes, puts, steps, wrong);
            if (rank == 0) {
                print(pattern.first, bytes, puts, forms, std::move(seconds));
            }
        }
    }
    MPI_Barrier(MPI_COMM_WORLD); // no rank frees memory that another still maps
    return wrong;
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    unsigned long long wrong = 0;
    try {
        wrong = run(argc - 1, argv + 1);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "ranks: %s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        std::printf("%llu bytes wrong\n", wrong);
    }
    MPI_Finalize();
    return wrong == 0 ? 0 : 1;
}
