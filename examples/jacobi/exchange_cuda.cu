// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Halo exchange as a careful CUDA program without mpgpu makes it, with peer access enabled. Each halo row has its own
// stream on the source device, in which one cudaMemcpyPeerAsync copies the row after the sweep of that device (ordered
// by an event). The next sweep of a device waits only for the rows that the device receives.
#include "exchange_cuda.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace {

void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    }
}

/// CUDA event for which streams of other devices can wait. It is destroyed with this object.
class event {
  public:
    explicit event(int device) {
        check(cudaSetDevice(device), "cudaSetDevice");
        check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
    }
    event(event &&other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    event(const event &) = delete;
    event &operator=(const event &) = delete;
    event &operator=(event &&) = delete;
    ~event() {
        if (event_ != nullptr) {
            cudaEventDestroy(event_);
        }
    }
    void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
    void make_wait(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
    void synchronize() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }

  private:
    cudaEvent_t event_ = nullptr;
};

/// Non-blocking CUDA stream, which is not ordered with the default stream. It is destroyed with this object.
class stream {
  public:
    explicit stream(int device) {
        check(cudaSetDevice(device), "cudaSetDevice");
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    stream(stream &&other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
    stream(const stream &) = delete;
    stream &operator=(const stream &) = delete;
    stream &operator=(stream &&) = delete;
    ~stream() {
        if (stream_ != nullptr) {
            cudaStreamDestroy(stream_);
        }
    }
    [[nodiscard]] cudaStream_t get() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

/// Enables peer access, so that `device` can write into the memory of `peer`. If the hardware does not support this,
/// the driver copies through host memory.
void enable_access(int device, int peer) {
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
    if (can == 0) {
        return;
    }
    check(cudaSetDevice(device), "cudaSetDevice");
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
    if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError(); // clears the last error, which is expected here
        return;
    }
    check(enabled, "cudaDeviceEnablePeerAccess");
}

class by_plain_copies final : public exchange {
  public:
    explicit by_plain_copies(const halo_exchange &halos) : halos_(halos) {
        for (std::size_t device = 0; device < halos_.sweeps.size(); ++device) {
            swept_.emplace_back(static_cast<int>(device));
        }
        for (const mpgpu::transfer &copy : halos_.copies[0]) {
            if (copy.src_device != copy.dst_device) {
                enable_access(copy.src_device, copy.dst_device);
                enable_access(copy.dst_device, copy.src_device);
            }
            pushes_.push_back({stream(copy.src_device), event(copy.src_device)});
        }
    }

    ~by_plain_copies() override {
        for (const push &p : pushes_) {
            cudaStreamSynchronize(p.lane.get());
        }
    }

    void before_sweep(std::size_t device) override {
        for (std::size_t i = 0; i < pushes_.size(); ++i) {
            // The sweep waits only for rows that this device receives. The rows that it has sent have been read by
            // then: its neighbour sends its row only after a sweep, and that sweep has waited for them.
            if (halos_.copies[0][i].dst_device == static_cast<int>(device)) {
                pushes_[i].arrived.make_wait(halos_.sweeps[device].get());
            }
        }
    }

    void start(std::size_t parity) override {
        for (std::size_t device = 0; device < swept_.size(); ++device) {
            swept_[device].record(halos_.sweeps[device].get());
        }
        for (std::size_t i = 0; i < pushes_.size(); ++i) {
            const mpgpu::transfer &copy = halos_.copies.at(parity)[i];
            push &p = pushes_[i];
            swept_[static_cast<std::size_t>(copy.src_device)].make_wait(p.lane.get());
            check(cudaMemcpyPeerAsync(copy.dst, copy.dst_device, copy.src, copy.src_device, copy.bytes, p.lane.get()),
                  "cudaMemcpyPeerAsync");
            p.arrived.record(p.lane.get());
        }
    }

    void finish() override {
        for (const push &p : pushes_) {
            p.arrived.synchronize();
        }
    }

  private:
    /// Copy of one halo row to a neighbour, which is the same in every iteration.
    struct push {
        stream lane;
        event arrived;
    };
    halo_exchange halos_;
    std::vector<event> swept_; // one for each device
    std::vector<push> pushes_; // one for each copy
};

} // namespace

std::unique_ptr<exchange> plain_exchange_on_gpus(const mpgpu::context & /*ctx*/, const halo_exchange &halos) {
    return std::make_unique<by_plain_copies>(halos);
}
