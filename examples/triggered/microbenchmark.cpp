// SPDX-License-Identifier: MIT OR Apache-2.0
// Kernel whose computation takes as long as the copies of its result (the microbenchmark of PROACT, ISCA 2021). In this
// case overlap is most effective, with a gain of up to a factor of two.
#include "forms.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace {

word step_word(int step) {
    return static_cast<word>(step + 1) * 0x9e3779b97f4a7c15ULL;
}

int to(const machine &m, const options &opt, int receivers) {
    const std::size_t mib = opt.mib > 0 ? opt.mib : m.is_virtual() ? 2 : 256;
    const std::size_t words = (mib << 20) / sizeof(word);
    mpgpu::buffer<word> source(m.ctx, mpgpu::device::gpu(0), words);
    mpgpu::buffer<word> seen(m.ctx, mpgpu::device::host(), words);
    std::vector<mpgpu::buffer<word>> destinations;
    destinations.reserve(static_cast<std::size_t>(receivers));
    for (int i = 0; i < receivers; ++i) {
        // With a single GPU, the result is sent to host memory.
        destinations.emplace_back(m.ctx, m.gpus > 1 ? mpgpu::device::gpu(i + 1) : mpgpu::device::host(), words);
    }
    unsigned work = 64;
    application app;
    app.steps = opt.steps > 0 ? opt.steps : m.is_virtual() ? 3 : 10;
    app.sends = [&](int, int) {
        std::vector<mpgpu::transfer> copies;
        copies.reserve(destinations.size());
        for (mpgpu::buffer<word> &destination : destinations) {
            copies.push_back(mpgpu::make_transfer(destination, source));
        }
        return copies;
    };
    app.reset = [&] {
        std::fill_n(seen.data(), words, word{0});
        for (mpgpu::buffer<word> &destination : destinations) {
            copy_now(m, destination, seen);
        }
    };
    app.wrong = [&] {
        word scale = 1;
        word offset = 0;
        for (unsigned k = 0; k < work; ++k) {
            scale *= factor;
            offset = offset * factor + addend;
        }
        const word last = step_word(app.steps - 1);
        std::size_t wrong = 0;
        for (mpgpu::buffer<word> &destination : destinations) {
            copy_now(m, seen, destination);
            wrong += count_wrong(words, [&](std::size_t i) { return seen.data()[i] != (i ^ last) * scale + offset; });
        }
        return wrong;
    };
    const auto median_of = [&](form::way how) {
        run timed(m, app, {how, {}});
        std::vector<double> times;
        for (int round = 0; round < 4; ++round) {
            double enqueued = 0;
            times.push_back(timed.seconds(enqueued));
        }
        times.erase(times.begin());
        return median(times);
    };
    // The amount of work is adjusted until the kernel takes as long as the plain copies.
    app.launch = [](const mpgpu::stream &, int, int, const outputs &) {};
    const double copies = median_of(form::way::copies);
    app.launch = [&](const mpgpu::stream &stream, int gpu, int step, const outputs &out) {
        m.code.make(stream, gpu, {source.data(), words, step_word(step), work}, out);
    };
    for (int i = 0; i < 5; ++i) {
        const double kernel = median_of(form::way::alone);
        work = std::max(1U, static_cast<unsigned>(std::lround(work * copies / kernel)));
    }
    const std::string where = m.gpus > 1 ? (receivers > 1 ? "GPUs 1 to " : "GPU ") + std::to_string(receivers)
                                         : "host memory, because there is only one GPU";
    std::printf("\nmicrobenchmark, GPU 0 to %s: %zu MiB each, %d consecutive steps; plain copies alone take %.1f us; "
                "arithmetic operations per word: %u\n",
                where.c_str(), mib, app.steps, copies * 1e6, work);
    return compare(m, app, nullptr, opt);
}

} // namespace

int microbenchmark(const machine &m, const options &opt) {
    int wrong = to(m, opt, 1);
    if (m.gpus > 2) {
        wrong += to(m, opt, m.gpus - 1);
    }
    return wrong;
}
