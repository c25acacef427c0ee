// SPDX-License-Identifier: MIT OR Apache-2.0
#include "exchanges.hpp"

namespace {

class by_mpi final : public exchange {
  public:
    explicit by_mpi(const rank_rows &own) : own_(own) {}

    void before_sweep(std::size_t /*device*/) override { finish(); }

    void start(std::size_t parity) override {
        const auto count = static_cast<int>(own_.width);
        const auto [above, below] = own_.neighbours;
        // The tag is the direction of the row, because with two ranks the other rank is the neighbour on both sides.
        MPI_Irecv(own_.row(parity, 0), count, MPI_FLOAT, above, down, own_.ranks, &under_way_[0]);
        MPI_Irecv(own_.row(parity, own_.rows + 1), count, MPI_FLOAT, below, up, own_.ranks, &under_way_[1]);
        own_.sweeps->synchronize();
        MPI_Isend(own_.row(parity, 1), count, MPI_FLOAT, above, up, own_.ranks, &under_way_[2]);
        MPI_Isend(own_.row(parity, own_.rows), count, MPI_FLOAT, below, down, own_.ranks, &under_way_[3]);
    }

    void finish() override { MPI_Waitall(static_cast<int>(under_way_.size()), under_way_.data(), MPI_STATUSES_IGNORE); }

  private:
    static constexpr int up = 0;
    static constexpr int down = 1;
    rank_rows own_;
    std::array<MPI_Request, 4> under_way_{MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL};
};

} // namespace

std::unique_ptr<exchange> exchange_by_mpi(const rank_rows &own) {
    return std::make_unique<by_mpi>(own);
}
