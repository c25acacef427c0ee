// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures the time that the calling thread needs to enqueue a step of a node plan in which rank 0 sends BYTES to rank
// 1. The reference, measured alternately, are the driver calls of such a step. The streams of the step wait
// (MPGPU_SIGNAL_WAIT=operation), so that there are calls to compare with. The sender has a list of operations that
// waits for a flag, a copy, and a list that sets a flag. The receiver has two lists. Both record an event afterwards.
// Prints medians of the rounds and their spread. node_steps checks the data.
//   mpirun -n 2 node_enqueue
#include <mpgpu/mpi.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cuda.h>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int rounds = 21;
constexpr int steps = 100;                          // fewer than a stream accepts before it blocks its caller
constexpr std::size_t bytes = std::size_t{1} << 20; // a plain copy in a plan, too

void check(CUresult code, const char *what) {
    if (code != CUDA_SUCCESS) {
        throw std::runtime_error(std::string(what) + " has failed: " + std::to_string(code));
    }
}

/// Driver calls of one step, with the same lists of operations as in the library. The flag is set before it is waited
/// for, so that nothing blocks.
class driver_step {
  public:
    driver_step(bool sends, CUdeviceptr dst, CUdeviceptr src) : sends_(sends), dst_(dst), src_(src) {
        check(cuMemHostAlloc(&flags_, 64, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc");
        check(cuMemHostGetDevicePointer(&flag_, flags_, 0), "cuMemHostGetDevicePointer");
        check(cuEventCreate(&end_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    }
    driver_step(const driver_step &) = delete;
    driver_step(driver_step &&) = delete;
    driver_step &operator=(const driver_step &) = delete;
    driver_step &operator=(driver_step &&) = delete;
    ~driver_step() {
        cuEventDestroy(end_);
        cuMemFreeHost(flags_);
    }

    void enqueue(CUstream stream) const {
        std::array<CUstreamBatchMemOpParams, 1> raise{};
        raise[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        raise[0].writeValue.address = flag_;
        raise[0].writeValue.value64 = 1;
        std::array<CUstreamBatchMemOpParams, 2> take{};
        take[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
        take[0].waitValue.address = flag_;
        take[0].waitValue.value64 = 1;
        take[0].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
        take[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        take[1].writeValue.address = flag_;
        check(cuStreamBatchMemOp(stream, 1, raise.data(), 0), "cuStreamBatchMemOp");
        if (sends_) {
            check(cuMemcpyAsync(dst_, src_, bytes, stream), "cuMemcpyAsync");
        }
        check(cuStreamBatchMemOp(stream, 2, take.data(), 0), "cuStreamBatchMemOp");
        check(cuEventRecord(end_, stream), "cuEventRecord");
    }

  private:
    bool sends_;
    CUdeviceptr dst_;
    CUdeviceptr src_;
    void *flags_ = nullptr;
    CUdeviceptr flag_ = 0;
    CUevent end_ = nullptr;
};

void run() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    mpgpu::context_options how;
    how.signal_wait = mpgpu::signal_wait::operation;
    const mpgpu::context ctx(how);
    const mpgpu::device gpu = mpgpu::device::gpu(rank % ctx.devices().gpus);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {gpu});
    mpgpu::buffer<std::byte> sent(ctx, gpu, bytes);
    mpgpu::buffer<std::byte> received(ctx, gpu, bytes);
    const mpgpu::plan step = node.plan({mpgpu::make_window(sent), mpgpu::make_window(received)},
                                       rank == 0 ? std::vector<mpgpu::node_transfer>{{{1, 1, 0}, {0, 0, 0}, bytes}}
                                                 : std::vector<mpgpu::node_transfer>{});
    const mpgpu::stream stream(ctx, gpu);
    CUcontext current = nullptr;
    check(cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == nullptr) {
        CUdevice device = 0;
        check(cuDeviceGet(&device, rank % ctx.devices().gpus), "cuDeviceGet");
        check(cuDevicePrimaryCtxRetain(&current, device), "cuDevicePrimaryCtxRetain");
        check(cuCtxSetCurrent(current), "cuCtxSetCurrent");
    }
    auto *const raw = reinterpret_cast<CUstream>(stream.get());
    const auto everyones = node.exchange(received);
    const driver_step by_driver(rank == 0, reinterpret_cast<CUdeviceptr>(everyones.of(1)->data()),
                                reinterpret_cast<CUdeviceptr>(sent.data()));
    const auto timed = [&](const std::function<void()> &enqueue) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double started = MPI_Wtime();
        for (int i = 0; i < steps; ++i) {
            enqueue();
        }
        const double elapsed = MPI_Wtime() - started;
        stream.synchronize();
        return elapsed / steps * 1e6;
    };
    std::array<std::vector<double>, 3> taken; // the plan, the driver, and their difference in a round
    for (int round = 0; round <= rounds; ++round) {
        const double plan = timed([&] { step.enqueue(stream); });
        const double driver = timed([&] { by_driver.enqueue(raw); });
        if (round > 0) { // the first round is for warm-up
            taken[0].push_back(plan);
            taken[1].push_back(driver);
            taken[2].push_back(plan - driver);
        }
    }
    for (std::vector<double> &each : taken) {
        std::sort(each.begin(), each.end());
    }
    const auto text = [&](std::size_t i) {
        std::array<char, 96> line{};
        std::snprintf(line.data(), line.size(), "%.2f us (%.2f to %.2f)", taken[i][rounds / 2], taken[i].front(),
                      taken[i].back());
        return std::string(line.data());
    };
    std::printf("%senqueueing, rank %d: %s; the driver's calls %s; more %s\n", rank == 0 ? step.describe().c_str() : "",
                rank, text(0).c_str(), text(1).c_str(), text(2).c_str());
    MPI_Barrier(MPI_COMM_WORLD); // no rank frees memory that another still maps
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    try {
        run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "node_enqueue: %s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return 0;
}
