// SPDX-License-Identifier: MIT OR Apache-2.0
#include "by_calls.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>

namespace halo = mpgpu::halo;

namespace {

int on_node(const mpgpu::mpi::node &node, const message &m) {
    if (!node.contains(m.rank)) {
        throw std::invalid_argument("-half-transfers, -messages: rank " + std::to_string(m.rank) +
                                    " is on another node, to which only MPI sends; omit these flags");
    }
    return node.rank_on_node(m.rank);
}

std::vector<std::int32_t> ranks_of(const mpgpu::mpi::node &node, const std::vector<message> &all) {
    std::vector<std::int32_t> ranks;
    ranks.reserve(all.size());
    for (const message &m : all) {
        ranks.push_back(on_node(node, m));
    }
    return ranks;
}

mpgpu::device_span<std::byte> bytes_of(mpgpu::memory &box, const message &m) {
    return box.subspan(m.offset, m.bytes);
}

/// Returns one launch that packs or unpacks all messages.
halo::launch_function launch_of(const mpgpu::context &ctx, const halo::grid &g, const part &mine,
                                const std::vector<message> &all, mpgpu::memory &box, halo::direction way) {
    std::vector<halo::piece> pieces;
    for (const message &m : all) {
        const std::vector<halo::piece> more = pieces_of(g, mine.rank, m, mine.arrays(), box.data() + m.offset);
        pieces.insert(pieces.end(), more.begin(), more.end());
    }
    return pieces.empty() ? [](mpgpu::stream_view) {} : mine.code->copier()(ctx, mine.where, pieces, way);
}

} // namespace

by_half_transfers::by_half_transfers(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::grid &g,
                                     const part &mine)
    : all_(messages_of(g, mine.rank, mine.vars.size())), outbox_(ctx, mine.where, all_.outbox_bytes),
      inbox_(ctx, mine.where, all_.inbox_bytes),
      pack_(launch_of(ctx, g, mine, all_.sent, outbox_, halo::direction::pack)),
      unpack_(launch_of(ctx, g, mine, all_.received, inbox_, halo::direction::unpack)) {
    std::vector<mpgpu::half_transfer> halves;
    for (const message &m : all_.received) {
        halves.push_back(mpgpu::receive_from(on_node(node, m), static_cast<std::uint64_t>(m.tag), bytes_of(inbox_, m)));
    }
    for (const message &m : all_.sent) {
        halves.push_back(mpgpu::send_to(on_node(node, m), static_cast<std::uint64_t>(m.tag), bytes_of(outbox_, m)));
    }
    step_ = node.plan_exchange(halves);
}

void by_half_transfers::start(const mpgpu::stream &stream) {
    pack_(stream);
    step_.enqueue(stream);
}

void by_half_transfers::finish(const mpgpu::stream &stream) {
    unpack_(stream);
}

by_messages::by_messages(const mpgpu::context &ctx, const mpgpu::mpi::node &node, const halo::grid &g, const part &mine)
    : all_(messages_of(g, mine.rank, mine.vars.size())), senders_(ranks_of(node, all_.received)),
      receivers_(ranks_of(node, all_.sent)), outbox_(ctx, mine.where, all_.outbox_bytes),
      inbox_(ctx, mine.where, all_.inbox_bytes),
      pack_(launch_of(ctx, g, mine, all_.sent, outbox_, halo::direction::pack)),
      unpack_(launches_of(ctx, mine.code->copier(), g, mine.rank, all_.received, mine.arrays(), inbox_.data(),
                          halo::direction::unpack)),
      messenger_(node), packed_(ctx) {
    for (std::size_t i = 0; i < all_.received.size(); ++i) {
        streams_.emplace_back(ctx, mine.where);
        unpacked_.emplace_back(ctx);
    }
}

void by_messages::start(const mpgpu::stream &stream) {
    std::vector<mpgpu::message_request> &requests = under_way_.at(now_);
    for (mpgpu::message_request &request : requests) {
        request.synchronize();
    }
    requests.clear();
    for (std::size_t i = 0; i < all_.received.size(); ++i) {
        const message &m = all_.received[i];
        requests.push_back(
            messenger_.receive(bytes_of(inbox_, m), senders_[i], static_cast<std::uint64_t>(m.tag), streams_[i]));
    }
    pack_(stream);
    packed_.record(stream);
    for (std::size_t i = 0; i < all_.sent.size(); ++i) {
        const message &m = all_.sent[i];
        requests.push_back(
            messenger_.send(bytes_of(outbox_, m), receivers_[i], static_cast<std::uint64_t>(m.tag), stream));
    }
}

void by_messages::finish(const mpgpu::stream &stream) {
    std::vector<mpgpu::message_request> &requests = under_way_.at(now_);
    for (std::size_t i = 0; i < requests.size(); ++i) {
        if (i >= streams_.size()) {
            requests[i].wait(stream); // later work in the stream overwrites the outbox
            continue;
        }
        streams_[i].wait(packed_); // ghost cells must not change before earlier work ends
        requests[i].wait(streams_[i]);
        unpack_[i](streams_[i]);
        unpacked_[i].record(streams_[i]);
        stream.wait(unpacked_[i]);
    }
    now_ = 1 - now_;
}
