// A program of two ranks that knows nothing of mpgpu: sends device memory by MPI, which for UCX is memory of another
// process, copied by the driver. On the fake driver, whose GPUs' memory the CPU sees. Every byte is compared.
#include "driver.hpp"

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr std::size_t largest = std::size_t{32} << 20;

void check(bool holds, const char *what, std::size_t bytes = 0) {
    if (!holds) {
        std::printf("mpi_client: not so: %s (%zu bytes)\n", what, bytes);
        std::fflush(stdout);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

std::vector<char> content(std::size_t bytes, unsigned seed) {
    std::vector<char> made(bytes);
    std::minstd_rand random(seed + 1);
    for (char &byte : made) {
        byte = static_cast<char>(random());
    }
    return made;
}

CUdeviceptr on_gpu(CUdevice gpu) {
    CUcontext context = nullptr;
    CUdeviceptr address = 0;
    check(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, gpu) == 0 && cuCtxSetCurrent(context) == 0, "a context");
    check(cuMemAlloc_v2(&address, largest) == 0, "memory of a GPU");
    return address;
}

} // namespace

int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const CUdeviceptr address = on_gpu(rank);
    char *memory = reinterpret_cast<char *>(address); // NOLINT(performance-no-int-to-ptr): the fake GPU's memory
    unsigned seed = 0;
    // The last size again and again: copies are taken once a plan is there.
    std::vector<std::size_t> sizes{8, 4096, std::size_t{1} << 20, largest - 1};
    sizes.insert(sizes.end(), 40, largest);
    for (const std::size_t bytes : sizes) {
        const std::vector<char> sent = content(bytes, ++seed);
        if (rank == 0) {
            std::memcpy(memory, sent.data(), bytes);
            MPI_Send(memory, static_cast<int>(bytes), MPI_CHAR, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(memory, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(memory, static_cast<int>(bytes), MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            check(std::memcmp(memory, sent.data(), bytes) == 0, "what is received is what was sent", bytes);
            MPI_Send(memory, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
        }
    }
    MPI_Finalize();
    if (rank == 1) {
        std::printf("mpi_client: every byte is right\n");
    }
    return 0;
}
