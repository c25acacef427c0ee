// SPDX-License-Identifier: MIT OR Apache-2.0
#include "by_mpi.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>

namespace halo = mpgpu::halo;

namespace {

/// Splits pieces into smaller ones for several threads. Each has one plane, at least one row, and about `cells` cells.
std::vector<halo::piece> cut(mpgpu::array_view<const halo::piece> pieces) {
    constexpr std::uint64_t cells = 4096;
    std::vector<halo::piece> parts;
    for (const halo::piece &whole : pieces) {
        const std::uint64_t row = whole.count[0] * whole.element_bytes;
        const std::uint64_t rows = std::max<std::uint64_t>(cells / whole.count[0], 1);
        for (std::uint64_t z = 0; z < whole.count[2]; ++z) {
            for (std::uint64_t y = 0; y < whole.count[1]; y += rows) {
                halo::piece &part = parts.emplace_back(whole);
                part.cells += z * whole.plane_bytes + y * whole.row_bytes;
                part.message += (z * whole.count[1] + y) * row;
                part.count[1] = std::min(rows, whole.count[1] - y);
                part.count[2] = 1;
            }
        }
    }
    return parts;
}

int count_of(const message &m) {
    if (m.bytes > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
        throw std::runtime_error("a message of " + std::to_string(m.bytes) +
                                 " bytes exceeds the limit of MPI, 2^31 - 1 bytes");
    }
    return static_cast<int>(m.bytes);
}

void begin(MPI_Request &request) {
    if (request != MPI_REQUEST_NULL) {
        MPI_Start(&request);
    }
}

} // namespace

by_mpi::by_mpi(const mpgpu::context &ctx, const halo::grid &g, const part &mine, space messages, packing how,
               int threads)
    : all_(messages_of(g, mine.rank, mine.vars.size())), how_(how),
      name_(std::string("MPI ") + name_of(mine.in) + "/" + name_of(messages) + " " + name_of(how)),
      team_(how == packing::threads ? threads : 1) {
    check_reach(mine.in, messages, how, *mine.code, mine.where);
    for (half &h : halves_) {
        h = make_half(ctx, g, mine, messages);
    }
}

halo::copier by_mpi::copier(const device_code &code) {
    if (how_ == packing::serial) {
        return [](const mpgpu::context &, mpgpu::device, mpgpu::array_view<const halo::piece> pieces,
                  halo::direction way) -> halo::launch_function {
            return [kept = std::vector<halo::piece>(pieces.begin(), pieces.end()), way](mpgpu::stream_view) {
                halo::copy_on_cpu(kept, way);
            };
        };
    }
    if (how_ == packing::threads) {
        return [this](const mpgpu::context &, mpgpu::device, mpgpu::array_view<const halo::piece> pieces,
                      halo::direction way) -> halo::launch_function {
            return [this, parts = cut(pieces), way](mpgpu::stream_view) {
                team_.run(parts.size(), [&](std::size_t i) { halo::copy_on_cpu({&parts[i], 1}, way); });
            };
        };
    }
    return code.copier();
}

by_mpi::half by_mpi::make_half(const mpgpu::context &ctx, const halo::grid &g, const part &mine, space in) {
    const halo::rank_arrays arrays = mine.arrays();
    half made;
    made.outbox = allocate(ctx, in, *mine.code, mine.where, all_.outbox_bytes);
    made.inbox = allocate(ctx, in, *mine.code, mine.where, all_.inbox_bytes);

    std::vector<std::vector<halo::piece>> packed; // pieces of each message
    std::vector<std::vector<halo::piece>> unpacked;
    for (const message &m : all_.received) {
        std::byte *const at = made.inbox.get() + m.offset;
        unpacked.push_back(pieces_of(g, mine.rank, m, arrays, at));
        MPI_Request &request = made.receives.emplace_back(MPI_REQUEST_NULL);
        if (m.rank != mine.rank) {
            MPI_Recv_init(at, count_of(m), MPI_BYTE, m.rank, m.tag, MPI_COMM_WORLD, &request);
        }
    }
    for (const message &m : all_.sent) {
        std::byte *at = made.outbox.get() + m.offset;
        MPI_Request &request = made.sends.emplace_back(MPI_REQUEST_NULL);
        if (m.rank != mine.rank) {
            MPI_Send_init(at, count_of(m), MPI_BYTE, m.rank, m.tag, MPI_COMM_WORLD, &request);
        } else {
            // A message to this rank itself is packed directly into the inbox, from which it is unpacked. Every message
            // that this rank sends to itself is also in the list of received messages.
            const auto received = std::find_if(all_.received.begin(), all_.received.end(), [&](const message &other) {
                return other.rank == mine.rank && other.tag == m.tag;
            });
            at = made.inbox.get() + received->offset;
        }
        packed.push_back(pieces_of(g, mine.rank, m, arrays, at));
    }

    const halo::copier copy = copier(*mine.code);
    const auto launches = [&](const std::vector<std::vector<halo::piece>> &messages, halo::direction way) {
        std::vector<halo::launch_function> made_of;
        if (how_ == packing::fused) {
            std::vector<halo::piece> together;
            for (const std::vector<halo::piece> &pieces : messages) {
                together.insert(together.end(), pieces.begin(), pieces.end());
            }
            made_of.push_back(copy(ctx, mine.where, together, way));
            return made_of;
        }
        for (const std::vector<halo::piece> &pieces : messages) {
            made_of.push_back(copy(ctx, mine.where, pieces, way));
        }
        if (how_ == packing::graph) {
            made_of = {mine.code->graph(mine.where, made_of)};
        }
        return made_of;
    };
    if (!all_.sent.empty()) {
        made.pack = launches(packed, halo::direction::pack);
        made.unpack = launches(unpacked, halo::direction::unpack);
    }
    if (how_ == packing::each) {
        for (std::size_t i = 0; i < made.pack.size(); ++i) {
            made.packed.emplace_back(ctx);
        }
    }
    return made;
}

by_mpi::~by_mpi() {
    for (half &h : halves_) {
        for (std::vector<MPI_Request> *requests : {&h.sends, &h.receives}) {
            for (MPI_Request &request : *requests) {
                if (request != MPI_REQUEST_NULL) {
                    MPI_Request_free(&request);
                }
            }
        }
    }
}

void by_mpi::start(const mpgpu::stream &stream) {
    half &h = halves_.at(now_);
    std::for_each(h.receives.begin(), h.receives.end(), begin);
    if (is_by_cpu(how_)) {
        stream.synchronize(); // waits until the cells are set, and until the last messages are unpacked
        for (std::size_t i = 0; i < h.pack.size(); ++i) {
            h.pack[i](stream);
            begin(h.sends[i]);
        }
        return;
    }
    for (std::size_t i = 0; i < h.pack.size(); ++i) {
        h.pack[i](stream);
        if (!h.packed.empty()) {
            h.packed[i].record(stream);
        }
    }
    if (h.packed.empty()) {
        stream.synchronize();
    }
    for (std::size_t i = 0; i < h.sends.size(); ++i) {
        if (!h.packed.empty()) {
            h.packed[i].synchronize();
        }
        begin(h.sends[i]);
    }
}

void by_mpi::finish(const mpgpu::stream &stream) {
    half &h = halves_.at(now_);
    const auto count = static_cast<int>(h.receives.size());
    if (is_one_by_one()) {
        for (std::size_t i = 0; i < h.receives.size(); ++i) {
            if (h.receives[i] == MPI_REQUEST_NULL) {
                h.unpack[i](stream);
            }
        }
        int arrived = MPI_UNDEFINED;
        MPI_Waitany(count, h.receives.data(), &arrived, MPI_STATUS_IGNORE);
        while (arrived != MPI_UNDEFINED) {
            h.unpack.at(static_cast<std::size_t>(arrived))(stream);
            MPI_Waitany(count, h.receives.data(), &arrived, MPI_STATUS_IGNORE);
        }
    } else {
        MPI_Waitall(count, h.receives.data(), MPI_STATUSES_IGNORE);
        for (const halo::launch_function &unpack : h.unpack) {
            unpack(stream);
        }
    }
    MPI_Waitall(static_cast<int>(h.sends.size()), h.sends.data(), MPI_STATUSES_IGNORE);
    now_ = 1 - now_;
}
