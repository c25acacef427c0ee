// SPDX-License-Identifier: MIT OR Apache-2.0
#include "peer_copies_cuda.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == 64 && sizeof(cudaIpcEventHandle_t) == 64);

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

template <class Handle> std::array<unsigned char, 64> bytes_of(const Handle &handle) {
    std::array<unsigned char, 64> bytes{};
    std::memcpy(bytes.data(), &handle, sizeof(handle));
    return bytes;
}

template <class Handle> Handle handle_of(const std::array<unsigned char, 64> &bytes) {
    Handle handle{};
    std::memcpy(&handle, bytes.data(), sizeof(handle));
    return handle;
}

/// Returns the size in bytes of one of the two halves of a buffer. Buffers are whole 2 MiB blocks, because a handle of
/// CUDA IPC gives access to everything else in such a block of the driver.
std::size_t half_bytes(std::uint64_t bytes) {
    constexpr std::uint64_t block = 2U << 20U;
    return std::max<std::uint64_t>((bytes + block - 1) / block, 1) * block;
}

/// Events for each of the two halves of the buffers, by the tag of the message.
using events = std::array<std::array<cudaEvent_t, peer_copies::tags>, 2>;

void destroy(events &all) {
    for (auto &half : all) {
        for (cudaEvent_t &event : half) {
            if (event != nullptr) {
                cudaEventDestroy(std::exchange(event, nullptr));
            }
        }
    }
}

} // namespace

struct peer_copies::state {
    state(int rank_of, int device_of, const messages &messages_of, lanes enqueue)
        : rank(rank_of), device(device_of), all(messages_of), how(enqueue) {}

    int rank;
    int device;
    messages all;
    lanes how;
    std::byte *outbox = nullptr;
    std::byte *inbox = nullptr;
    events packed{};                  ///< end of packing; used if each message has its own stream
    events sent{};                    ///< events that are recorded after the copy of each sent message
    events arrived{};                 ///< opened events of the senders of received messages
    std::vector<cudaStream_t> own;    ///< one stream for each sent message, or no streams
    std::map<int, std::byte *> there; ///< opened inboxes of other ranks, by rank
    /// Destination of a message: a device, and an address in each of the two halves.
    struct target {
        int device;
        std::array<std::byte *, 2> at;
    };
    std::vector<target> targets;
};

peer_copies::peer_copies(int rank, int device, const messages &all, lanes how)
    : state_(std::make_unique<state>(rank, device, all, how)) {
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaMalloc(reinterpret_cast<void **>(&state_->outbox), 2 * half_bytes(all.outbox_bytes)), "cudaMalloc");
    check(cudaMalloc(reinterpret_cast<void **>(&state_->inbox), 2 * half_bytes(all.inbox_bytes)), "cudaMalloc");
    for (const message &m : all.sent) {
        const auto tag = static_cast<std::size_t>(m.tag);
        for (std::size_t half = 0; half < 2; ++half) {
            check(cudaEventCreateWithFlags(&state_->sent[half][tag], cudaEventDisableTiming | cudaEventInterprocess),
                  "cudaEventCreate");
            if (how == lanes::each) {
                check(cudaEventCreateWithFlags(&state_->packed[half][tag], cudaEventDisableTiming), "cudaEventCreate");
            }
        }
        if (how == lanes::each) {
            check(cudaStreamCreateWithFlags(&state_->own.emplace_back(nullptr), cudaStreamNonBlocking),
                  "cudaStreamCreate");
        }
    }
}

peer_copies::~peer_copies() {
    cudaSetDevice(state_->device);
    for (cudaStream_t stream : state_->own) {
        cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
    }
    destroy(state_->packed);
    destroy(state_->sent);
    cudaFree(state_->outbox);
    cudaFree(state_->inbox);
}

std::byte *peer_copies::outbox(std::size_t half) const {
    return state_->outbox + half * half_bytes(state_->all.outbox_bytes);
}
std::byte *peer_copies::inbox(std::size_t half) const {
    return state_->inbox + half * half_bytes(state_->all.inbox_bytes);
}

peer_copies::offer peer_copies::describe() const {
    check(cudaSetDevice(state_->device), "cudaSetDevice");
    offer made{};
    cudaIpcMemHandle_t memory{};
    check(cudaIpcGetMemHandle(&memory, state_->inbox), "cudaIpcGetMemHandle");
    made.inbox = bytes_of(memory);
    for (const message &m : state_->all.sent) {
        const auto tag = static_cast<std::size_t>(m.tag);
        for (std::size_t half = 0; half < 2; ++half) {
            cudaIpcEventHandle_t event{};
            check(cudaIpcGetEventHandle(&event, state_->sent[half][tag]), "cudaIpcGetEventHandle");
            made.arrived[half][tag] = bytes_of(event);
        }
    }
    return made;
}

void peer_copies::connect(const std::vector<offer> &offers, const std::vector<int> &devices,
                          const std::vector<messages> &theirs) {
    check(cudaSetDevice(state_->device), "cudaSetDevice");
    for (const message &m : state_->all.sent) {
        const auto peer = static_cast<std::size_t>(m.rank);
        if (m.rank != state_->rank && state_->there.count(m.rank) == 0) {
            void *opened = nullptr;
            check(cudaIpcOpenMemHandle(&opened, handle_of<cudaIpcMemHandle_t>(offers[peer].inbox),
                                       cudaIpcMemLazyEnablePeerAccess),
                  "cudaIpcOpenMemHandle");
            state_->there[m.rank] = static_cast<std::byte *>(opened);
        }
        std::byte *const whole = m.rank == state_->rank ? state_->inbox : state_->there[m.rank];
        const auto &received = theirs[peer].received;
        const auto same = std::find_if(received.begin(), received.end(),
                                       [&](const message &r) { return r.tag == m.tag && r.rank == state_->rank; });
        if (same == received.end()) {
            throw std::runtime_error("rank " + std::to_string(m.rank) + " does not expect message " +
                                     std::to_string(m.tag) + " of rank " + std::to_string(state_->rank));
        }
        std::byte *const at = whole + same->offset;
        state_->targets.push_back({devices[peer], {at, at + half_bytes(theirs[peer].inbox_bytes)}});
    }
    for (const message &m : state_->all.received) {
        const auto tag = static_cast<std::size_t>(m.tag);
        for (std::size_t half = 0; half < 2 && m.rank != state_->rank; ++half) {
            const auto &bytes = offers[static_cast<std::size_t>(m.rank)].arrived[half][tag];
            check(cudaIpcOpenEventHandle(&state_->arrived[half][tag], handle_of<cudaIpcEventHandle_t>(bytes)),
                  "cudaIpcOpenEventHandle");
        }
    }
}

void peer_copies::disconnect() {
    check(cudaSetDevice(state_->device), "cudaSetDevice");
    destroy(state_->arrived);
    for (const auto &[rank, memory] : state_->there) {
        check(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle");
    }
    state_->there.clear();
}

void peer_copies::send(mpgpu::stream_view stream, std::size_t half,
                       const std::vector<mpgpu::halo::launch_function> &pack) {
    check(cudaSetDevice(state_->device), "cudaSetDevice");
    for (std::size_t i = 0; i < pack.size(); ++i) {
        const message &m = state_->all.sent[i];
        const auto tag = static_cast<std::size_t>(m.tag);
        const state::target &to = state_->targets[i];
        cudaStream_t lane = stream.get();
        pack[i](stream);
        if (state_->how == lanes::each) {
            lane = state_->own[i];
            check(cudaEventRecord(state_->packed[half][tag], stream.get()), "cudaEventRecord");
            check(cudaStreamWaitEvent(lane, state_->packed[half][tag], 0), "cudaStreamWaitEvent");
        }
        check(cudaMemcpyPeerAsync(to.at[half], to.device, outbox(half) + m.offset, state_->device, m.bytes, lane),
              "cudaMemcpyPeerAsync");
        check(cudaEventRecord(state_->sent[half][tag], lane), "cudaEventRecord");
    }
}

void peer_copies::receive(mpgpu::stream_view stream, std::size_t half,
                          const std::vector<mpgpu::halo::launch_function> &unpack) {
    check(cudaSetDevice(state_->device), "cudaSetDevice");
    for (std::size_t i = 0; i < unpack.size(); ++i) {
        const message &m = state_->all.received[i];
        const auto tag = static_cast<std::size_t>(m.tag);
        const cudaEvent_t there = m.rank == state_->rank ? state_->sent[half][tag] : state_->arrived[half][tag];
        check(cudaStreamWaitEvent(stream.get(), there, 0), "cudaStreamWaitEvent");
        unpack[i](stream);
    }
}
