// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests halo exchanges and exchanges by index lists between processes, which are captured into a graph. After exchanges
// without capture, the graph is launched many times without waiting, and then exchanges without capture follow. Every
// cell of every rank is compared with an undivided mesh. With index lists, every received entry is checked. On GPUs
// (compiled by nvcc) a stream is captured. The host backend has no capture. There the answer of the library is replaced
// (ld --wrap), and the exchanges of a capture run one by one. Run by mpirun with any number of ranks.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_indexed.hpp>
#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

namespace halo = mpgpu::halo;
namespace reference = halo_reference;

#ifndef __CUDACC__
bool capturing = false;
#endif

} // namespace

#ifndef __CUDACC__
// The linker defines these names.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming,cert-dcl37-c,cert-dcl51-cpp)
extern "C" mp_status_t __real_mp_stream_get_info(mp_context_t context, mp_stream_t stream, int32_t *device,
                                                 int32_t *result);
extern "C" mp_status_t __wrap_mp_stream_get_info(mp_context_t context, mp_stream_t stream, int32_t *device,
                                                 int32_t *result) {
    const mp_status_t status = __real_mp_stream_get_info(context, stream, device, nullptr);
    if (result != nullptr) {
        *result = capturing ? 1 : 0;
    }
    return status;
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming,cert-dcl37-c,cert-dcl51-cpp)
#endif

namespace {

/// Captured function `exchange`, which enqueues exchanges in `stream`. On GPUs the graph can be launched in any stream.
class captured_exchange {
  public:
    captured_exchange(std::function<void()> exchange, const mpgpu::stream &stream) : exchange_(std::move(exchange)) {
#ifdef __CUDACC__
        const auto raw = reinterpret_cast<cudaStream_t>(stream.get());
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(raw, cudaStreamCaptureModeThreadLocal));
        try {
            exchange_();
        } catch (...) {
            static_cast<void>(cudaStreamEndCapture(raw, &graph));
            static_cast<void>(cudaGraphDestroy(graph));
            throw;
        }
        check(cudaStreamEndCapture(raw, &graph));
        check(cudaGraphInstantiate(&exec_, graph, 0));
        check(cudaGraphDestroy(graph));
#else
        static_cast<void>(stream);
#endif
    }
    captured_exchange(const captured_exchange &) = delete;
    captured_exchange(captured_exchange &&) = delete;
    captured_exchange &operator=(const captured_exchange &) = delete;
    captured_exchange &operator=(captured_exchange &&) = delete;
#ifdef __CUDACC__
    ~captured_exchange() {
        static_cast<void>(cudaGraphExecDestroy(exec_));
    }
#else
    ~captured_exchange() = default;
#endif

    void launch(const mpgpu::stream &stream) const {
#ifdef __CUDACC__
        check(cudaGraphLaunch(exec_, reinterpret_cast<cudaStream_t>(stream.get())));
#else
        static_cast<void>(stream);
        capturing = true;
        exchange_();
        capturing = false;
#endif
    }

  private:
#ifdef __CUDACC__
    static void check(cudaError_t code) {
        require(code == cudaSuccess, cudaGetErrorString(code));
    }
    cudaGraphExec_t exec_ = nullptr;
#endif
    std::function<void()> exchange_;
};

void run_cycles(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::grid &g,
                const std::vector<std::size_t> &sizes, std::uint64_t direct_pieces, bool pushed) {
    constexpr std::uint64_t before = 5;
    constexpr std::uint64_t launches = 40;
    constexpr std::uint64_t after = 5;
    std::vector<halo_test::part> sets; // arrays that are swapped
    sets.emplace_back(ctx, g, world_rank, sizes);
    sets.emplace_back(ctx, g, world_rank, sizes);
    const mpgpu::stream stream(ctx, sets[0].where());
    halo::options how = halo_test::options_for(ctx);
    how.direct_pieces = direct_pieces;
    how.pushed = pushed;
    halo::plan halo(ctx, node, g, sets[0].arrays(), how);
    halo.add(ctx, node, sets[1].arrays());
    std::string difference;
    const auto cycle = [&](std::uint64_t number, const auto &exchange) {
        for (const halo_test::part &mine : sets) {
            stream.launch_host([&mine, number] { mine.fill(number); });
            mine.upload(stream);
        }
        exchange();
        for (const halo_test::part &mine : sets) {
            mine.download(stream);
            stream.launch_host([&mine, &difference, number] {
                difference = difference.empty() ? mine.first_difference(number) : difference;
            });
        }
    };
    std::uint64_t number = 0;
    const auto plainly = [&] {
        halo.exchange(stream);
        halo.exchange(stream, 1);
    };
    while (number < before) {
        cycle(++number, plainly);
    }
    {
        const captured_exchange graph(plainly, stream);
        while (number < before + launches) {
            cycle(++number, [&] { graph.launch(stream); });
        }
        stream.synchronize();
    }
    while (number < before + launches + after) {
        cycle(++number, plainly);
    }
    stream.synchronize();
    require(difference.empty(), difference);
    halo.destroy();
}

constexpr std::size_t sent = 50;
constexpr std::size_t received = 100; // index of the first received entry

/// Returns the neighbours of this rank in a ring: it sends to the next rank and receives from the previous one.
std::vector<halo::index_neighbour> ring(int ranks) {
    const int next = (world_rank + 1) % ranks;
    const int previous = (world_rank + ranks - 1) % ranks;
    const halo::index_list sends = halo::index_list::range(0, sent);
    const halo::index_list receives = halo::index_list::range(received, sent);
    if (next == previous) {
        return {{next, sends, receives}};
    }
    return {{next, sends, {}}, {previous, {}, receives}};
}

/// Tests exchanges by index lists in a ring of ranks. A graph contains an exchange by one call, and one by
/// start and finish.
void run_indexed(const mpgpu::context &ctx, const mpgpu::mpi::node &node) {
    const int previous = (world_rank + node.size() - 1) % node.size();
    const mpgpu::device where = halo_test::device_of(ctx, world_rank);
    const mpgpu::stream stream(ctx, where);
    mpgpu::buffer<double> x(ctx, where, received + sent);
    mpgpu::buffer<double> here(ctx, mpgpu::device::host(), x.size());
    const mpgpu::plan up(ctx, {mpgpu::make_transfer(x, here)});
    const mpgpu::plan down(ctx, {mpgpu::make_transfer(here, x)});
    halo::index_options how;
#ifdef __CUDACC__
    if (!halo_test::on_host_backend(ctx)) {
        how.kernel = halo::cuda_indexed();
    }
#endif
    halo::indexed ex(ctx, node, where, x.size(), ring(node.size()), how);
    const auto value = [](int cycle, int rank, std::size_t i) {
        return cycle * 10000.0 + rank * 100.0 + static_cast<double>(i);
    };
    bool is_right = true;
    const auto cycle = [&](int number, const auto &exchange) {
        stream.launch_host([&here, value, number] {
            for (std::size_t i = 0; i < here.size(); ++i) {
                here.data()[i] = i < sent ? value(number, world_rank, i) : -1;
            }
        });
        up.enqueue(stream);
        exchange();
        down.enqueue(stream);
        stream.launch_host([&here, &is_right, value, number, previous] {
            for (std::size_t i = 0; i < sent; ++i) {
                is_right = is_right && here.data()[received + i] == value(number, previous, i);
            }
        });
    };
    const auto plainly = [&] {
        ex.exchange(stream, x);
        ex.start(stream, x);
        ex.finish(stream);
    };
    cycle(0, plainly);
    const captured_exchange graph(plainly, stream);
    for (int number = 1; number < 40; ++number) {
        cycle(number, [&] { graph.launch(stream); });
    }
    stream.synchronize();
    cycle(40, plainly);
    stream.synchronize();
    require(is_right, "an entry of a captured exchange by index lists is wrong");
    ex.destroy();
}

void run() {
    constexpr int problems = 8;
    constexpr std::uint64_t never_pack = std::numeric_limits<std::uint64_t>::max();
    const mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, {halo_test::device_of(ctx, world_rank)});
    if (halo_test::can_pack(ctx)) {
        run_indexed(ctx, node);
    }
    std::mt19937 random(20261122); // the same problems on all ranks
    for (int problem = 0; problem < problems; ++problem) {
        const auto [g, sizes] = reference::random_problem(random, node.size());
        const std::uint64_t form = problem % 3 == 0 ? 0 : problem % 3 == 1 ? 3 : never_pack;
        run_cycles(ctx, node, g, sizes, halo_test::can_pack(ctx) ? form : never_pack, false);
        if (halo_test::can_pack(ctx)) {
            run_cycles(ctx, node, g, sizes, 0, true);
        }
    }
    if (node.size() > 1) {
        // Each rank counts as a separate node here. MPI sends the messages between nodes, and a graph cannot contain
        // them.
        const mpgpu::mpi::node alone(ctx, MPI_COMM_WORLD, MPI_COMM_SELF);
        halo::grid g;
        g.cells = {8, 8 * std::int64_t{node.size()}, 1};
        g.ranks = {1, node.size(), 1};
        g.ghost = {1, 1, 0};
        const halo_test::part mine(ctx, g, world_rank, {8});
        const mpgpu::stream stream(ctx, mine.where());
        halo::options how = halo_test::options_for(ctx);
        how.direct_pieces = 0;
        if (halo_test::can_pack(ctx)) {
            halo::plan halo(ctx, alone, g, mine.arrays(), how);
            bool refused = false;
            try {
                captured_exchange([&] { halo.exchange(stream); }, stream).launch(stream);
            } catch (const mpgpu::not_supported &) {
                refused = true;
            }
            require(refused, "an exchange with ranks on other nodes cannot be captured, and says so");
            halo.destroy();
        }
    }
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_together(argc, argv, "every cell right", run);
}
