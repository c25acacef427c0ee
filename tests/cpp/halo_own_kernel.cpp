// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests a persistent Jacobi kernel. One launch makes many sweeps, and exchanges halo rows with ranks of other nodes by
// pack_and_tell and await_and_unpack. The host thread is free between its polls. Run by mpirun with 2 ranks or more,
// each of which counts as a node, on the host backend or, compiled by nvcc, on GPUs. Every cell is compared with an
// undivided mesh.
#include "halo_part.hpp"
#include "ranks.hpp"

#include <mpgpu/halo_mpi.hpp>

#include <mpi.h>

#ifdef __CUDACC__
#include <cooperative_groups.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

namespace {

using ranks_test::require;
using ranks_test::world_rank;

namespace halo = mpgpu::halo;

constexpr std::uint64_t sweeps = 5; // per launch
constexpr std::uint64_t launches = 8;
constexpr std::int64_t row_cells = 301;
constexpr std::int64_t rows = 7; // per rank

/// Rows of the mesh that belong to one rank, with a ghost row at each end. Values are integers, so that sums do not
/// depend on the order of additions.
struct mesh {
    std::uint64_t *now;
    std::uint64_t *next;
};

MPGPU_NOTIFY_BOTH std::uint64_t relaxed(const std::uint64_t *cells, std::int64_t at) {
    return cells[at - row_cells] + cells[at + row_cells] + cells[at - 1] + cells[at + 1];
}

/// Calls `cell` for all cells of the rows [first, end), except those of the first and the last column. The cells are
/// divided among all threads of the grid.
template <class Cell>
MPGPU_NOTIFY_BOTH void for_each(const mpgpu::notify_block &block, std::int64_t first, std::int64_t end,
                                const Cell &cell) {
    const std::int64_t stride = std::int64_t{block.blocks} * block.threads;
    for (std::int64_t i = std::int64_t{block.index} * block.threads + block.thread; i < (end - first) * row_cells;
         i += stride) {
        if (i % row_cells > 0 && i % row_cells < row_cells - 1) {
            cell(first * row_cells + i);
        }
    }
}

/// Runs one block of one launch. `together` is a barrier of all blocks.
template <class Together>
MPGPU_NOTIFY_BOTH void sweep(const mpgpu::notify_block &block, const halo::kernel_work &work, mesh m,
                             std::uint64_t exchange, const Together &together) {
    for (const std::uint64_t end = exchange + sweeps; exchange < end; ++exchange) {
        halo::pack_and_tell(block, work, exchange);
        const auto relax = [m](std::int64_t at) { m.next[at] = relaxed(m.now, at); };
        for_each(block, 2, rows, relax); // while messages are in progress
        if (!halo::await_and_unpack(block, work, exchange)) {
            return;
        }
        together();
        for_each(block, 1, 2, relax);
        for_each(block, rows, rows + 1, relax);
        if (!halo::await_sent(block, work, exchange)) {
            return;
        }
        together();
        for_each(block, 1, rows + 1, [m](std::int64_t at) { m.now[at] = m.next[at]; });
        together();
    }
}

#ifdef __CUDACC__
struct all_of_grid {
    __host__ __device__ void operator()() const {
#ifdef __CUDA_ARCH__
        cooperative_groups::this_grid().sync();
#endif
    }
};

__global__ void sweep_kernel(halo::kernel_work work, mesh m, std::uint64_t exchange) {
    sweep(mpgpu::notify_block::current(), work, m, exchange, all_of_grid());
}
#endif

/// Barrier of blocks that run as CPU threads.
struct all_of_threads {
    std::uint32_t *arrived;
    std::uint64_t *round;
    std::uint32_t blocks;

    MPGPU_NOTIFY_BOTH void operator()() const {
        const std::uint64_t next = mpgpu::detail::load<mpgpu::detail::reach::device>(round) + 1;
        if (mpgpu::detail::is_last(arrived, blocks)) {
            mpgpu::detail::store<mpgpu::detail::reach::device>(round, next);
        }
        static_cast<void>(mpgpu::detail::poll<mpgpu::detail::reach::device>(round, next));
    }
};

/// Runs the kernel as CPU threads, for memory that the CPU can access.
void sweep_by_threads(const halo::kernel_work &work, mesh m, std::uint64_t exchange) {
    constexpr std::uint32_t blocks = 3;
    std::uint32_t arrived = 0;
    std::uint64_t round = 0;
    const all_of_threads together = {&arrived, &round, blocks};
    std::vector<std::thread> grid;
    for (std::uint32_t index = 0; index < blocks; ++index) {
        grid.emplace_back([&, index] { sweep({index, blocks, 0, 1}, work, m, exchange, together); });
    }
    for (std::thread &block : grid) {
        block.join();
    }
}

/// Returns the kernel in the form in which the halo exchange launches it: for every `sweeps`-th exchange.
halo::persistent_copier kernel_of(const mpgpu::context &ctx, mesh m) {
    const auto is_first = [](std::uint64_t exchange) { return (exchange - 1) % sweeps == 0; };
#ifdef __CUDACC__
    if (!halo_test::on_host_backend(ctx)) {
        return halo::cuda_own_kernel(
            [m, is_first](mpgpu::stream_view stream, halo::kernel_work work, std::uint64_t exchange) {
                mesh arrays = m;
                void *arguments[] = {&work, &arrays, &exchange};
                if (is_first(exchange)) {
                    halo::detail::check_cuda(cudaLaunchCooperativeKernel(reinterpret_cast<const void *>(&sweep_kernel),
                                                                         dim3(4), dim3(256), arguments, 0,
                                                                         static_cast<cudaStream_t>(stream.get())),
                                             "cudaLaunchCooperativeKernel");
                }
            });
    }
#endif
    return halo::own_kernel(
        [&ctx, m, is_first](mpgpu::stream_view stream, const halo::kernel_work &work, std::uint64_t exchange) {
            if (is_first(exchange)) {
                ctx.launch_host(stream, [work, m, exchange] { sweep_by_threads(work, m, exchange); });
            }
        });
}

/// Computes the same sweeps on the undivided mesh and returns the cells. The mesh is periodic: the last row is above
/// the first.
std::vector<std::uint64_t> expected(std::vector<std::uint64_t> cells, std::uint64_t times) {
    const auto all = static_cast<std::int64_t>(cells.size());
    for (std::uint64_t i = 0; i < times; ++i) {
        std::vector<std::uint64_t> around(cells.end() - row_cells, cells.end());
        around.insert(around.end(), cells.begin(), cells.end());
        around.insert(around.end(), cells.begin(), cells.begin() + row_cells);
        for (std::int64_t at = 0; at < all; ++at) {
            if (at % row_cells > 0 && at % row_cells < row_cells - 1) {
                cells[static_cast<std::size_t>(at)] = relaxed(around.data(), at + row_cells);
            }
        }
    }
    return cells;
}

void run_by(const mpgpu::context &ctx, const mpgpu::mpi::node &node, halo::progress_by who, halo::mpi_memory memory) {
    halo::grid g;
    g.cells = {row_cells, rows * node.communicator_size(), 1};
    g.ranks = {1, node.communicator_size(), 1};
    g.periodic = {false, true, false};
    g.ghost = {0, 1, 0};
    constexpr auto own = static_cast<std::size_t>(rows * row_cells);
    std::vector<std::uint64_t> whole(own * static_cast<std::size_t>(node.communicator_size()));
    for (std::size_t i = 0; i < whole.size(); ++i) {
        whole[i] = i * i % 1009;
    }

    const mpgpu::device where = halo_test::device_of(ctx, world_rank);
    constexpr auto ghosts = static_cast<std::size_t>(2 * row_cells);
    mpgpu::buffer<std::uint64_t> now(ctx, where, own + ghosts);
    mpgpu::buffer<std::uint64_t> next(ctx, where, own + ghosts);
    mpgpu::buffer<std::uint64_t> host(ctx, mpgpu::device::host(), own + ghosts);
    const mpgpu::stream stream(ctx, where);
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(own) * world_rank;
    std::fill_n(host.data(), host.size(), 0);
    std::copy_n(begin, own, host.data() + row_cells);
    mpgpu::plan(ctx, {mpgpu::make_transfer(now, host)}).execute(stream).synchronize();

    halo::options how = halo_test::options_for(ctx);
    how.direct_pieces = 0;
    how.between_nodes = memory;
    how.progress = who;
    how.persistent = halo::persistent_form::all_blocks;
    how.persistent_copy = kernel_of(ctx, {now.data(), next.data()});
    halo::plan exchange(ctx, node, g, {halo::array_of(now)}, how);
    for (std::uint64_t i = 0; i < launches * sweeps; ++i) {
        exchange.start(stream);
        halo::exchange_progress before;
        while (who == halo::progress_by::caller) {
            const halo::exchange_progress at = exchange.progress();
            if (at.to_send == 0 || at.is_done()) {
                require(at.is_done() && at.packed == at.to_send, "what is done was packed");
                break;
            }
            require(at.packed >= at.sent && at.packed >= before.packed && at.received >= before.received,
                    "messages are sent when they are packed, and nothing is undone");
            before = at;
        }
        exchange.finish(stream);
        require(exchange.progress().is_done(), "an exchange that was finished has nothing left");
    }
    mpgpu::plan(ctx, {mpgpu::make_transfer(host, now)}).execute(stream).synchronize();
    const std::vector<std::uint64_t> right = expected(whole, launches * sweeps);
    require(std::equal(host.data() + row_cells, host.data() + row_cells + own,
                       right.begin() + static_cast<std::ptrdiff_t>(own) * world_rank),
            "every cell is as in a mesh of one piece");
    exchange.destroy();
}

void run() {
    const mpgpu::context ctx;
    halo_test::select_device(ctx, world_rank);
    MPI_Comm alone = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank, 0, &alone);
    {
        const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD, alone, {halo_test::device_of(ctx, world_rank)});
        for (const halo::mpi_memory memory : {halo::mpi_memory::automatic, halo::mpi_memory::staged}) {
            for (const halo::progress_by who :
                 {halo::progress_by::start, halo::progress_by::caller, halo::progress_by::thread}) {
                run_by(ctx, node, who, memory);
            }
        }
    }
    MPI_Comm_free(&alone);
}

} // namespace

int main(int argc, char *argv[]) {
    return ranks_test::run_together(argc, argv, "every cell right", run);
}
