// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures halo exchanges by index lists between the ranks of a periodic ring, and compares them with MPI and with the
// exchange of a structured mesh. Each rank sends N entries of 8 bytes to each of its two neighbours.
//
//   mpirun -n RANKS index_lists [ENTRIES]...
//
// Without arguments, N is 1,000, 10,000 and 100,000. With GPU_AWARE=1 in the environment, MPI sends GPU memory. The
// forms:
//
//   indexed        halo::indexed::exchange, one after another without waiting
//   indexed, sync  halo::indexed::exchange; the host waits for each exchange
//   captured       halo::indexed::exchange, 20 times in a CUDA graph that is launched repeatedly
//   MPI            one packing kernel per neighbour; the host waits; MPI_Isend and MPI_Irecv into the ghost entries
//   structured     halo::plan with pushed exchanges, on a mesh whose two faces have about N cells each
//   by lists       halo::indexed with index lists of the cells that `structured` exchanges
//
// Prints microseconds per exchange of the slowest rank: median, minimum and maximum of 7 rounds. Compares every ghost
// entry. Exits with 0, with 1 if an entry was wrong, and with 77 if there is no GPU. Built by tests/gpu/halo.
#include <mpgpu/halo.cuh>
#include <mpgpu/halo_indexed.hpp>
#include <mpgpu/halo_mpi.hpp>

#include <cuda_runtime.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace halo = mpgpu::halo;
using steady = std::chrono::steady_clock;

constexpr int rounds = 7;
constexpr int left_tag = 1;
constexpr int right_tag = 2;

void check(cudaError_t status) {
    if (status != cudaSuccess) {
        throw std::runtime_error(cudaGetErrorString(status));
    }
}

__global__ void pack(double *to, const double *from, const std::int32_t *list, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        to[i] = from[list[i]];
    }
}

/// Returns the value of vector entry `i` of rank `rank` in round `round`.
double value_of(int rank, std::size_t i, int round) {
    return static_cast<double>(rank) * 1e8 + static_cast<double>(i) + round * 0.125;
}

struct ring {
    int rank = 0;
    int ranks = 0;
    [[nodiscard]] int left() const { return (rank + ranks - 1) % ranks; }
    [[nodiscard]] int right() const { return (rank + 1) % ranks; }
};

/// Returns the send list of rank `rank` for its left or right neighbour. Every rank can compute the lists of all ranks.
std::vector<std::int32_t> list_of(int rank, bool to_left, std::size_t entries, std::size_t owned) {
    std::mt19937_64 random(static_cast<std::uint64_t>(rank) * 2 + (to_left ? 1 : 0) + 1);
    std::vector<std::int32_t> list(entries);
    for (std::int32_t &index : list) {
        index = static_cast<std::int32_t>(random() % owned);
    }
    std::sort(list.begin(), list.end());
    return list;
}

/// Measures `rounds` rounds of `times` calls of `work`. Prints the time per exchange of the slowest rank.
template <class Work>
void measure(const ring &all, const char *form, std::size_t entries, int times, const Work &work) {
    for (int i = 0; i < 20; ++i) {
        work(false);
    }
    work(true);
    std::vector<double> took;
    for (int round = 0; round < rounds; ++round) {
        MPI_Barrier(MPI_COMM_WORLD);
        const steady::time_point begin = steady::now();
        for (int i = 1; i < times; ++i) {
            work(false);
        }
        work(true);
        double own = std::chrono::duration<double, std::micro>(steady::now() - begin).count() / times;
        MPI_Allreduce(MPI_IN_PLACE, &own, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        took.push_back(own);
    }
    std::sort(took.begin(), took.end());
    if (all.rank == 0) {
        std::printf("%7zu entries to each of two neighbours, %d ranks: %-14s %8.2f us (%.2f to %.2f)\n", entries,
                    all.ranks, form, took[rounds / 2], took.front(), took.back());
    }
}

/// Vector of one rank: owned entries, then ghost entries from the left, then ghost entries from the right.
class problem {
  public:
    problem(const mpgpu::context &ctx, mpgpu::device gpu, ring all, std::size_t entries)
        : all_(all), entries_(entries), owned_(std::max<std::size_t>(8 * entries, 1000)),
          x_(ctx, gpu, owned_ + 2 * entries), packed_(ctx, gpu, 2 * entries),
          to_left_(list_of(all.rank, true, entries, owned_)), to_right_(list_of(all.rank, false, entries, owned_)) {
        check(cudaMalloc(&lists_, 2 * entries * sizeof(std::int32_t)));
        check(cudaMemcpy(lists_, to_left_.data(), entries * sizeof(std::int32_t), cudaMemcpyHostToDevice));
        check(cudaMemcpy(lists_ + entries, to_right_.data(), entries * sizeof(std::int32_t), cudaMemcpyHostToDevice));
    }
    problem(const problem &) = delete;
    problem &operator=(const problem &) = delete;
    ~problem() { static_cast<void>(cudaFree(lists_)); }

    [[nodiscard]] mpgpu::buffer<double> &x() { return x_; }
    [[nodiscard]] std::size_t size() const { return owned_ + 2 * entries_; }

    [[nodiscard]] std::vector<halo::index_neighbour> neighbours() const {
        // With one or two ranks, both neighbours are the same rank. The send list then begins with the left entries.
        if (all_.left() == all_.right()) {
            std::vector<std::int32_t> both = to_left_;
            both.insert(both.end(), to_right_.begin(), to_right_.end());
            // Entries that the neighbour sends to its left arrive in the right ghost entries of this rank.
            std::vector<std::int32_t> ghosts(2 * entries_);
            std::iota(ghosts.begin(), ghosts.begin() + static_cast<std::ptrdiff_t>(entries_),
                      static_cast<std::int32_t>(owned_ + entries_));
            std::iota(ghosts.begin() + static_cast<std::ptrdiff_t>(entries_), ghosts.end(),
                      static_cast<std::int32_t>(owned_));
            return {{all_.left(), both, ghosts}};
        }
        return {{all_.left(), to_left_, halo::index_list::range(owned_, entries_)},
                {all_.right(), to_right_, halo::index_list::range(owned_ + entries_, entries_)}};
    }

    void fill(int round) {
        std::vector<double> values(size(), -1);
        for (std::size_t i = 0; i < owned_; ++i) {
            values[i] = value_of(all_.rank, i, round);
        }
        check(cudaMemcpy(x_.data(), values.data(), values.size() * sizeof(double), cudaMemcpyHostToDevice));
        MPI_Barrier(MPI_COMM_WORLD);
    }

    void compare(const char *form, int round) {
        std::vector<double> values(size());
        check(cudaMemcpy(values.data(), x_.data(), values.size() * sizeof(double), cudaMemcpyDeviceToHost));
        const std::vector<std::int32_t> from_left = list_of(all_.left(), false, entries_, owned_);
        const std::vector<std::int32_t> from_right = list_of(all_.right(), true, entries_, owned_);
        for (std::size_t i = 0; i < entries_; ++i) {
            if (values[owned_ + i] != value_of(all_.left(), static_cast<std::size_t>(from_left[i]), round) ||
                values[owned_ + entries_ + i] !=
                    value_of(all_.right(), static_cast<std::size_t>(from_right[i]), round)) {
                throw std::runtime_error(std::string(form) + ": ghost entry " + std::to_string(i) + " of rank " +
                                         std::to_string(all_.rank) + " is wrong");
            }
        }
    }

    /// Exchanges ghost entries by MPI. The buffers are in GPU memory if MPI supports it, and in host memory otherwise.
    void by_mpi(cudaStream_t stream, bool is_gpu_aware) {
        const int n = static_cast<int>(entries_);
        const int grid = (n + 255) / 256;
        double *const first = packed_.data();
        pack<<<grid, 256, 0, stream>>>(first, x_.data(), lists_, n);
        pack<<<grid, 256, 0, stream>>>(first + n, x_.data(), lists_ + n, n);
        double *send = first;
        double *receive = x_.data() + owned_;
        if (!is_gpu_aware) {
            if (host_ == nullptr) {
                check(cudaMallocHost(&host_, 4 * entries_ * sizeof(double)));
            }
            send = host_;
            receive = host_ + 2 * n;
            check(cudaMemcpyAsync(send, first, 2 * entries_ * sizeof(double), cudaMemcpyDeviceToHost, stream));
        }
        check(cudaStreamSynchronize(stream));
        MPI_Request requests[4];
        MPI_Irecv(receive, n, MPI_DOUBLE, all_.left(), right_tag, MPI_COMM_WORLD, &requests[0]);
        MPI_Irecv(receive + n, n, MPI_DOUBLE, all_.right(), left_tag, MPI_COMM_WORLD, &requests[1]);
        MPI_Isend(send, n, MPI_DOUBLE, all_.left(), left_tag, MPI_COMM_WORLD, &requests[2]);
        MPI_Isend(send + n, n, MPI_DOUBLE, all_.right(), right_tag, MPI_COMM_WORLD, &requests[3]);
        MPI_Waitall(4, requests, MPI_STATUSES_IGNORE);
        if (!is_gpu_aware) {
            check(cudaMemcpyAsync(x_.data() + owned_, receive, 2 * entries_ * sizeof(double), cudaMemcpyHostToDevice,
                                  stream));
        }
    }

  private:
    ring all_;
    std::size_t entries_;
    std::size_t owned_;
    mpgpu::buffer<double> x_;
    mpgpu::buffer<double> packed_;
    std::vector<std::int32_t> to_left_;
    std::vector<std::int32_t> to_right_;
    std::int32_t *lists_ = nullptr;
    double *host_ = nullptr;
};

/// Compares the exchange of a structured mesh with the exchange of the same cells by index lists. The faces are in the
/// slowest dimension.
void structured(const mpgpu::context &ctx, const mpgpu::mpi::node &node, ring all, std::size_t entries) {
    constexpr std::int64_t planes = 8;
    std::int64_t rows = 1;
    while (rows * rows * 4 <= static_cast<std::int64_t>(entries)) {
        rows *= 2;
    }
    halo::grid grid;
    grid.cells = {static_cast<std::int64_t>(entries) / rows, rows, planes * all.ranks};
    grid.ranks = {1, 1, all.ranks};
    grid.periodic = {false, false, true};
    grid.ghost = {0, 0, 1};
    grid.reach = halo::neighbours::faces;
    const auto extents = halo::array_extents(grid, all.rank);
    const std::int64_t face = extents[0] * extents[1];
    const auto count = static_cast<std::size_t>(face * extents[2]);
    mpgpu::buffer<double> x(ctx, node.device(), count);
    const mpgpu::stream stream(ctx, node.device());
    const auto synchronized = [&](auto &&exchange) {
        return [&, exchange](bool is_last) {
            exchange();
            if (is_last) {
                stream.synchronize();
            }
        };
    };
    {
        halo::options how;
        how.copy = halo::cuda_copier();
        how.pushed_copy = halo::cuda_pushed();
        how.pushed = true;
        halo::plan plan(ctx, node, grid, {halo::array_of(x)}, how);
        measure(all, "structured", static_cast<std::size_t>(face), 200, synchronized([&] { plan.exchange(stream); }));
        plan.destroy();
    }
    const auto range = [&](std::int64_t first) {
        std::vector<std::int32_t> list(static_cast<std::size_t>(face));
        std::iota(list.begin(), list.end(), static_cast<std::int32_t>(first));
        return list;
    };
    const std::vector<std::int32_t> low = range(face), high = range(face * planes), below = range(0),
                                    above = range(face * (planes + 1));
    std::vector<halo::index_neighbour> neighbours;
    if (all.left() == all.right()) {
        std::vector<std::int32_t> out = low, in = above;
        out.insert(out.end(), high.begin(), high.end());
        in.insert(in.end(), below.begin(), below.end());
        neighbours = {{all.left(), out, in}};
    } else {
        neighbours = {{all.left(), low, below}, {all.right(), high, above}};
    }
    halo::index_options how;
    how.entry_bytes = sizeof(double);
    how.kernel = halo::cuda_indexed();
    halo::indexed ex(ctx, node, node.device(), count, neighbours, how);
    measure(all, "by lists", static_cast<std::size_t>(face), 200, synchronized([&] { ex.exchange(stream, x); }));
    ex.destroy();
}

void run(const std::vector<std::size_t> &sizes) {
    ring all;
    MPI_Comm_rank(MPI_COMM_WORLD, &all.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &all.ranks);
    const bool is_gpu_aware = std::getenv("GPU_AWARE") != nullptr && std::string(std::getenv("GPU_AWARE")) == "1";
    const mpgpu::context ctx;
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);
    check(cudaSetDevice(node.device().id()));
    for (const std::size_t entries : sizes) {
        problem own(ctx, node.device(), all, entries);
        const mpgpu::stream stream(ctx, node.device());
        const auto native = static_cast<cudaStream_t>(stream.get());
        halo::index_options how;
        how.entry_bytes = sizeof(double);
        how.kernel = halo::cuda_indexed();
        halo::indexed ex(ctx, node, node.device(), own.size(), own.neighbours(), how);
        const auto indexed = [&](bool is_last) {
            ex.exchange(stream, own.x());
            if (is_last) {
                stream.synchronize();
            }
        };
        own.fill(1);
        measure(all, "indexed", entries, 200, indexed);
        own.compare("indexed", 1);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t captured = nullptr;
        constexpr int in_graph = 20;
        check(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < in_graph; ++i) {
            ex.exchange(stream, own.x());
        }
        check(cudaStreamEndCapture(native, &graph));
        check(cudaGraphInstantiateWithFlags(&captured, graph, 0));
        int exchanges = 0;
        measure(all, "captured", entries, 200, [&](bool is_last) {
            if (++exchanges % in_graph == 0) {
                check(cudaGraphLaunch(captured, native));
            }
            if (is_last) {
                stream.synchronize();
            }
        });
        check(cudaGraphExecDestroy(captured));
        check(cudaGraphDestroy(graph));
        own.compare("captured", 1);
        measure(all, "indexed, sync", entries, 200, [&](bool) { indexed(true); });
        own.fill(2);
        const char *const form = is_gpu_aware ? "MPI, GPU-aware" : "MPI, by host";
        measure(all, form, entries, 100, [&](bool is_last) {
            own.by_mpi(native, is_gpu_aware);
            if (is_last) {
                check(cudaStreamSynchronize(native));
            }
        });
        own.compare(form, 2);
        ex.destroy();
        structured(ctx, node, all, entries);
    }
}

} // namespace

int main(int argc, char **argv) {
    int gpus = 0;
    MPI_Init(&argc, &argv);
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        std::puts("index_lists: skipped: no GPU");
        MPI_Finalize();
        return 77;
    }
    std::vector<std::size_t> sizes;
    for (int i = 1; i < argc; ++i) {
        sizes.push_back(std::strtoull(argv[i], nullptr, 10));
    }
    try {
        run(sizes.empty() ? std::vector<std::size_t>{1000, 10000, 100000} : sizes);
    } catch (const std::exception &e) {
        std::fprintf(stderr, "index_lists: %s\n", e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return 0;
}
