// SPDX-License-Identifier: MIT OR Apache-2.0
// Ranks that plan alone: a ring of processes, one for each GPU, in which every rank puts to its right neighbour in
// every step, with signals both ways as docs/guide/processes.md shows. Three plans of each put take turns: one path,
// what mp_plan chooses, and what it chooses when the host path is asked for by name. Prints GB/s of all ranks together,
// the median of the rounds and their spread; every byte of the last step is checked.
//   mpirun -n RANKS ring [MIB...]
#include <mpgpu/mpi.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace {

constexpr int rounds = 5;

struct kind {
    const char *name;
    mpgpu::plan_options options;
};

std::vector<kind> kinds() {
    std::vector<kind> all{{"one path", {}}, {"planned", {}}, {"with the host path", {}}};
    all[0].options.max_paths = 1;
    all[2].options.host_path = true;
    return all;
}

/// What a rank sends: other bytes for each rank.
void fill(const mpgpu::context &ctx, const mpgpu::stream &stream, mpgpu::device_span<std::byte> to, int rank) {
    mpgpu::buffer<std::byte> made(ctx, mpgpu::device::host(), to.size());
    for (std::size_t i = 0; i < made.size(); ++i) {
        made.data()[i] = static_cast<std::byte>((i * 7 + i / 4099 + static_cast<std::size_t>(rank) * 31) & 0xff);
    }
    mpgpu::plan(ctx, {mpgpu::make_transfer(to, mpgpu::device_span<std::byte>(made))}).enqueue(stream);
    stream.synchronize();
}

/// How many bytes differ from what `rank` sends.
std::size_t wrong(const mpgpu::context &ctx, const mpgpu::stream &stream, mpgpu::device_span<std::byte> got, int rank) {
    mpgpu::buffer<std::byte> here(ctx, mpgpu::device::host(), got.size());
    mpgpu::plan(ctx, {mpgpu::make_transfer(mpgpu::device_span<std::byte>(here), got)}).enqueue(stream);
    stream.synchronize();
    std::size_t count = 0;
    for (std::size_t i = 0; i < here.size(); ++i) {
        const auto sent = static_cast<std::byte>((i * 7 + i / 4099 + static_cast<std::size_t>(rank) * 31) & 0xff);
        count += here.data()[i] == sent ? 0 : 1;
    }
    return count;
}

int run(int count, char **sizes) {
    int rank = 0;
    int ranks = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    // Virtual devices show that the program is right, and nothing about GPUs.
    const char *backend = std::getenv("MPGPU_BACKEND");
    const bool is_virtual = backend != nullptr && std::string(backend) == "host";
    std::vector<std::size_t> mebibytes{1, 4, 16, 64, 128, 256, 512, 1024};
    if (is_virtual) {
        mebibytes = {1};
    }
    if (count > 0) {
        mebibytes.clear();
        for (int i = 0; i < count; ++i) {
            mebibytes.push_back(std::strtoull(sizes[i], nullptr, 10));
        }
    }
    const std::size_t most = *std::max_element(mebibytes.begin(), mebibytes.end()) << 20;
    mpgpu::context ctx;
    const mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);
    const mpgpu::device gpu = mpgpu::device::gpu(rank % ctx.devices().gpus);
    const mpgpu::stream stream(ctx, gpu);
    mpgpu::buffer<std::byte> source(ctx, gpu, most);
    mpgpu::buffer<std::byte> inbox(ctx, gpu, most);
    mpgpu::buffer<std::uint64_t> arrived(ctx, mpgpu::device::host(), 1);
    mpgpu::buffer<std::uint64_t> taken(ctx, mpgpu::device::host(), 1);
    arrived.data()[0] = 0;
    taken.data()[0] = 0;
    fill(ctx, stream, source, rank);
    auto inboxes = node.exchange(mpgpu::device_span<std::byte>(inbox));
    auto arrivals = node.exchange(mpgpu::device_span<std::uint64_t>(arrived));
    auto takings = node.exchange(mpgpu::device_span<std::uint64_t>(taken));
    const int right = (rank + 1) % ranks;
    const int left = (rank + ranks - 1) % ranks;
    if (inboxes.of(right) == nullptr) {
        std::fprintf(stderr, "rank %d: %s\n", rank, inboxes.why(right).c_str());
        return 1;
    }
    const std::vector<kind> all = kinds();
    std::uint64_t step = 0;
    std::size_t differ = 0;
    for (const std::size_t size : mebibytes) {
        const std::size_t bytes = size << 20;
        std::vector<mpgpu::plan> plans;
        for (const kind &one : all) {
            plans.emplace_back(ctx,
                               std::vector<mpgpu::transfer>{mpgpu::make_transfer(inboxes.of(right)->subspan(0, bytes),
                                                                                 source.subspan(0, bytes))},
                               one.options);
        }
        const int steps = is_virtual ? 3 : size >= 256 ? 20 : 60;
        std::array<std::vector<double>, 3> rates;
        for (int round = 0; round <= rounds; ++round) { // the first one warms up
            for (std::size_t k = 0; k < plans.size(); ++k) {
                stream.synchronize();
                MPI_Barrier(MPI_COMM_WORLD);
                const double started = MPI_Wtime();
                for (int i = 0; i < steps; ++i) {
                    ++step;
                    ctx.wait(stream, {{taken.data(), step - 1}});
                    plans[k].enqueue(stream);
                    ctx.raise(stream, {{arrivals.of(right)->data(), step}});
                    ctx.wait(stream, {{arrived.data(), step}});
                    ctx.raise(stream, {{takings.of(left)->data(), step}});
                }
                stream.synchronize();
                MPI_Barrier(MPI_COMM_WORLD);
                if (round > 0) {
                    rates[k].push_back(static_cast<double>(bytes) * ranks * steps / (MPI_Wtime() - started) / 1e9);
                }
            }
        }
        differ += wrong(ctx, stream, inbox.subspan(0, bytes), left);
        if (rank == 0) {
            std::printf("%d ranks, %4zu MiB each:", ranks, size);
            double one_path = 0;
            for (std::size_t k = 0; k < plans.size(); ++k) {
                std::sort(rates[k].begin(), rates[k].end());
                const double median = rates[k][rounds / 2];
                one_path = k == 0 ? median : one_path;
                std::printf("  %s %.1f GB/s (%.1f to %.1f), %.3f", all[k].name, median, rates[k].front(),
                            rates[k].back(), median / one_path);
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
    unsigned long long mine = differ;
    unsigned long long together = 0;
    MPI_Allreduce(&mine, &together, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        std::printf("%llu bytes wrong\n", together);
    }
    MPI_Barrier(MPI_COMM_WORLD); // nobody frees what another one still maps
    return together == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int status = 1;
    try {
        status = run(argc - 1, argv + 1);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "ring: %s\n", error.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return status;
}
