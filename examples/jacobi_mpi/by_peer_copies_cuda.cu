// SPDX-License-Identifier: MIT OR Apache-2.0
#include "exchanges.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

constexpr std::size_t up = 0; // direction to the rank above row 0
constexpr std::size_t down = 1;

/// One value for each of the two arrays.
template <class T> using both = std::array<T, 2>;
/// One value for each of the two directions in which a rank sends a row.
template <class T> using ways = std::array<T, 2>;

/// Handles by which other ranks open a rank's memory and events, as plain bytes.
struct offer {
    both<cudaIpcMemHandle_t> arrays;
    both<ways<cudaIpcEventHandle_t>> sent;
    int rows;
};

class by_peer_copies final : public exchange {
  public:
    explicit by_peer_copies(const rank_rows &own) : own_(own) {
        int rank = 0;
        int ranks = 0;
        MPI_Comm_rank(own.ranks, &rank);
        MPI_Comm_size(own.ranks, &ranks);
        check(cudaSetDevice(own.device), "cudaSetDevice");
        offer mine{};
        mine.rows = own.rows;
        check(cudaEventCreateWithFlags(&swept_, cudaEventDisableTiming), "cudaEventCreate");
        for (std::size_t parity = 0; parity < 2; ++parity) {
            check(cudaIpcGetMemHandle(&mine.arrays[parity], own.arrays[parity]), "cudaIpcGetMemHandle");
            for (std::size_t way : {up, down}) {
                check(cudaEventCreateWithFlags(&sent_[parity][way], cudaEventDisableTiming | cudaEventInterprocess),
                      "cudaEventCreate");
                check(cudaIpcGetEventHandle(&mine.sent[parity][way], sent_[parity][way]), "cudaIpcGetEventHandle");
            }
        }
        std::vector<offer> offers(static_cast<std::size_t>(ranks));
        MPI_Allgather(&mine, static_cast<int>(sizeof mine), MPI_BYTE, offers.data(), static_cast<int>(sizeof mine),
                      MPI_BYTE, own.ranks);

        for (std::size_t way : {up, down}) {
            check(cudaStreamCreateWithFlags(&lanes_[way], cudaStreamNonBlocking), "cudaStreamCreate");
            const int to = own.neighbours[way];
            const offer &theirs = offers[static_cast<std::size_t>(to)];
            for (std::size_t parity = 0; parity < 2; ++parity) {
                float *array = own.arrays[parity];
                if (to != rank) {
                    // With two ranks, the other rank is the neighbour on both sides, but its memory must be opened only
                    // once.
                    void *&opened = opened_[parity][to];
                    if (opened == nullptr) {
                        check(cudaIpcOpenMemHandle(&opened, theirs.arrays[parity], cudaIpcMemLazyEnablePeerAccess),
                              "cudaIpcOpenMemHandle");
                    }
                    array = static_cast<float *>(opened);
                }
                // A row that is sent upwards is written after the last row of the neighbour.
                targets_[parity][way] = array + (way == up ? static_cast<std::size_t>(theirs.rows + 1) * own.width : 0);
                arrived_[parity][way] = sent_[parity][1 - way];
                if (to != rank) {
                    // The neighbour sends its row to this rank in the opposite direction.
                    check(cudaIpcOpenEventHandle(&arrived_[parity][way], theirs.sent[parity][1 - way]),
                          "cudaIpcOpenEventHandle");
                }
            }
        }
        const auto [above, below] = own.neighbours;
        MPI_Send_init(nullptr, 0, MPI_BYTE, above, up, own.ranks, &tell_[up]);
        MPI_Send_init(nullptr, 0, MPI_BYTE, below, down, own.ranks, &tell_[down]);
        MPI_Recv_init(nullptr, 0, MPI_BYTE, above, down, own.ranks, &listen_[up]);
        MPI_Recv_init(nullptr, 0, MPI_BYTE, below, up, own.ranks, &listen_[down]);
    }

    ~by_peer_copies() override {
        cudaSetDevice(own_.device);
        for (std::size_t way : {up, down}) {
            cudaStreamSynchronize(lanes_[way]);
            cudaStreamDestroy(lanes_[way]);
            MPI_Request_free(&tell_[way]);
            MPI_Request_free(&listen_[way]);
        }
        MPI_Barrier(own_.ranks); // afterwards no rank copies to another
        for (auto &of_parity : opened_) {
            for (const auto &[rank, memory] : of_parity) {
                cudaIpcCloseMemHandle(memory);
            }
        }
        for (std::size_t parity = 0; parity < 2; ++parity) {
            for (std::size_t way : {up, down}) {
                if (arrived_[parity][way] != sent_[parity][1 - way]) {
                    cudaEventDestroy(arrived_[parity][way]);
                }
            }
        }
        MPI_Barrier(own_.ranks); // afterwards no rank has memory of another open
        for (auto &of_parity : sent_) {
            for (cudaEvent_t event : of_parity) {
                cudaEventDestroy(event);
            }
        }
        cudaEventDestroy(swept_);
    }

    void before_sweep(std::size_t /*device*/) override {
        if (!started_) {
            return;
        }
        // The events have now been recorded, so streams can wait for them.
        MPI_Waitall(2, listen_.data(), MPI_STATUSES_IGNORE);
        MPI_Waitall(2, tell_.data(), MPI_STATUSES_IGNORE);
        for (std::size_t way : {up, down}) {
            check(cudaStreamWaitEvent(own_.sweeps->get(), arrived_[parity_][way], 0), "cudaStreamWaitEvent");
        }
        started_ = false;
    }

    void start(std::size_t parity) override {
        check(cudaSetDevice(own_.device), "cudaSetDevice");
        MPI_Startall(2, listen_.data());
        check(cudaEventRecord(swept_, own_.sweeps->get()), "cudaEventRecord");
        for (std::size_t way : {up, down}) {
            check(cudaStreamWaitEvent(lanes_[way], swept_, 0), "cudaStreamWaitEvent");
            check(cudaMemcpyAsync(targets_[parity][way], own_.row(parity, way == up ? 1 : own_.rows),
                                  own_.width * sizeof(float), cudaMemcpyDefault, lanes_[way]),
                  "cudaMemcpyAsync");
            check(cudaEventRecord(sent_[parity][way], lanes_[way]), "cudaEventRecord");
        }
        MPI_Startall(2, tell_.data());
        parity_ = parity;
        started_ = true;
    }

    void finish() override {
        before_sweep(0);
        for (cudaStream_t lane : lanes_) {
            check(cudaStreamSynchronize(lane), "cudaStreamSynchronize");
        }
        own_.sweeps->synchronize();
    }

  private:
    rank_rows own_;
    cudaEvent_t swept_ = nullptr;
    ways<cudaStream_t> lanes_{};
    both<ways<cudaEvent_t>> sent_{};
    both<ways<cudaEvent_t>> arrived_{}; ///< events of received rows, by the direction in which they are sent
    both<ways<float *>> targets_{};
    both<std::map<int, void *>> opened_; ///< opened arrays of other ranks, by rank
    ways<MPI_Request> tell_{MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    ways<MPI_Request> listen_{MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    std::size_t parity_ = 0;
    bool started_ = false;
};

} // namespace

std::unique_ptr<exchange> exchange_by_peer_copies(const rank_rows &own) {
    return std::make_unique<by_peer_copies>(own);
}
