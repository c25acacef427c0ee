// SPDX-License-Identifier: MIT OR Apache-2.0
#include "exchange.hpp"

#include "waited_exchange.hpp"

#include <cstdint>
#include <numeric>
#include <utility>

namespace {

std::size_t packed_cells(const block &b) {
    const auto places = places_of(b);
    return std::accumulate(places.begin(), places.end(), std::size_t{0},
                           [](std::size_t sum, const face_place &place) { return sum + place.cells; });
}

class device_memory final : public exchange {
  public:
    device_memory(const face_messages &messages, std::size_t parts)
        : messages_(messages), under_way_{{posted(parts), posted(parts)}} {}

    void run(std::vector<part> &parts) override {
        // The host may be two iterations ahead of the devices. It cannot be further ahead, because a messenger holds a
        // limited number of messages.
        posted &now = under_way_.at(iteration_++ % under_way_.size());
        for (std::vector<mpgpu::message_request> &before : now) {
            for (mpgpu::message_request &request : before) {
                request.synchronize();
            }
            before.clear();
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            part &p = parts[i];
            // Each receive is ordered after the unpacking of the last iteration.
            for_each_face(p.where, [&](int face, std::size_t first, std::size_t cells) {
                now[i].push_back(messages_.receive(p, face, p.received.subspan(first, cells)));
            });
            pack(p);
            for_each_face(p.where, [&](int face, std::size_t first, std::size_t cells) {
                now[i].push_back(messages_.send(p, face, p.sent.subspan(first, cells)));
            });
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            for (const mpgpu::message_request &request : now[i]) {
                request.wait(parts[i].stream); // until faces can be unpacked, and the sent ones overwritten
            }
            unpack(parts[i]);
        }
    }

  private:
    using posted = std::vector<std::vector<mpgpu::message_request>>; // by part

    face_messages messages_;
    std::array<posted, 2> under_way_; // requests of the last two iterations
    std::size_t iteration_ = 0;
};

} // namespace

std::array<face_place, faces> places_of(const block &b) {
    std::array<face_place, faces> places{};
    std::size_t first = 0;
    for (int face = 0; face < faces; ++face) {
        const std::size_t cells = is_inside(b, face) ? static_cast<std::size_t>(face_cells(b, face)) : 0;
        places.at(static_cast<std::size_t>(face)) = {first, cells};
        first += cells;
    }
    return places;
}

part::part(const mpgpu::context &ctx, mpgpu::device on, const division &whole, int own_number)
    : where(whole.at(own_number)), number(own_number),
      stream(ctx, on), values{{{ctx, on, static_cast<std::size_t>(element_count(where))},
                               {ctx, on, static_cast<std::size_t>(element_count(where))}}},
      sent(mpgpu::buffer<double>::shared(ctx, on, packed_cells(where))),
      received(mpgpu::buffer<double>::shared(ctx, on, packed_cells(where))) {}

std::unique_ptr<exchange> through_host_memory(const mpgpu::context &ctx, const face_messages &messages,
                                              std::vector<part> &parts) {
    return std::make_unique<waited_exchange<face_messages>>(ctx, messages, parts, true);
}

mpgpu::message_request face_messages::send(const part &from, int face, mpgpu::device_span<const double> cells) const {
    const int to = whole.neighbour(from.number, face);
    return messenger.send(cells, to / blocks_each, tag_of(to, opposite(face)), from.stream);
}

mpgpu::message_request face_messages::receive(const part &to, int face, mpgpu::device_span<double> cells) const {
    return messenger.receive(cells, whole.neighbour(to.number, face) / blocks_each, tag_of(to.number, face), to.stream);
}

std::unique_ptr<exchange> from_device_memory(const face_messages &messages, const std::vector<part> &parts) {
    return std::make_unique<device_memory>(messages, parts.size());
}
