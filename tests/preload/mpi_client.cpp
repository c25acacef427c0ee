// Program of two MPI ranks that send memory of their GPUs to each other and do not use mpgpu. Every byte is checked,
// and a buffer is overwritten as soon as MPI permits it. An argument is the number of repetitions of the largest
// messages.
#include "driver.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mpi.h>
#include <random>
#include <vector>

namespace {

int rank;

void check(bool holds, const char *what, std::size_t bytes = 0) {
    if (!holds) {
        std::fprintf(stderr, "rank %d: not so: %s (%zu bytes)\n", rank, what, bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/// Memory of this rank's GPU for one message.
class buffer {
  public:
    explicit buffer(std::size_t bytes) : bytes_(bytes) {
        check(cuMemAlloc_v2(&address_, bytes) == 0, "memory of a GPU", bytes);
        clear();
    }
    ~buffer() { cuMemFree_v2(address_); }
    buffer(const buffer &) = delete;
    buffer(buffer &&) = delete;
    buffer &operator=(const buffer &) = delete;
    buffer &operator=(buffer &&) = delete;

    void send(int number, MPI_Request *request) {
        std::memcpy(data(), message(rank, number).data(), bytes_);
        check(MPI_Isend(data(), count(), MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, request) == 0, "it is sent", bytes_);
    }
    void receive(MPI_Request *request) {
        check(MPI_Irecv(data(), count(), MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, request) == 0, "it comes", bytes_);
    }
    void clear() { std::memset(data(), 0, bytes_); }
    /// Checks that the buffer contains the message with this number from the other rank.
    void expect(int number) {
        check(std::memcmp(data(), message(1 - rank, number).data(), bytes_) == 0, "its bytes arrive", bytes_);
    }

  private:
    [[nodiscard]] int count() const { return static_cast<int>(bytes_); }
    // The memory of the fake GPU is host memory.
    [[nodiscard]] char *data() const { return reinterpret_cast<char *>(address_); } // NOLINT(performance-no-int-to-ptr)
    [[nodiscard]] std::vector<std::uint32_t> message(int from, int number) const {
        std::vector<std::uint32_t> made(bytes_ / 4 + 1);
        std::minstd_rand random(static_cast<unsigned>(2 * number + from + 1));
        for (std::uint32_t &word : made) {
            word = static_cast<std::uint32_t>(random());
        }
        return made;
    }

    std::size_t bytes_;
    CUdeviceptr address_ = 0;
};

void wait(MPI_Request &request) {
    check(MPI_Wait(&request, MPI_STATUS_IGNORE) == 0, "it ends well");
}

/// Sends a message from one rank to the other and back.
void one_after_the_other(std::size_t bytes) {
    for (const int from : {0, 1}) {
        buffer memory(bytes);
        MPI_Request request = MPI_REQUEST_NULL;
        if (rank == from) {
            memory.send(from, &request);
            wait(request);
            memory.clear();
        } else {
            memory.receive(&request);
            wait(request);
            memory.expect(from);
        }
    }
}

/// Sends several messages at once in both directions. They must arrive in order.
void at_once(std::size_t bytes) {
    std::array<buffer, 3> out{buffer(bytes), buffer(bytes), buffer(bytes)};
    std::array<buffer, 3> in{buffer(bytes), buffer(bytes), buffer(bytes)};
    std::array<MPI_Request, 3> sends{};
    std::array<MPI_Request, 3> receives{};
    for (std::size_t i = 0; i < out.size(); ++i) {
        in.at(i).receive(&receives.at(i));
        out.at(i).send(static_cast<int>(i), &sends.at(i));
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
        wait(sends.at(i));
        out.at(i).clear();
        wait(receives.at(i));
        in.at(i).expect(static_cast<int>(i));
    }
}

} // namespace

int main(int count, char **arguments) {
    // Each rank selects a GPU before it initialises MPI, which is common. Open MPI and MPICH pass the rank in
    // environment variables.
    const char *text = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    text = text != nullptr ? text : std::getenv("MPI_LOCALRANKID");
    const int gpu = text != nullptr ? std::atoi(text) : -1;
    CUcontext context = nullptr;
    const bool has_gpu =
        cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, gpu) == 0 && cuCtxSetCurrent(context) == 0;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    check(has_gpu && gpu == rank, "a GPU for each rank");
    constexpr std::size_t large = std::size_t{1} << 20;
    int messages = 0;
    int large_messages = 0;
    std::size_t large_bytes = 0;
    for (const std::size_t bytes : {std::size_t{8}, std::size_t{100}, large / 256, large / 16, large - 1, large,
                                    3 * large + 13, 8 * large, 32 * large}) {
        one_after_the_other(bytes);
        at_once(bytes);
        messages += 8;
        large_messages += bytes < large ? 0 : 8;
        large_bytes += bytes < large ? 0 : 8 * bytes;
    }
    // Several repetitions are needed, because copies are accelerated only once the first plans exist.
    const int turns = count > 1 ? std::atoi(arguments[1]) : 0;
    for (int turn = 0; turn < turns; ++turn) {
        one_after_the_other(32 * large);
        messages += 2;
        large_messages += 2;
        large_bytes += 64 * large;
    }
    MPI_Finalize();
    if (rank == 0) {
        std::printf("mpi client: %d messages, %d of them large, of %zu bytes\n", messages, large_messages, large_bytes);
    }
    return 0;
}
