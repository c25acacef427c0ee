// SPDX-License-Identifier: MIT OR Apache-2.0
#include "by_mpi.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace halo = mpgpu::halo;

by_mpi::by_mpi(const mpgpu::context &ctx, const halo::grid &g, part &mine)
    : all_(messages_of(g, mine.rank, mine.vars.size())), halves_{make_half(ctx, g, mine), make_half(ctx, g, mine)} {}

by_mpi::half by_mpi::make_half(const mpgpu::context &ctx, const halo::grid &g, part &mine) const {
    const halo::copier copier = mine.code->copier();
    const halo::rank_arrays arrays = mine.arrays();
    half made{mpgpu::memory(ctx, mine.where, all_.outbox_bytes),
              mpgpu::memory(ctx, mine.where, all_.inbox_bytes),
              {},
              {},
              {},
              {}};
    const auto count = [](const message &m) {
        if (m.bytes > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
            throw std::runtime_error("a message of " + std::to_string(m.bytes) + " bytes: MPI counts up to 2^31 - 1");
        }
        return static_cast<int>(m.bytes);
    };
    std::vector<halo::piece> packed;
    std::vector<halo::piece> unpacked;
    const auto add = [&](std::vector<halo::piece> &pieces, const message &m, std::byte *message_bytes) {
        const std::vector<halo::piece> more = pieces_of(g, mine.rank, m, arrays, message_bytes);
        pieces.insert(pieces.end(), more.begin(), more.end());
    };
    for (const message &m : all_.received) {
        std::byte *const at = made.inbox.data() + m.offset;
        add(unpacked, m, at);
        if (m.rank != mine.rank) {
            MPI_Recv_init(at, count(m), MPI_BYTE, m.rank, m.tag, MPI_COMM_WORLD,
                          &made.receives.emplace_back(MPI_REQUEST_NULL));
            continue;
        }
        // The kernel packs a message to this rank where it is unpacked from. Each that is received is sent, too.
        const auto sent = std::find_if(all_.sent.begin(), all_.sent.end(), [&](const message &other) {
            return other.rank == mine.rank && other.tag == m.tag;
        });
        add(packed, *sent, at);
    }
    for (const message &m : all_.sent) {
        if (m.rank != mine.rank) {
            std::byte *const at = made.outbox.data() + m.offset;
            add(packed, m, at);
            MPI_Send_init(at, count(m), MPI_BYTE, m.rank, m.tag, MPI_COMM_WORLD,
                          &made.sends.emplace_back(MPI_REQUEST_NULL));
        }
    }
    made.pack = copier(ctx, mine.where, packed, halo::direction::pack);
    made.unpack = copier(ctx, mine.where, unpacked, halo::direction::unpack);
    return made;
}

by_mpi::~by_mpi() {
    for (half &h : halves_) {
        for (std::vector<MPI_Request> *requests : {&h.sends, &h.receives}) {
            for (MPI_Request &request : *requests) {
                MPI_Request_free(&request);
            }
        }
    }
}

void by_mpi::start(const mpgpu::stream &stream) {
    half &h = halves_.at(now_);
    MPI_Startall(static_cast<int>(h.receives.size()), h.receives.data());
    h.pack(stream);
    stream.synchronize();
    MPI_Startall(static_cast<int>(h.sends.size()), h.sends.data());
}

void by_mpi::finish(const mpgpu::stream &stream) {
    half &h = halves_.at(now_);
    MPI_Waitall(static_cast<int>(h.receives.size()), h.receives.data(), MPI_STATUSES_IGNORE);
    h.unpack(stream);
    MPI_Waitall(static_cast<int>(h.sends.size()), h.sends.data(), MPI_STATUSES_IGNORE);
    now_ = 1 - now_;
}
