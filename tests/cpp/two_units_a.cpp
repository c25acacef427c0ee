// SPDX-License-Identifier: MIT OR Apache-2.0
#include "two_units.hpp"

#include <algorithm>
#include <cstdio>

int main() {
    const mpgpu::context ctx;
    mpgpu::buffer<int> a(ctx, mpgpu::device::gpu(0), 8);
    mpgpu::buffer<int> b(ctx, mpgpu::device::gpu(1), 8);
    std::fill_n(a.data(), 8, 42);
    const mpgpu::transfer transfers[] = {mpgpu::make_transfer(b, a)};
    plan_elsewhere(ctx, transfers).execute(mpgpu::stream_view::default_stream()).synchronize();
    const bool same = std::equal(a.data(), a.data() + 8, b.data()) && category_elsewhere() == mpgpu::category();
    std::puts(same ? "both units agree" : "the units differ");
    return same ? 0 : 1;
}
