// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_EXCHANGE_HPP
#define MPGPU_EXAMPLES_HALO3D_EXCHANGE_HPP

#include <mpgpu/halo.hpp>

#include <string>
#include <utility>

/// Method of exchanging the ghost cells of one process's ranks.
class exchange {
  public:
    exchange() = default;
    exchange(const exchange &) = delete;
    exchange(exchange &&) = delete;
    exchange &operator=(const exchange &) = delete;
    exchange &operator=(exchange &&) = delete;
    virtual ~exchange() = default;

    /// Returns the name of the method for the output.
    [[nodiscard]] virtual std::string name() const = 0;
    /// Starts an exchange in `stream`, after all earlier work in it.
    virtual void start(const mpgpu::stream &stream) = 0;
    /// Makes later work in `stream` wait until the ghost cells have arrived.
    virtual void finish(const mpgpu::stream &stream) = 0;
    /// Starts and finishes an exchange with no other work in between.
    virtual void run(const mpgpu::stream &stream) {
        start(stream);
        finish(stream);
    }
    /// Ends the exchange. Must be called on all ranks after their last exchange.
    virtual void close() {}
};

/// Exchange by mpgpu, which this example demonstrates, in any of its forms.
class by_plan final : public exchange {
  public:
    explicit by_plan(mpgpu::halo::plan &plan, std::string name = "mpgpu") : plan_(plan), name_(std::move(name)) {}

    [[nodiscard]] std::string name() const override { return name_; }
    void start(const mpgpu::stream &stream) override { plan_.start(stream); }
    void finish(const mpgpu::stream &stream) override { plan_.finish(stream); }
    void run(const mpgpu::stream &stream) override { plan_.exchange(stream); }

  private:
    mpgpu::halo::plan &plan_;
    std::string name_;
};

#endif // MPGPU_EXAMPLES_HALO3D_EXCHANGE_HPP
