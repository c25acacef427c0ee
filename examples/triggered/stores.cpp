// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures the rate at which stores of a kernel arrive in the memory of another GPU, for several numbers of contiguous
// bytes. Links transport small stores inefficiently (figure 2 of PROACT, ISCA 2021).
#include "forms.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>

int stores(const machine &m, const options &opt) {
    const std::size_t mib = opt.mib > 0 ? opt.mib : m.is_virtual() ? 1 : 64;
    const std::size_t words = (mib << 20) / sizeof(std::uint32_t);
    const mpgpu::device to = m.gpus > 1 ? mpgpu::device::gpu(1) : mpgpu::device::host();
    mpgpu::buffer<std::uint32_t> destination(m.ctx, to, words);
    mpgpu::buffer<std::uint32_t> seen(m.ctx, mpgpu::device::host(), words);
    const mpgpu::stream stream(m.ctx, mpgpu::device::gpu(0));
    const int steps = opt.steps > 0 ? opt.steps : m.is_virtual() ? 1 : 10;
    std::printf("\nstores, %zu MiB from GPU 0 to %s%s\n%12s %10s %21s %16s\n", mib,
                m.gpus > 1 ? "GPU 1" : "host memory, because there is only one GPU",
                m.is_virtual() ? "; CPU threads, not GPUs" : "", "store bytes", "GB/s", "minimum to maximum",
                "of the fastest");
    int wrong = 0;
    std::vector<std::array<double, 3>> rates; // for each size: median, minimum, maximum
    for (unsigned bytes = 4; bytes <= 128; bytes *= 2) {
        std::vector<double> found;
        for (int round = 0; round <= opt.rounds; ++round) {
            std::fill_n(seen.data(), words, 0U);
            copy_now(m, destination, seen);
            const auto begin = std::chrono::steady_clock::now();
            for (int step = 0; step < steps; ++step) {
                m.code.scatter(stream, 0, {destination.data(), words, bytes / 4, bytes});
            }
            stream.synchronize();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
            if (round > 0) {
                found.push_back(static_cast<double>(words * sizeof(std::uint32_t)) * steps / took.count() * 1e-9);
            }
        }
        copy_now(m, seen, destination);
        const std::size_t bad = count_wrong(
            words, [&](std::size_t i) { return seen.data()[i] != scattered(static_cast<std::uint32_t>(i), bytes); });
        if (bad > 0) {
            std::printf("stores of %u bytes: %zu words are WRONG\n", bytes, bad);
            ++wrong;
        }
        const auto [least, most] = std::minmax_element(found.begin(), found.end());
        rates.push_back({median(found), *least, *most});
    }
    for (std::size_t i = 0; i < rates.size(); ++i) {
        std::printf("%12u %10.1f %10.1f %10.1f %14.1f %%\n", 4U << i, rates[i][0], rates[i][1], rates[i][2],
                    rates[i][0] / rates.back()[0] * 100);
    }
    std::printf("%s\n", wrong == 0 ? "all results are right" : "RESULTS ARE WRONG");
    return wrong;
}
