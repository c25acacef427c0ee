// SPDX-License-Identifier: MIT OR Apache-2.0
#include "waited_exchange.hpp"

#include <mpi.h>

namespace {

/// Sends and receives faces as MPI messages.
struct mpi_messages {
    class request {
      public:
        void synchronize() { MPI_Wait(&of_mpi, MPI_STATUS_IGNORE); }
        MPI_Request of_mpi = MPI_REQUEST_NULL;
    };

    static constexpr bool follow_streams = false;

    division whole;
    int blocks_each;

    [[nodiscard]] request send(const part &from, int face, mpgpu::device_span<const double> cells) const {
        const int to = whole.neighbour(from.number, face);
        request made;
        MPI_Isend(cells.data(), static_cast<int>(cells.size()), MPI_DOUBLE, to / blocks_each,
                  static_cast<int>(tag_of(to, opposite(face))), MPI_COMM_WORLD, &made.of_mpi);
        return made;
    }
    [[nodiscard]] request receive(const part &to, int face, mpgpu::device_span<double> cells) const {
        request made;
        MPI_Irecv(cells.data(), static_cast<int>(cells.size()), MPI_DOUBLE,
                  whole.neighbour(to.number, face) / blocks_each, static_cast<int>(tag_of(to.number, face)),
                  MPI_COMM_WORLD, &made.of_mpi);
        return made;
    }
};

} // namespace

std::unique_ptr<exchange> by_mpi(const mpgpu::context &ctx, const division &whole, int blocks_each,
                                 std::vector<part> &parts, bool staged) {
    return std::make_unique<waited_exchange<mpi_messages>>(ctx, mpi_messages{whole, blocks_each}, parts, staged);
}
