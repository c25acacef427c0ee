// SPDX-License-Identifier: MIT OR Apache-2.0
#include "exchange.hpp"

#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>

namespace {

std::size_t packed_cells(const block &b) {
    const auto places = places_of(b);
    return std::accumulate(places.begin(), places.end(), std::size_t{0},
                           [](std::size_t sum, const face_place &place) { return sum + place.cells; });
}

packed_faces pointers(const block &b, double *first) {
    packed_faces result{};
    const auto places = places_of(b);
    for (std::size_t face = 0; face < places.size(); ++face) {
        result.at[face] = places.at(face).cells > 0 ? first + places.at(face).first : nullptr;
    }
    return result;
}

void pack(part &p) {
    code_for(p.sent.data())
        .pack(p.stream, p.sent.location().id(), p.where, p.values.at(p.now).data(), pointers(p.where, p.sent.data()));
}

void unpack(part &p) {
    code_for(p.received.data())
        .unpack(p.stream, p.received.location().id(), p.where, p.values.at(p.now).data(),
                pointers(p.where, p.received.data()));
}

/// Calls `task(face, first, cells)` for each face that has a neighbour.
template <class Task> void for_each_face(const block &b, Task &&task) {
    const auto places = places_of(b);
    for (std::size_t face = 0; face < places.size(); ++face) {
        if (places.at(face).cells > 0) {
            task(static_cast<int>(face), places.at(face).first, places.at(face).cells);
        }
    }
}

/// Of the message for a face of a block.
std::uint64_t tag_of(int block_number, int face) {
    return static_cast<std::uint64_t>(block_number) * faces + static_cast<std::uint64_t>(face);
}

class host_memory final : public exchange {
  public:
    host_memory(const mpgpu::context &ctx, const face_messages &messages, std::vector<part> &parts)
        : messages_(messages) {
        mpgpu::plan_options plain;
        plain.max_paths = 1;
        for (part &p : parts) {
            stage &s = stages_.emplace_back();
            s.sent = mpgpu::buffer<double>::shared(ctx, mpgpu::device::host(), p.sent.size());
            s.received = mpgpu::buffer<double>::shared(ctx, mpgpu::device::host(), p.received.size());
            if (p.sent.size() > 0) {
                s.to_host.emplace(ctx, std::vector<mpgpu::transfer>{mpgpu::make_transfer(s.sent, p.sent)}, plain);
                s.to_device.emplace(ctx, std::vector<mpgpu::transfer>{mpgpu::make_transfer(p.received, s.received)},
                                    plain);
            }
        }
    }

    void run(std::vector<part> &parts) override {
        for (std::size_t i = 0; i < parts.size(); ++i) {
            stage &s = stages_[i];
            for_each_face(parts[i].where, [&](int face, std::size_t first, std::size_t cells) {
                s.under_way.push_back(messages_.receive(parts[i], face, all_of(s.received).subspan(first, cells)));
            });
            if (s.to_host) {
                pack(parts[i]);
                s.to_host->enqueue(parts[i].stream);
            }
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            stage &s = stages_[i];
            parts[i].stream.synchronize(); // the host memory that is sent from now on
            for_each_face(parts[i].where, [&](int face, std::size_t first, std::size_t cells) {
                s.under_way.push_back(messages_.send(parts[i], face, all_of(s.sent).subspan(first, cells)));
            });
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            stage &s = stages_[i];
            for (mpgpu::message_request &request : s.under_way) {
                request.synchronize();
            }
            s.under_way.clear();
            if (s.to_device) {
                s.to_device->enqueue(parts[i].stream);
                unpack(parts[i]);
            }
        }
    }

  private:
    struct stage {
        mpgpu::buffer<double> sent;
        mpgpu::buffer<double> received;
        std::optional<mpgpu::plan> to_host;
        std::optional<mpgpu::plan> to_device;
        std::vector<mpgpu::message_request> under_way;
    };
    static mpgpu::device_span<double> all_of(mpgpu::buffer<double> &whole) { return whole.subspan(0, whole.size()); }

    face_messages messages_;
    std::vector<stage> stages_; // by part
};

class device_memory final : public exchange {
  public:
    device_memory(const face_messages &messages, std::size_t parts)
        : messages_(messages), under_way_{{posted(parts), posted(parts)}} {}

    void run(std::vector<part> &parts) override {
        // The host may be ahead of the devices by two iterations: a rank has room for so many messages at a time.
        posted &now = under_way_.at(iteration_++ % under_way_.size());
        for (std::vector<mpgpu::message_request> &before : now) {
            for (mpgpu::message_request &request : before) {
                request.synchronize();
            }
            before.clear();
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            part &p = parts[i];
            // After the last iteration has unpacked what was received there.
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
                request.wait(
                    parts[i].stream); // the faces that are unpacked next, and those that the next pack overwrites
            }
            unpack(parts[i]);
        }
    }

  private:
    using posted = std::vector<std::vector<mpgpu::message_request>>; // by part

    face_messages messages_;
    std::array<posted, 2> under_way_; // of the last two iterations
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
    return std::make_unique<host_memory>(ctx, messages, parts);
}

mpgpu::message_request face_messages::send(const part &from, int face, mpgpu::device_span<const double> cells) const {
    const int to = whole.neighbour(from.number, face);
    return messenger.send(cells, static_cast<std::uint32_t>(to / blocks_each), tag_of(to, opposite(face)), from.stream);
}

mpgpu::message_request face_messages::receive(const part &to, int face, mpgpu::device_span<double> cells) const {
    return messenger.receive(cells, whole.neighbour(to.number, face) / blocks_each, tag_of(to.number, face), to.stream);
}

std::unique_ptr<exchange> from_device_memory(const face_messages &messages, const std::vector<part> &parts) {
    return std::make_unique<device_memory>(messages, parts.size());
}
