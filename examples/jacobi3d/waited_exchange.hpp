// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI3D_WAITED_EXCHANGE_HPP
#define MPGPU_EXAMPLES_JACOBI3D_WAITED_EXCHANGE_HPP

#include "exchange.hpp"

#include <cstddef>
#include <optional>
#include <vector>

inline packed_faces pointers(const block &b, double *first) {
    packed_faces result{};
    const auto places = places_of(b);
    for (std::size_t face = 0; face < places.size(); ++face) {
        result.at[face] = places.at(face).cells > 0 ? first + places.at(face).first : nullptr;
    }
    return result;
}

inline void pack(part &p) {
    code_for(p.sent.data())
        .pack(p.stream, p.sent.location().id(), p.where, p.values.at(p.now).data(), pointers(p.where, p.sent.data()));
}

inline void unpack(part &p) {
    code_for(p.received.data())
        .unpack(p.stream, p.received.location().id(), p.where, p.values.at(p.now).data(),
                pointers(p.where, p.received.data()));
}

/// Calls `task(face, first, cells)` for each face of a block that has a neighbour. `first` is the position of the face
/// in `sent` and `received`.
template <class Task> void for_each_face(const block &b, Task &&task) {
    const auto places = places_of(b);
    for (std::size_t face = 0; face < places.size(); ++face) {
        if (places.at(face).cells > 0) {
            task(static_cast<int>(face), places.at(face).first, places.at(face).cells);
        }
    }
}

/// Exchange in which the host waits. Faces are sent after the host has waited for the packing, and unpacked after the
/// host has waited for the received faces. They are sent from device memory or, if staged, from host memory. `Messages`
/// sends and receives one face, in stream order or immediately, and returns a request for which the host can wait.
template <class Messages> class waited_exchange final : public exchange {
  public:
    waited_exchange(const mpgpu::context &ctx, const Messages &messages, std::vector<part> &parts, bool staged)
        : messages_(messages) {
        mpgpu::plan_options plain;
        plain.max_paths = 1;
        for (part &p : parts) {
            stage &s = stages_.emplace_back();
            if (!staged) {
                continue;
            }
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
            if constexpr (Messages::follow_streams) {
                receive(s, parts[i]);
            }
            if (parts[i].sent.size() > 0) {
                pack(parts[i]);
            }
            if (s.to_host) {
                s.to_host->enqueue(parts[i].stream);
            }
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            stage &s = stages_[i];
            parts[i].stream.synchronize(); // waits until the faces are packed
            if constexpr (!Messages::follow_streams) {
                receive(s, parts[i]); // the previously received faces have been unpacked
            }
            for_each_face(parts[i].where, [&](int face, std::size_t first, std::size_t cells) {
                s.under_way.push_back(
                    messages_.send(parts[i], face, memory(s.sent, parts[i].sent).subspan(first, cells)));
            });
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            stage &s = stages_[i];
            for (auto &request : s.under_way) {
                request.synchronize();
            }
            s.under_way.clear();
            if (s.to_device) {
                s.to_device->enqueue(parts[i].stream);
            }
            if (parts[i].received.size() > 0) {
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
        std::vector<typename Messages::request> under_way;
    };
    void receive(stage &s, part &p) {
        for_each_face(p.where, [&](int face, std::size_t first, std::size_t cells) {
            s.under_way.push_back(messages_.receive(p, face, memory(s.received, p.received).subspan(first, cells)));
        });
    }
    static mpgpu::device_span<double> memory(mpgpu::buffer<double> &host, mpgpu::buffer<double> &device) {
        mpgpu::buffer<double> &from = host.size() > 0 ? host : device;
        return from.subspan(0, from.size());
    }

    Messages messages_;
    std::vector<stage> stages_; // one for each part
};

#endif // MPGPU_EXAMPLES_JACOBI3D_WAITED_EXCHANGE_HPP
