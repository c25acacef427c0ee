// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Measures the driver's time for many kernels that are launched repeatedly without host waits. Each kernel has an
// argument as long as that of the fused copy kernel. The kernels are the parallel nodes of a graph, chains in a graph,
// or launches in a stream. Run by tests/gpu/halo_row; requires one or two GPUs.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

struct argument {
    unsigned long long words[482]; // 3856 bytes, as mpgpu::SegmentList
};

__global__ void __launch_bounds__(256) copy(const __grid_constant__ argument list) {
    const auto *from = reinterpret_cast<const uint4 *>(list.words[0]) + blockIdx.x * 256;
    auto *to = reinterpret_cast<uint4 *>(list.words[1]) + blockIdx.x * 256;
    to[threadIdx.x] = from[threadIdx.x];
}

// Simulates work before and after the copies of an exchange. It takes about 100 us on the same GPU.
__global__ void work(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

void check(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        std::printf("%s: %s\n", what, cudaGetErrorString(status));
        std::exit(1);
    }
}
#define CHECK(call) check(call, #call)

double now() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int blocks = 120;
char *source = nullptr;
char *target = nullptr;

// Creates a graph of `nodes` nodes in `chains` equal chains. If there are as many chains as nodes, all nodes are
// parallel.
cudaGraphExec_t graph_of(int nodes, int chains) {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    std::vector<cudaGraphNode_t> last(static_cast<std::size_t>(chains));
    for (int i = 0; i < nodes; ++i) {
        argument list{};
        list.words[0] = reinterpret_cast<unsigned long long>(source + std::size_t(i) * blocks * 4096);
        list.words[1] = reinterpret_cast<unsigned long long>(target + std::size_t(i) * blocks * 4096);
        void *arguments[] = {&list};
        cudaKernelNodeParams node{};
        node.func = reinterpret_cast<void *>(copy);
        node.gridDim = dim3(blocks);
        node.blockDim = dim3(256);
        node.kernelParams = arguments;
        cudaGraphNode_t &end = last[static_cast<std::size_t>(i % chains)];
        CHECK(cudaGraphAddKernelNode(&end, graph, i < chains ? nullptr : &end, i < chains ? 0 : 1, &node));
    }
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
}

template <class Launch>
void measure(const char *name, int nodes, bool between, cudaStream_t stream, const Launch &launch) {
    constexpr int row = 40;
    const auto exchange = [&](int number) {
        if (between) {
            work<<<1, 1, 0, stream>>>(100000);
        }
        const double begin = now();
        launch(number);
        const double host = now() - begin;
        if (between) {
            work<<<1, 1, 0, stream>>>(100000);
        }
        return host;
    };
    for (int i = 0; i < 4; ++i) {
        exchange(i);
    }
    CHECK(cudaStreamSynchronize(stream));
    std::vector<double> lone, lone_host;
    for (int i = 0; i < row; ++i) {
        const double begin = now();
        lone_host.push_back(exchange(i));
        CHECK(cudaStreamSynchronize(stream));
        lone.push_back(now() - begin);
    }
    std::sort(lone.begin(), lone.end());
    std::sort(lone_host.begin(), lone_host.end());
    double host = 0;
    const double begin = now();
    for (int i = 0; i < row; ++i) {
        host += exchange(i);
    }
    CHECK(cudaStreamSynchronize(stream));
    const double all = now() - begin;
    std::printf("%-28s %3d kernels%s: lone %7.1f us (host %6.1f), in a row %7.1f us (host %6.1f)\n", name, nodes,
                between ? " between work" : "", lone[row / 2], lone_host[row / 2], all / row, host / row);
    std::fflush(stdout);
}

} // namespace

int main() {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        std::printf("no GPU\n");
        return 77;
    }
    constexpr int most = 80;
    if (gpus > 1) {
        CHECK(cudaSetDevice(1));
        CHECK(cudaMalloc(&target, std::size_t(most) * blocks * 4096));
        CHECK(cudaSetDevice(0));
        CHECK(cudaDeviceEnablePeerAccess(1, 0));
    } else {
        CHECK(cudaMalloc(&target, std::size_t(most) * blocks * 4096));
    }
    CHECK(cudaMalloc(&source, std::size_t(most) * blocks * 4096));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const bool between : {false, true}) {
        for (const int nodes : {1, 2, 4, 8, 16, 32, 77}) {
            const auto by_graph = [&](const char *name, int chains, int execs) {
                std::vector<cudaGraphExec_t> made;
                for (int i = 0; i < execs; ++i) {
                    made.push_back(graph_of(nodes, chains));
                }
                measure(name, nodes, between, stream,
                        [&](int number) { CHECK(cudaGraphLaunch(made[std::size_t(number % execs)], stream)); });
                for (cudaGraphExec_t exec : made) {
                    CHECK(cudaGraphExecDestroy(exec));
                }
            };
            by_graph("graph, all parallel", nodes, 1);
            by_graph("graph, a chain", 1, 1);
            if (nodes >= 8) {
                by_graph("graph, 4 chains", 4, 1);
                by_graph("graph, all parallel, 2 execs", nodes, 2);
                by_graph("graph, a chain, 2 execs", 1, 2);
            }
            measure("stream", nodes, between, stream, [&](int) {
                for (int i = 0; i < nodes; ++i) {
                    argument list{};
                    list.words[0] = reinterpret_cast<unsigned long long>(source + std::size_t(i) * blocks * 4096);
                    list.words[1] = reinterpret_cast<unsigned long long>(target + std::size_t(i) * blocks * 4096);
                    copy<<<blocks, 256, 0, stream>>>(list);
                }
                CHECK(cudaGetLastError());
            });
        }
    }
    return 0;
}
