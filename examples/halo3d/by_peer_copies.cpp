// SPDX-License-Identifier: MIT OR Apache-2.0
#include "by_peer_copies.hpp"

#include <set>

namespace halo = mpgpu::halo;

namespace {

constexpr int enqueued = 27; // a tag that no message of by_mpi uses

} // namespace

by_peer_copies::by_peer_copies(const mpgpu::context &ctx, const halo::grid &g, part &mine,
                               const std::vector<int> &devices, peer_copies::lanes how)
    : how_(how), all_(messages_of(g, mine.rank, mine.vars.size())), copies_(mine.rank, mine.where.id(), all_, how) {
    const halo::copier copier = mine.code->copier();
    const halo::rank_arrays arrays = mine.arrays();
    for (std::size_t half = 0; half < 2; ++half) {
        pack_.at(half) =
            launches_of(ctx, copier, g, mine.rank, all_.sent, arrays, copies_.outbox(half), halo::direction::pack);
        unpack_.at(half) =
            launches_of(ctx, copier, g, mine.rank, all_.received, arrays, copies_.inbox(half), halo::direction::unpack);
    }

    std::vector<peer_copies::offer> offers(devices.size());
    const peer_copies::offer own = copies_.describe();
    MPI_Allgather(&own, static_cast<int>(sizeof(own)), MPI_BYTE, offers.data(), static_cast<int>(sizeof(own)), MPI_BYTE,
                  MPI_COMM_WORLD);
    std::vector<messages> theirs;
    theirs.reserve(offers.size());
    for (int rank = 0; rank < halo::rank_count(g); ++rank) {
        theirs.push_back(messages_of(g, rank, mine.vars.size()));
    }
    copies_.connect(offers, devices, theirs);

    std::set<int> neighbours; // each rank that sends to this one also receives from it
    for (const message &m : all_.sent) {
        neighbours.insert(m.rank);
    }
    neighbours.erase(mine.rank);
    for (const int rank : neighbours) {
        MPI_Send_init(nullptr, 0, MPI_BYTE, rank, enqueued, MPI_COMM_WORLD, &tell_.emplace_back(MPI_REQUEST_NULL));
        MPI_Recv_init(nullptr, 0, MPI_BYTE, rank, enqueued, MPI_COMM_WORLD, &listen_.emplace_back(MPI_REQUEST_NULL));
    }
}

by_peer_copies::~by_peer_copies() {
    for (std::vector<MPI_Request> *requests : {&tell_, &listen_}) {
        for (MPI_Request &request : *requests) {
            MPI_Request_free(&request);
        }
    }
}

void by_peer_copies::start(const mpgpu::stream &stream) {
    MPI_Startall(static_cast<int>(listen_.size()), listen_.data());
    copies_.send(stream, half_, pack_.at(half_));
    MPI_Startall(static_cast<int>(tell_.size()), tell_.data());
}

void by_peer_copies::finish(const mpgpu::stream &stream) {
    MPI_Waitall(static_cast<int>(listen_.size()), listen_.data(), MPI_STATUSES_IGNORE);
    copies_.receive(stream, half_, unpack_.at(half_));
    MPI_Waitall(static_cast<int>(tell_.size()), tell_.data(), MPI_STATUSES_IGNORE);
    half_ = 1 - half_;
}

void by_peer_copies::close() {
    MPI_Barrier(MPI_COMM_WORLD); // afterwards no rank copies to another
    copies_.disconnect();
    MPI_Barrier(MPI_COMM_WORLD); // afterwards no rank has memory of another open
}
