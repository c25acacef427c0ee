// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures steps of a node plan in a captured graph, and steps that run at the same time as kernels that fill the GPU.
// Two ranks with one GPU each put data into each other's memory.
// - Captured: microseconds per step in a graph of many steps, and of successive enqueued steps. Both ranks put to each
//   other at once, or first one and then the other, so that each waits for the bytes of the other. Every byte is
//   checked.
// - Beside: a step of rank 1 waits for its peer, which is late until rank 1's matrix products (cuBLAS, bf16) have
//   finished. The result is their time relative to their time without the step, alternately. The step is enqueued
//   before the products, or after the first of them, when the GPU is full. A wait that blocked the products would never
//   end.
// Prints medians of the rounds and their spread.
//   mpirun -n 2 node_beside [N]        products of N x N matrices, 8192 if left out
#include <mpgpu/mpi.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int rounds = 7;

int rank = 0;

void check(int code, const char *what) {
    if (code != 0) {
        throw std::runtime_error(std::string(what) + " has failed: " + std::to_string(code));
    }
}

/// Allocates GPU memory by the CUDA runtime. The memory is freed with the last copy of the pointer.
std::shared_ptr<void> device_memory(std::size_t bytes) {
    void *memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return {memory, [](void *freed) { cudaFree(freed); }};
}

/// Sets all elements to bf16 numbers from -2 to 2. Adjacent numbers differ, because products of zeros take less time.
__global__ void fill(std::uint16_t *numbers, std::size_t count) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
         i += std::size_t{gridDim.x} * blockDim.x) {
        const auto mixed = static_cast<std::uint32_t>(i) * 2654435761U;
        numbers[i] = static_cast<std::uint16_t>(0x3f00U | (mixed >> 16U & 0x80ffU));
    }
}

/// Products of square matrices by cuBLAS, which is loaded at run time so that tests need not link with it.
class products {
  public:
    explicit products(std::size_t n) : n_(static_cast<int>(n)) {
        void *library = nullptr;
        for (const char *name : {"libcublas.so", "libcublas.so.13", "libcublas.so.12"}) {
            library = library == nullptr ? dlopen(name, RTLD_NOW) : library;
        }
        if (library == nullptr) {
            return;
        }
        const auto symbol = [&](const char *name) {
            void *found = dlsym(library, name);
            if (found == nullptr) {
                throw std::runtime_error(std::string("cuBLAS has no ") + name);
            }
            return found;
        };
        const auto create = reinterpret_cast<int (*)(void **)>(symbol("cublasCreate_v2"));
        const auto set_stream = reinterpret_cast<int (*)(void *, cudaStream_t)>(symbol("cublasSetStream_v2"));
        multiply_ = reinterpret_cast<multiply_function>(symbol("cublasGemmEx"));
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        check(create(&handle_), "cublasCreate_v2");
        check(set_stream(handle_, stream_), "cublasSetStream_v2");
        for (auto &matrix : matrices_) {
            matrix = device_memory(n * n * 2);
            fill<<<1024, 256, 0, stream_>>>(static_cast<std::uint16_t *>(matrix.get()), n * n);
        }
        check(cudaEventCreate(&begin_), "cudaEventCreate");
        check(cudaEventCreate(&end_), "cudaEventCreate");
    }

    [[nodiscard]] bool are_there() const { return handle_ != nullptr; }

    /// Enqueues `count` matrix products.
    void enqueue(int count) const {
        constexpr int bf16 = 14; // CUDA_R_16BF, CUBLAS_COMPUTE_32F
        constexpr int compute = 68;
        const float one = 1;
        const float zero = 0;
        for (int i = 0; i < count; ++i) {
            check(multiply_(handle_, 0, 0, n_, n_, n_, &one, matrices_[0].get(), bf16, n_, matrices_[1].get(), bf16, n_,
                            &zero, matrices_[2].get(), bf16, n_, compute, -1),
                  "cublasGemmEx");
        }
    }

    /// Returns the time of `count` matrix products in milliseconds. Calls `before` first, and `first` after the first
    /// product is enqueued.
    float timed(int count, const std::function<void()> &before, const std::function<void()> &first) const {
        before();
        check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
        enqueue(1);
        first();
        enqueue(count - 1);
        check(cudaEventRecord(end_, stream_), "cudaEventRecord");
        check(cudaEventSynchronize(end_), "cudaEventSynchronize");
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
        return milliseconds;
    }

  private:
    using multiply_function = int (*)(void *, int, int, int, int, int, const void *, const void *, int, int,
                                      const void *, int, int, const void *, void *, int, int, int, int);
    int n_;
    void *handle_ = nullptr; // never destroyed, like stream and events
    cudaStream_t stream_ = nullptr;
    multiply_function multiply_ = nullptr;
    std::array<std::shared_ptr<void>, 3> matrices_;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
};

std::string text(std::vector<double> figures, const char *unit) {
    std::sort(figures.begin(), figures.end());
    std::array<char, 96> line{};
    std::snprintf(line.data(), line.size(), "%.2f %s (%.2f to %.2f)", figures[figures.size() / 2], unit,
                  figures.front(), figures.back());
    return line.data();
}

/// Puts of both ranks to each other, either in one step, or in two successive steps in which rank 0 is first.
struct ring_step {
    mpgpu::buffer<std::byte> source;
    mpgpu::buffer<std::byte> inbox;
    std::vector<mpgpu::plan> plans;

    ring_step(const mpgpu::context &ctx, const mpgpu::mpi::node &node, mpgpu::device gpu, std::size_t bytes,
              bool one_way = false)
        : source(ctx, gpu, bytes), inbox(ctx, gpu, bytes) {
        const mpgpu::node_transfer put{mpgpu::node_end(1 - rank, 1), mpgpu::node_end(rank, 0), bytes};
        for (int step = 0; step < (one_way ? 2 : 1); ++step) {
            const bool takes_part = !one_way || step == rank;
            plans.push_back(node.plan({mpgpu::make_window(source), mpgpu::make_window(inbox)},
                                      std::vector<mpgpu::node_transfer>(takes_part ? 1 : 0, put)));
        }
    }

    void enqueue(const mpgpu::stream &stream) const {
        for (const mpgpu::plan &plan : plans) {
            plan.enqueue(stream);
        }
    }

    [[nodiscard]] std::size_t wrong(const mpgpu::stream &stream, const std::function<void()> &steps) {
        const auto byte = [&](int of, std::size_t i) {
            return static_cast<std::byte>((i * 7 + i / 4099 + of * 31) & 0xff);
        };
        std::vector<std::byte> here(source.size());
        for (std::size_t i = 0; i < here.size(); ++i) {
            here[i] = byte(rank, i);
        }
        check(cudaMemcpy(source.data(), here.data(), here.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
        check(cudaMemset(inbox.data(), 0xEE, inbox.size()), "cudaMemset");
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        MPI_Barrier(MPI_COMM_WORLD);
        steps();
        stream.synchronize();
        check(cudaMemcpy(here.data(), inbox.data(), here.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
        std::size_t different = 0;
        for (std::size_t i = 0; i < here.size(); ++i) {
            different += here[i] == byte(1 - rank, i) ? 0 : 1;
        }
        return different;
    }
};

/// Returns the time per step of the slowest rank in microseconds. `work` makes `steps` steps.
double timed(const mpgpu::stream &stream, int steps, const std::function<void()> &work) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double started = MPI_Wtime();
    work();
    stream.synchronize();
    double elapsed = MPI_Wtime() - started;
    MPI_Allreduce(MPI_IN_PLACE, &elapsed, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return elapsed / steps * 1e6;
}

std::size_t captured(const mpgpu::stream &stream, ring_step step) {
    constexpr int in_graph = 100;
    constexpr int launches = 4;
    auto *const raw = reinterpret_cast<cudaStream_t>(stream.get());
    const auto many = [&](int count) {
        for (int i = 0; i < count; ++i) {
            step.enqueue(stream);
        }
    };
    const int steps = in_graph * static_cast<int>(step.plans.size());
    many(1);
    stream.synchronize();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(raw, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    many(in_graph);
    check(cudaStreamEndCapture(raw, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    const auto launch = [&] { check(cudaGraphLaunch(exec, raw), "cudaGraphLaunch"); };
    const std::size_t wrong = step.wrong(stream, launch);
    std::array<std::vector<double>, 2> taken;
    for (int round = 0; round <= rounds; ++round) {
        const double in_a_row = timed(stream, steps, [&] { many(in_graph); });
        const double launched = timed(stream, steps * launches, [&] {
            for (int i = 0; i < launches; ++i) {
                launch();
            }
        });
        if (round > 0) { // the first round is for warm-up
            taken[0].push_back(in_a_row);
            taken[1].push_back(launched);
        }
    }
    if (rank == 0) {
        std::printf("%s, %zu bytes each: in a row %s, captured %s\n", step.plans.size() > 1 ? "one way" : "both ways",
                    step.source.size(), text(taken[0], "us").c_str(), text(taken[1], "us").c_str());
        std::fflush(stdout);
    }
    MPI_Barrier(MPI_COMM_WORLD); // no peer waits for a launch of this graph
    check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return wrong;
}

void beside(const mpgpu::stream &stream, const ring_step &step, const products &work) {
    constexpr int count = 8; // more than 10 ms on H100
    const std::function<void()> nothing = [] {};
    const auto enqueue = [&] { step.enqueue(stream); };
    const auto late = [&](const std::function<void()> &before, const std::function<void()> &first) {
        float milliseconds = 0;
        if (rank == 1) {
            milliseconds = work.timed(count, before, first);
            const int done = static_cast<int>(cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream.get())));
            if (done != cudaErrorNotReady) {
                throw std::runtime_error("the step did not wait for rank 0");
            }
        }
        MPI_Barrier(MPI_COMM_WORLD); // rank 0 is late by this time
        if (rank == 0) {
            enqueue();
        }
        stream.synchronize();
        return milliseconds;
    };
    std::array<std::vector<double>, 3> taken;
    for (int round = 0; round <= rounds; ++round) {
        MPI_Barrier(MPI_COMM_WORLD);
        const float alone = rank == 1 ? work.timed(count, nothing, nothing) : 0;
        const float before = late(enqueue, nothing);
        const float full = late(nothing, enqueue);
        if (round > 0) {
            taken[0].push_back(alone);
            taken[1].push_back(before / alone);
            taken[2].push_back(full / alone);
        }
    }
    if (rank == 1) {
        std::printf("%d products alone %s; beside a step of %zu bytes that waits, over that: enqueued before them %s, "
                    "behind the first %s\n",
                    count, text(taken[0], "ms").c_str(), step.source.size(), text(taken[1], "times").c_str(),
                    text(taken[2], "times").c_str());
        std::fflush(stdout);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

std::size_t run(std::size_t n) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks != 2) {
        throw std::runtime_error("two ranks are needed");
    }
    int gpus = 0;
    check(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
    check(cudaSetDevice(rank % gpus), "cudaSetDevice");
    const mpgpu::context ctx;
    const mpgpu::device gpu = mpgpu::device::gpu(rank % gpus);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu});
    const mpgpu::stream stream(ctx, gpu);
    std::size_t wrong = 0;
    for (const bool one_way : {false, true}) {
        for (const std::size_t kibibytes : {0, 4, 64, 256, 1024, 4096}) {
            wrong += captured(stream, ring_step(ctx, node, gpu, std::max<std::size_t>(kibibytes << 10U, 8), one_way));
        }
    }
    const products work(n);
    if (!work.are_there()) {
        std::printf("rank %d: no cuBLAS to be found by LD_LIBRARY_PATH: nothing is measured beside products\n", rank);
        return wrong;
    }
    for (const std::size_t kibibytes : {0, 256, 4096, 65'536}) {
        beside(stream, ring_step(ctx, node, gpu, std::max<std::size_t>(kibibytes << 10U, 8)), work);
    }
    return wrong;
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    unsigned long long wrong = 0;
    try {
        wrong = run(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 8192);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "node_beside: %s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        std::printf("%llu bytes wrong\n", wrong);
    }
    MPI_Finalize();
    return wrong == 0 ? 0 : 1;
}
