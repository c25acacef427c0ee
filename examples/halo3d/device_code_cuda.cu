// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device_code.hpp"

#include <mpgpu/halo.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr unsigned threads = 256;
constexpr std::int64_t most_blocks = 4096; // a few per multiprocessor of the largest GPU; threads loop in strides

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

unsigned blocks_of(const variable &v) {
    return static_cast<unsigned>(std::min((element_count(v.where) + threads - 1) / threads, most_blocks));
}

__global__ void set_kernel(variable v) {
    const std::int64_t elements = element_count(v.where);
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
        v.data[i] = value_before(v.where, i, v.number, v.cycle);
    }
}

__global__ void compare_kernel(variable v, unsigned long long *first_wrong) {
    const std::int64_t elements = element_count(v.where);
    const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
        if (v.data[i] != value_after(v.where, i, v.number, v.cycle)) {
            atomicMin(first_wrong, static_cast<unsigned long long>(i));
        }
    }
}

void set(const mpgpu::stream &stream, const variable &v) {
    check(cudaSetDevice(v.device), "cudaSetDevice");
    set_kernel<<<blocks_of(v), threads, 0, stream.get()>>>(v);
    check(cudaGetLastError(), "the kernel that sets cells");
}

void compare(const mpgpu::stream &stream, const variable &v, unsigned long long *first_wrong) {
    check(cudaSetDevice(v.device), "cudaSetDevice");
    compare_kernel<<<blocks_of(v), threads, 0, stream.get()>>>(v, first_wrong);
    check(cudaGetLastError(), "the kernel that compares cells");
}

/// Additional streams and events that a capture uses. They are destroyed with this object.
class fork {
  public:
    explicit fork(std::size_t branches) : streams_(branches + 1), events_(branches + 1) {
        for (cudaStream_t &stream : streams_) {
            check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        }
        for (cudaEvent_t &event : events_) {
            check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
        }
    }
    fork(const fork &) = delete;
    fork &operator=(const fork &) = delete;
    ~fork() {
        for (cudaStream_t stream : streams_) {
            cudaStreamDestroy(stream);
        }
        for (cudaEvent_t event : events_) {
            cudaEventDestroy(event);
        }
    }

    /// Captures several launches into one graph. Each launch has a branch of its own, so that none waits for another.
    cudaGraph_t capture(const std::vector<mpgpu::halo::launch_function> &all) {
        cudaStream_t trunk = streams_.back();
        check(cudaStreamBeginCapture(trunk, cudaStreamCaptureModeRelaxed),
              "cudaStreamBeginCapture"); // the first launch of a kernel may load it
        check(cudaEventRecord(events_.back(), trunk), "cudaEventRecord");
        for (std::size_t i = 0; i < all.size(); ++i) {
            check(cudaStreamWaitEvent(streams_[i], events_.back(), 0), "cudaStreamWaitEvent");
            all[i](reinterpret_cast<mp_stream_t>(streams_[i]));
            check(cudaEventRecord(events_[i], streams_[i]), "cudaEventRecord");
            check(cudaStreamWaitEvent(trunk, events_[i], 0), "cudaStreamWaitEvent");
        }
        cudaGraph_t graph = nullptr;
        check(cudaStreamEndCapture(trunk, &graph), "cudaStreamEndCapture");
        return graph;
    }

  private:
    std::vector<cudaStream_t> streams_;
    std::vector<cudaEvent_t> events_;
};

mpgpu::halo::launch_function graph(mpgpu::device where, const std::vector<mpgpu::halo::launch_function> &all) {
    check(cudaSetDevice(where.id()), "cudaSetDevice");
    cudaGraph_t captured = fork(all.size()).capture(all);
    cudaGraphExec_t made = nullptr;
    const cudaError_t outcome = cudaGraphInstantiateWithFlags(&made, captured, 0);
    cudaGraphDestroy(captured);
    check(outcome, "cudaGraphInstantiate");
    const std::shared_ptr<CUgraphExec_st> kept(made, cudaGraphExecDestroy);
    // The returned function keeps alive the launches, which own the memory that their kernels read.
    return [kept, all](mpgpu::stream_view stream) {
        check(cudaGraphLaunch(kept.get(), reinterpret_cast<cudaStream_t>(stream.get())), "cudaGraphLaunch");
    };
}

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

std::shared_ptr<std::byte> allocate_managed(int device, std::size_t bytes) {
    if (attribute(cudaDevAttrConcurrentManagedAccess, device) == 0) {
        throw std::invalid_argument("managed: the CPU must not touch managed memory while kernels of GPU " +
                                    std::to_string(device) + " run; use pinned");
    }
    check(cudaSetDevice(device), "cudaSetDevice");
    void *memory = nullptr;
    check(cudaMallocManaged(&memory, std::max<std::size_t>(bytes, 1)), "cudaMallocManaged");
    return {static_cast<std::byte *>(memory), cudaFree};
}

bool reaches_pageable(int device) {
    return attribute(cudaDevAttrPageableMemoryAccess, device) != 0;
}

} // namespace

const device_code on_gpus = {
    set,   compare,          mpgpu::halo::cuda_copier, mpgpu::halo::cuda_persistent, mpgpu::halo::cuda_pushed,
    graph, allocate_managed, reaches_pageable};

bool is_on_gpu(const void *memory) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        cudaGetLastError(); // no driver or no GPU: clears the last error
        return false;
    }
    return attributes.type == cudaMemoryTypeDevice;
}
