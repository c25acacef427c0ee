// SPDX-License-Identifier: MIT OR Apache-2.0
// Two-dimensional Jacobi relaxation. The rows are divided among the GPUs. The first thread blocks of a sweep compute
// the rows that the neighbours need. These rows are copied while the other blocks compute. Values on the boundary of
// the domain are fixed.
#include "forms.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace {

constexpr float poison = -1e30F;

/// Rows that one GPU computes, between two halo rows.
struct part {
    std::size_t first; ///< row of the domain that is row 1 of this part
    std::size_t rows;
    std::array<mpgpu::buffer<float>, 2> a; ///< two arrays that alternate; empty with unified memory
    std::array<float *, 2> data;           ///< addresses of the arrays, or of the first halo row with unified memory
    [[nodiscard]] mpgpu::device_span<float> row(int parity, std::size_t index, std::size_t nx) {
        return a.at(static_cast<std::size_t>(parity)).subspan(index * nx, nx);
    }
};

/// Initial and expected values of the whole domain, in host memory.
struct whole {
    whole(const machine &m, std::size_t columns, std::size_t rows, int sweeps);
    std::size_t nx;
    std::size_t ny;
    int steps;
    mpgpu::buffer<float> first;    ///< values before the first sweep
    mpgpu::buffer<float> poisoned; ///< initial values that make stale results of an earlier form detectable
    mpgpu::buffer<float> seen;     ///< host buffer for a copy of a GPU's array
    std::vector<float> expected;   ///< expected values after the last sweep
};

/// Domain that is divided among one or more GPUs.
class domain {
  public:
    /// Divides the domain among `gpus` GPUs. If `to_host` is true, the first and the last row are sent to host memory
    /// instead of another GPU.
    domain(const machine &m, whole &values, int gpus, bool to_host, placement where = placement::each)
        : machine_(m), values_(values), nx_(values.nx) {
        const std::size_t ny = values.ny;
        const auto count = static_cast<std::size_t>(gpus);
        if ((ny - 2) / count < 2) {
            throw std::invalid_argument("-ny " + std::to_string(ny) + ": must be " + std::to_string(2 * count + 2) +
                                        " or more for " + std::to_string(gpus) + " GPUs");
        }
        while (where == placement::unified && shared_.size() < 2) {
            shared_.push_back(share_memory(m, nx_ * ny * sizeof(float)));
        }
        std::size_t row = 1;
        for (std::size_t gpu = 0; gpu < count; ++gpu) {
            const std::size_t rows = (ny - 2) / count + (gpu < (ny - 2) % count ? 1 : 0);
            part here{row, rows, {}, {}};
            for (std::size_t i = 0; i < 2; ++i) {
                if (shared_.empty()) {
                    here.a.at(i) = {m.ctx, mpgpu::device::gpu(static_cast<int>(gpu)), (rows + 2) * nx_};
                }
                here.data.at(i) = shared_.empty() ? here.a.at(i).data() : shared(i) + (row - 1) * nx_;
            }
            parts_.push_back(std::move(here));
            row += rows;
        }
        if (to_host) {
            to_host_ = mpgpu::buffer<float>(m.ctx, mpgpu::device::host(), 2 * nx_);
        }
        app_.gpus = gpus;
        app_.all_read = !shared_.empty();
        app_.steps = values.steps;
        app_.sends = [this](int gpu, int parity) { return sends(gpu, parity); };
        app_.launch = [this](const mpgpu::stream &stream, int gpu, int step, const outputs &out) {
            launch(stream, gpu, step, out);
        };
        app_.reset = [this] { reset(); };
        app_.wrong = [this] { return wrong(); };
    }

    [[nodiscard]] const application &app() const { return app_; }

  private:
    std::vector<mpgpu::transfer> sends(int gpu, int parity) {
        const auto index = static_cast<std::size_t>(gpu);
        part &here = parts_[index];
        // Time step n writes the array that time step n + 1 reads.
        const int written = 1 - parity;
        std::vector<mpgpu::transfer> rows;
        if (!shared_.empty()) {
            return rows;
        }
        if (index > 0) {
            part &above = parts_[index - 1];
            rows.push_back(mpgpu::make_transfer(above.row(written, above.rows + 1, nx_), here.row(written, 1, nx_)));
        }
        if (index + 1 < parts_.size()) {
            rows.push_back(
                mpgpu::make_transfer(parts_[index + 1].row(written, 0, nx_), here.row(written, here.rows, nx_)));
        }
        if (to_host_.size() > 0) {
            rows.push_back(mpgpu::make_transfer(to_host_.subspan(0, nx_), here.row(written, 1, nx_)));
            rows.push_back(mpgpu::make_transfer(to_host_.subspan(nx_, nx_), here.row(written, here.rows, nx_)));
        }
        return rows;
    }

    void launch(const mpgpu::stream &stream, int gpu, int step, const outputs &out) {
        const auto index = static_cast<std::size_t>(gpu);
        const bool up = index > 0 || to_host_.size() > 0;
        const bool down = index + 1 < parts_.size() || to_host_.size() > 0;
        part &here = parts_[index];
        const auto from = static_cast<std::size_t>(step % 2);
        const unsigned second = up ? 1 : 0;
        machine_.code.sweep(stream, gpu,
                            {here.data.at(from), here.data.at(1 - from), nx_, here.rows, up ? 0U : most_receivers,
                             down ? second : most_receivers},
                            out);
    }

    [[nodiscard]] float *shared(std::size_t parity) const { return static_cast<float *>(shared_[parity].get()); }

    void reset() {
        if (!shared_.empty()) {
            std::copy_n(values_.first.data(), values_.first.size(), shared(0));
            std::copy_n(values_.poisoned.data(), values_.poisoned.size(), shared(1));
            for (std::size_t gpu = 0; gpu < parts_.size(); ++gpu) {
                for (float *const data : parts_[gpu].data) {
                    machine_.code.place(data + nx_, parts_[gpu].rows * nx_ * sizeof(float), static_cast<int>(gpu),
                                        app_.gpus);
                }
            }
            return;
        }
        for (part &p : parts_) {
            const std::size_t begin = (p.first - 1) * nx_;
            copy_now(machine_, p.a[0], values_.first.subspan(begin, p.a[0].size()));
            copy_now(machine_, p.a[1], values_.poisoned.subspan(begin, p.a[1].size()));
        }
        std::fill_n(to_host_.data(), to_host_.size(), poison);
    }

    /// Compares the rows of each GPU, and its halo rows, which its neighbours have computed. Returns the number of
    /// wrong elements.
    std::size_t wrong() {
        const auto last = static_cast<std::size_t>(app_.steps % 2);
        std::size_t bad = 0;
        if (!shared_.empty()) {
            return differ(shared(last), 0, values_.expected.size());
        }
        for (part &p : parts_) {
            const std::size_t size = p.a.at(last).size();
            const std::size_t begin = (p.first - 1) * nx_;
            copy_now(machine_, values_.seen.subspan(0, size), p.a.at(last));
            bad += differ(values_.seen.data(), begin, size);
        }
        if (to_host_.size() > 0) {
            const part &p = parts_[0];
            // The fixed values at the ends of a row are compared only if they were copied, because the kernel does not
            // store them.
            bad += differ(to_host_.data() + 1, p.first * nx_ + 1, nx_ - 2) +
                   differ(to_host_.data() + nx_ + 1, (p.first + p.rows - 1) * nx_ + 1, nx_ - 2);
        }
        return bad;
    }

    [[nodiscard]] std::size_t differ(const float *found, std::size_t begin, std::size_t count) const {
        return count_wrong(count, [&](std::size_t i) { return found[i] != values_.expected[begin + i]; });
    }

    const machine &machine_;
    whole &values_;
    std::size_t nx_;
    mpgpu::buffer<float> to_host_;
    std::vector<shared_memory> shared_; ///< two arrays of the whole domain, which alternate
    std::vector<part> parts_;
    application app_;
};

/// Sets the initial values: zero, with a sine at both ends of x.
void set_first(mpgpu::buffer<float> &first, std::size_t nx, std::size_t ny) {
    std::fill_n(first.data(), first.size(), 0.0F);
    for (std::size_t y = 0; y < ny; ++y) {
        const auto value =
            static_cast<float>(std::sin(6.283185307179586 * static_cast<double>(y) / static_cast<double>(ny - 1)));
        first.data()[y * nx] = value;
        first.data()[y * nx + nx - 1] = value;
    }
}

/// Computes `steps` sweeps on the CPU. Operands are added in the same order as in blocks.hpp.
std::vector<float> swept(const mpgpu::buffer<float> &first, std::size_t nx, std::size_t ny, int steps) {
    std::vector<float> a(first.data(), first.data() + first.size());
    std::vector<float> a_new = a;
    for (int step = 0; step < steps; ++step) {
        in_parallel(ny - 2, [&](std::size_t begin, std::size_t end) {
            for (std::size_t y = begin + 1; y < end + 1; ++y) {
                const float *here = a.data() + y * nx;
                for (std::size_t x = 1; x + 1 < nx; ++x) {
                    a_new[y * nx + x] = 0.25F * ((here[x + 1] + here[x - 1]) + (here[x + nx] + *(here + x - nx)));
                }
            }
        });
        a.swap(a_new);
    }
    return a;
}

whole::whole(const machine &m, std::size_t columns, std::size_t rows, int sweeps)
    : nx(columns), ny(rows), steps(sweeps), first(m.ctx, mpgpu::device::host(), nx * ny),
      poisoned(m.ctx, mpgpu::device::host(), nx * ny), seen(m.ctx, mpgpu::device::host(), nx * ny) {
    set_first(first, nx, ny);
    std::copy_n(first.data(), first.size(), poisoned.data());
    for (std::size_t y = 1; y + 1 < ny; ++y) {
        std::fill_n(poisoned.data() + y * nx + 1, nx - 2, poison);
    }
    expected = swept(first, nx, ny, steps);
}

} // namespace

int jacobi(const machine &m, const options &opt) {
    whole values(m,
                 opt.nx > 0       ? opt.nx
                 : m.is_virtual() ? 4096
                                  : 2097152,
                 opt.ny > 0       ? opt.ny
                 : m.is_virtual() ? 66
                                  : 258,
                 opt.steps > 0    ? opt.steps
                 : m.is_virtual() ? 6
                                  : 20);
    const domain one(m, values, 1, false);
    const domain all(m, values, m.gpus, m.gpus == 1);
    std::printf("\njacobi, %zu x %zu points over %d GPUs, %d consecutive sweeps, halo rows of %zu bytes%s; bitwise "
                "equal to the results of a CPU\n",
                values.ny, values.nx, m.gpus, values.steps, values.nx * sizeof(float),
                m.gpus > 1 ? "" : " to host memory, because there is only one GPU");
    if (!shares_memory(m)) {
        return compare(m, all.app(), &one.app(), opt);
    }
    const domain unified(m, values, m.gpus, false, placement::unified);
    return compare(m, all.app(), &one.app(), opt, &unified.app());
}
