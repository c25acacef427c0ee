// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_EXCHANGE_HPP
#define MPGPU_EXAMPLES_JACOBI3D_EXCHANGE_HPP

#include "device_code.hpp"
#include "domain.hpp"

#include <mpgpu/message.hpp>
#include <mpgpu/mpgpu.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

/// One block that this process computes, on its device.
struct part {
    part(const mpgpu::context &ctx, mpgpu::device on, const division &whole, int own_number);

    block where;
    int number;
    mpgpu::stream stream;
    std::array<mpgpu::buffer<double>, 2> values; ///< two arrays that alternate as old and new values
    std::size_t now = 0;                         ///< index of the array with the old values
    mpgpu::buffer<double> sent;                  ///< cells of all faces with neighbours, one face after the other
    mpgpu::buffer<double> received;              ///< cells received for the same faces
};

/// Range of cells that a face occupies in `sent` and in `received` of its part.
struct face_place {
    std::size_t first;
    std::size_t cells; ///< number of cells; 0 if the face has no neighbour
};
std::array<face_place, faces> places_of(const block &b);

/// Returns the tag of the message that carries a face of a block.
inline std::uint64_t tag_of(int block_number, int face) {
    return static_cast<std::uint64_t>(block_number) * faces + static_cast<std::uint64_t>(face);
}

/// Sends and receives faces between blocks as messages of mpgpu. Blocks of one process use messages too.
struct face_messages {
    using request = mpgpu::message_request;
    static constexpr bool follow_streams = true;

    const mpgpu::messenger &messenger;
    const division &whole;
    int blocks_each; ///< number of blocks of each rank

    /// Sends or receives a face, after earlier work in the part's stream. The host or a stream may wait for the
    /// returned request.
    [[nodiscard]] mpgpu::message_request send(const part &from, int face, mpgpu::device_span<const double> cells) const;
    [[nodiscard]] mpgpu::message_request receive(const part &to, int face, mpgpu::device_span<double> cells) const;
};

/// Method of halo exchange for the time loop.
class exchange {
  public:
    exchange() = default;
    exchange(const exchange &) = delete;
    exchange(exchange &&) = delete;
    exchange &operator=(const exchange &) = delete;
    exchange &operator=(exchange &&) = delete;
    virtual ~exchange() = default;

    /// Fills the ghost cells of all parts with the values of their neighbours. Later work in the stream of a part uses
    /// the new values. Some methods make the host wait.
    virtual void run(std::vector<part> &parts) = 0;
};

/// Creates an exchange that copies faces to host memory, sends them from there, and copies the received faces to the
/// device.
std::unique_ptr<exchange> through_host_memory(const mpgpu::context &ctx, const face_messages &messages,
                                              std::vector<part> &parts);
#ifdef JACOBI3D_MPI
/// Creates an exchange that sends faces by MPI: from device memory, or, if `staged` is true, from host memory.
std::unique_ptr<exchange> by_mpi(const mpgpu::context &ctx, const division &whole, int blocks_each,
                                 std::vector<part> &parts, bool staged);
#endif
/// Creates an exchange that sends faces directly between device memories. The host waits only for messages of earlier
/// iterations, so it stays ahead of the devices.
std::unique_ptr<exchange> from_device_memory(const face_messages &messages, const std::vector<part> &parts);

#endif // MPGPU_EXAMPLES_JACOBI3D_EXCHANGE_HPP
