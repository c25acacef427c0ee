// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures MPI_Send from host memory while a kernel writes to host memory, as in figures 6 to 11 of the paper on
// notifications between GPU and CPU (2024). The kernel fills the message's buffer, raises a notification, and continues
// to write until the message is sent:
//
//   after    no further writes: the host sends after the end of the kernel
//   same     into the message's buffer (the same words; not permitted by MPI, and the largest possible disturbance)
//   next     into the memory after it
//   apart    2 MiB after it: in no page of the message
//   far      into memory of another NUMA node
//
// Run as two ranks: `send_beside [MOST_BYTES]`. Rank 0 sends, and prints a line for each grid, size and place: grid,
// blocks, bytes, place, microseconds of MPI_Send (median), and the ratio to `after`. The grids are one block of 1024
// threads, and the maximum number of concurrent blocks; on virtual devices one CPU thread. Rank 1 compares every word.
// Run by tests/gpu/notifications; exits with 0, with 1 if a word was wrong, with 77 if a GPU was requested and there is
// none.
#include <mpgpu/notify.hpp>

#include <mpi.h>
#include <sched.h>
#include <sys/mman.h>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define BOTH __host__ __device__
#else
#define BOTH
#endif

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using word = std::uint64_t;
using steady = std::chrono::steady_clock;

constexpr std::size_t gap = std::size_t{2} << 20U;
constexpr int warm_up = 5;
constexpr int rounds = 31;
constexpr auto patience = std::chrono::seconds(20);

BOTH constexpr word word_of(word round, word index) {
    return round * 1000003 + index;
}

/// Work of a writer in one round. The writer fills `first`, sends the notification, and then fills `then` (if there is
/// any) until it is stopped.
struct work {
    word *first;
    word *then;
    word words;
    word round;
};

// --- NUMA ------------------------------------------------------------------------------------------------------------

/// Returns the CPUs that this process may use, by NUMA node.
std::map<int, cpu_set_t> cpus_by_node() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    std::map<int, cpu_set_t> nodes;
    for (int node = 0; node < 1024; ++node) {
        std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
        cpu_set_t own;
        CPU_ZERO(&own);
        for (std::string range; std::getline(file, range, ',');) { // such as 0-15,32-47
            int from = 0;
            int to = -1;
            char dash = 0;
            std::istringstream text(range);
            if (text >> from && !(text >> dash >> to)) {
                to = from;
            }
            for (int cpu = from; cpu <= to && cpu < CPU_SETSIZE; ++cpu) {
                if (CPU_ISSET(cpu, &allowed)) {
                    CPU_SET(cpu, &own);
                }
            }
        }
        if (CPU_COUNT(&own) > 0) {
            nodes[node] = own;
        }
    }
    return nodes;
}

/// Pinned memory whose pages are on the NUMA node of the CPUs that first wrote to them.
class placed_memory {
  public:
    placed_memory(const mpgpu::context &ctx, const cpu_set_t *cpus, std::size_t bytes) : bytes_(bytes) {
        memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory_ == MAP_FAILED) {
            throw std::bad_alloc();
        }
        cpu_set_t before;
        sched_getaffinity(0, sizeof before, &before);
        if (cpus != nullptr && sched_setaffinity(0, sizeof *cpus, cpus) != 0) {
            throw std::runtime_error("sched_setaffinity: this thread may not go to the CPUs of a NUMA node");
        }
        std::fill_n(static_cast<std::byte *>(memory_), bytes, std::byte{1});
        sched_setaffinity(0, sizeof before, &before);
        pinned_ = mpgpu::registered_memory<std::byte>(ctx, {static_cast<std::byte *>(memory_), bytes});
    }
    placed_memory(const placed_memory &) = delete;
    placed_memory &operator=(const placed_memory &) = delete;
    ~placed_memory() {
        pinned_ = {};
        munmap(memory_, bytes_);
    }

    [[nodiscard]] word *at(std::size_t byte) const {
        return reinterpret_cast<word *>(static_cast<char *>(memory_) + byte);
    }

  private:
    std::size_t bytes_;
    void *memory_ = nullptr;
    mpgpu::registered_memory<std::byte> pinned_;
};

// --- writers ---------------------------------------------------------------------------------------------------------

/// Writer that writes to host memory while rank 0 sends.
class writer {
  public:
    virtual ~writer() = default;
    /// Starts writing. The memory must exist until `finish` returns.
    virtual void start(const work &given) = 0;
    /// Waits until the writer has ended.
    virtual void finish() = 0;
    const char *name = "";
    unsigned blocks = 1;
};

/// Writer that is a CPU thread, for virtual devices.
class thread_writer final : public writer {
  public:
    explicit thread_writer(mpgpu::notifications &told) : told_(told) { name = "thread"; }
    void start(const work &given) override {
        thread_ = std::thread([this, given] {
            const auto fill = [&](word *to) {
                for (word i = 0; i < given.words; ++i) { // MPI may read the same words
                    __atomic_store_n(to + i, word_of(given.round, i), __ATOMIC_RELAXED);
                }
            };
            fill(given.first);
            told_.raise(0, given.round);
            while (given.then != nullptr && !told_.test(1, given.round)) {
                fill(given.then);
            }
        });
    }
    void finish() override { thread_.join(); }

  private:
    mpgpu::notifications &told_;
    std::thread thread_;
};

#ifdef __CUDACC__
void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
    }
}

constexpr unsigned threads = 1024;

/// Kernel that writes to host memory. One thread polls host memory until the message is sent, and records this in
/// `over`, which is in GPU memory.
__global__ void __launch_bounds__(threads) write_kernel(mpgpu::notifier tell, work given, volatile word *over) {
    const mpgpu::notify_block block = mpgpu::notify_block::current();
    const word mine = word{block.index} * block.threads + block.thread;
    const word stride = word{block.blocks} * block.threads;
    for (word i = mine; i < given.words; i += stride) {
        given.first[i] = word_of(given.round, i);
    }
    tell.raise_by_all(block, 0, given.round);
    __shared__ bool is_over;
    while (given.then != nullptr) {
        volatile word *const to = given.then; // read again each time
        for (word i = mine; i < given.words; i += stride) {
            to[i] = word_of(given.round, i);
        }
        __syncthreads();
        if (block.thread == 0) {
            if (block.index == 0 && tell.is_raised(1, given.round)) {
                *over = given.round;
            }
            is_over = *over == given.round;
        }
        __syncthreads();
        if (is_over) {
            return;
        }
    }
}

class kernel_writer final : public writer {
  public:
    kernel_writer(const mpgpu::context &ctx, mpgpu::device where, mpgpu::notifications &told, bool all)
        : told_(told), stream_(ctx, where), over_(ctx, where, 1) {
        check(cudaSetDevice(where.id()), "cudaSetDevice");
        check(cudaMemset(over_.data(), 0, sizeof(word)), "cudaMemset");
        int resident = 0; // the query also loads the kernel
        int multiprocessors = 0;
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, write_kernel, threads, 0), "occupancy");
        check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.id()), "attribute");
        name = all ? "all-blocks" : "one-block";
        blocks = all ? static_cast<unsigned>(resident * multiprocessors) : 1;
    }
    void start(const work &given) override {
        write_kernel<<<blocks, threads, 0, reinterpret_cast<cudaStream_t>(stream_.get())>>>(told_.in_kernel(), given,
                                                                                            over_.data());
        check(cudaGetLastError(), "the kernel that writes");
    }
    void finish() override { stream_.synchronize(); }

  private:
    mpgpu::notifications &told_;
    mpgpu::stream stream_;
    mpgpu::buffer<word> over_;
};
#endif

// --- the two ranks ---------------------------------------------------------------------------------------------------

struct place {
    const char *name;
    std::optional<std::size_t> offset; ///< offset from the message; empty: no further writes
    const placed_memory *memory;
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/// Sends messages while a writer writes to each place alternately. Both ranks call this function.
void send_beside(writer *by, mpgpu::notifications *told, const placed_memory &message, const std::vector<place> &places,
                 std::size_t bytes, word &round) {
    std::vector<std::vector<double>> microseconds(places.size());
    for (int turn = 0; turn < warm_up + rounds; ++turn) {
        for (std::size_t p = 0; p < places.size(); ++p) {
            ++round;
            if (by == nullptr) {
                MPI_Request request = MPI_REQUEST_NULL;
                MPI_Irecv(message.at(0), static_cast<int>(bytes), MPI_BYTE, 0, 0, MPI_COMM_WORLD, &request);
                MPI_Barrier(MPI_COMM_WORLD);
                MPI_Wait(&request, MPI_STATUS_IGNORE);
                for (word i = 0; i < bytes / sizeof(word); ++i) {
                    if (message.at(0)[i] != word_of(round, i)) {
                        throw std::runtime_error("a message of " + std::to_string(bytes) + " bytes, " + places[p].name +
                                                 ": word " + std::to_string(i) + " is wrong");
                    }
                }
                continue;
            }
            word *const then = places[p].offset ? places[p].memory->at(*places[p].offset) : nullptr;
            by->start({message.at(0), then, bytes / sizeof(word), round});
            told->synchronize(0, round, patience, "a writer that begins");
            if (then == nullptr) {
                by->finish();
            }
            MPI_Barrier(MPI_COMM_WORLD);
            const auto begin = steady::now();
            MPI_Send(message.at(0), static_cast<int>(bytes), MPI_BYTE, 1, 0, MPI_COMM_WORLD);
            const double taken = std::chrono::duration<double, std::micro>(steady::now() - begin).count();
            if (then != nullptr) {
                told->raise(1, round);
                by->finish();
            }
            if (turn >= warm_up) {
                microseconds[p].push_back(taken);
            }
        }
    }
    for (std::size_t p = 0; by != nullptr && p < places.size(); ++p) {
        std::printf("%-10s %5u %10zu  %-6s %10.2f %7.2f\n", by->name, by->blocks, bytes, places[p].name,
                    median(microseconds[p]), median(microseconds[p]) / median(microseconds[0]));
        std::fflush(stdout);
    }
}

int run(int rank, std::size_t most) {
    mpgpu::context_options machine;
#ifndef __CUDACC__
    machine.backend = mpgpu::backend::host; // there are no kernels here
#endif
    std::error_code ec;
    const mpgpu::context ctx(machine, ec);
    if (ec || ctx.devices().gpus == 0) {
        std::printf("no GPU: nothing was sent (%s)\n", ec.message().c_str());
        return 77;
    }
    const mpgpu::device where = mpgpu::device::gpu(0);
    const bool on_gpu = ctx.backend() == mpgpu::backend::cuda;
    const std::map<int, cpu_set_t> nodes = cpus_by_node();
    const cpu_set_t *const near = nodes.empty() ? nullptr : &nodes.begin()->second;
    const placed_memory message(ctx, near, 2 * most + gap);
    std::optional<placed_memory> far;
    if (nodes.size() > 1) {
        far.emplace(ctx, &nodes.rbegin()->second, most);
    }

    mpgpu::notifications told(ctx, where, 2);
    std::vector<std::unique_ptr<writer>> writers;
#ifdef __CUDACC__
    if (on_gpu) {
        for (const bool all : {false, true}) {
            writers.push_back(std::make_unique<kernel_writer>(ctx, where, told, all));
        }
    }
#endif
    if (!on_gpu) {
        writers.push_back(std::make_unique<thread_writer>(told));
    }
    // Both ranks must use the same places, even if they detect different hardware.
    int has_far = far ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &has_far, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (rank == 0) {
        std::printf(has_far != 0 ? "The message lies on NUMA node %d, what is far on node %d.\n"
                                 : "One NUMA node in sight: nothing is far.\n",
                    nodes.empty() ? 0 : nodes.begin()->first, nodes.empty() ? 0 : nodes.rbegin()->first);
        std::printf("%-10s %5s %10s  %-6s %10s %7s\n", "writer", "blocks", "bytes", "place", "us", "times");
    }
    word round = 0;
    for (const std::unique_ptr<writer> &by : writers) {
        for (std::size_t bytes = 4096; bytes <= most; bytes *= 4) {
            std::vector<place> places = {{"after", std::nullopt, &message},
                                         {"same", 0, &message},
                                         {"next", bytes, &message},
                                         {"apart", bytes + gap, &message}};
            if (has_far != 0) {
                places.push_back({"far", 0, &*far});
            }
            send_beside(rank == 0 ? by.get() : nullptr, &told, message, places, bytes, round);
        }
    }
    if (rank == 0) {
        std::printf("Every word is right.\n");
    }
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    int ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int status = 0;
    try {
        if (ranks != 2) {
            throw std::invalid_argument("send_beside: " + std::to_string(ranks) + " ranks: must be 2");
        }
        const unsigned long long most = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1ULL << 16U;
        if (most < 4096 || most > 1ULL << 30U) {
            throw std::invalid_argument(std::string("send_beside: ") + argv[1] + " bytes: must be 4096 to 1073741824");
        }
        status = run(rank, most);
    } catch (const std::exception &e) {
        // A kernel may still wait for the thread that has failed. Destructors would then never return.
        std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return status;
}
