// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests halo exchanges between boxes, with other depths, ghost widths, padding and staggered variables, between virtual
// devices of one process. Every byte of every array is compared with a reference. Environment: TEST_CASES is the number
// of random cases, TEST_SEED the seed, which is printed.
#include "boxes_reference.hpp"

#include <mpgpu/halo.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

using mpgpu::device;
namespace halo = mpgpu::halo;
namespace reference = boxes_reference;

mpgpu::context virtual_devices() {
    mpgpu::context_options machine;
    machine.backend = mpgpu::backend::host;
    machine.topology = "beluga";
    return mpgpu::context(machine);
}

/// Two boxes in one plane, and arguments that are refused for them.
struct two_boxes {
    two_boxes() { whole.cells = {{0, 0, 0}, {8, 8, 1}}; }

    [[nodiscard]] halo::rank_arrays array(std::size_t size,
                                          const std::optional<halo::array_layout> &layout = std::nullopt) {
        return {{cells.data(), cells.location(), sizeof(double), size, layout}};
    }

    void refused(const halo::domain &mesh, const std::vector<halo::rank_boxes> &boxes,
                 const std::vector<halo::rank_arrays> &own, const std::string &words,
                 const halo::options &how = {}) const {
        try {
            const halo::plan made(ctx, mesh, boxes, own, how);
            FAIL("accepted; expected: " << words);
        } catch (const mpgpu::argument_error &e) {
            INFO(e.what());
            CHECK(std::string(e.what()).find(words) != std::string::npos);
        }
    }

    mpgpu::context ctx = virtual_devices();
    mpgpu::memory cells = mpgpu::memory(ctx, device::gpu(0), 800);
    halo::domain whole = {{}, {}, halo::both_sides({1, 1, 0})};
    std::vector<halo::rank_boxes> good = {{{{0, 0, 0}, {8, 4, 1}}}, {{{0, 4, 0}, {8, 4, 1}}}};
    std::vector<halo::rank_arrays> arrays = {array(60), array(60)};
};

} // namespace

TEST_CASE("every byte is right after exchanges between random boxes") {
    const mpgpu::context ctx = virtual_devices();
    const std::uint64_t seed = reference::number_from("TEST_SEED", 20261130);
    const std::uint64_t cases = reference::number_from("TEST_CASES", 60);
    std::printf("TEST_SEED=%llu TEST_CASES=%llu\n", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(cases));
    for (std::uint64_t number = 0; number < cases; ++number) {
        const std::string difference = reference::difference_in_one_process(ctx, seed + number);
        REQUIRE_MESSAGE(difference.empty(), difference);
    }
}

TEST_CASE("a rank may be numbered along any dimension first") {
    halo::grid g;
    g.cells = {6, 7, 8};
    g.ranks = {2, 3, 4};
    for (const halo::rank_order order : {halo::rank_order::x_first, halo::rank_order::z_first}) {
        g.order = order;
        const bool by_x = order == halo::rank_order::x_first;
        for (int x = 0; x < 2; ++x) {
            for (int y = 0; y < 3; ++y) {
                for (int z = 0; z < 4; ++z) {
                    const int rank = by_x ? x + 2 * (y + 3 * z) : z + 4 * (y + 3 * x);
                    CHECK(halo::place_of(g, rank) == std::array<int, 3>{x, y, z});
                    CHECK(halo::box_of(g, rank).first[2] == 2 * z);
                }
            }
        }
    }
    halo::grid plane; // z has one rank, so y counts first
    plane.cells = {4, 6};
    plane.ranks = {2, 3};
    plane.order = halo::rank_order::z_first;
    CHECK(halo::place_of(plane, 1) == std::array<int, 3>{0, 1, 0});
    CHECK(halo::place_of(plane, 3) == std::array<int, 3>{1, 0, 0});
}

TEST_CASE("the boxes of a grid may be given to ranks in any order") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::grid g;
    g.cells = {9};
    g.ranks = {3};
    g.ghost = {1};
    const std::array<int, 3> places = {2, 0, 1}; // of ranks 0, 1 and 2
    std::vector<mpgpu::buffer<double>> cells;
    std::vector<halo::rank_boxes> boxes;
    std::vector<halo::rank_arrays> arrays;
    for (const int place : places) {
        mpgpu::buffer<double> &own = cells.emplace_back(ctx, device::gpu(0), std::size_t{5});
        std::fill_n(own.data(), 5, 10.0 * place);
        boxes.push_back({halo::box_of(g, place)});
        arrays.push_back({halo::array_of(own)});
    }
    halo::plan plan(ctx, halo::domain_of(g), boxes, arrays);
    plan.exchange(stream);
    stream.synchronize();
    const auto values = [&](std::size_t rank) {
        return std::vector<double>(cells[rank].data(), cells[rank].data() + 5);
    };
    CHECK(values(0) == std::vector<double>{10, 20, 20, 20, 20});
    CHECK(values(1) == std::vector<double>{0, 0, 0, 0, 10});
    CHECK(values(2) == std::vector<double>{0, 10, 10, 10, 20});
}

TEST_CASE("the face between two boxes is sent by the box on its high side, to the box on its low side") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::domain line;
    line.cells = {{0, 0, 0}, {8, 1, 1}};
    const std::vector<halo::rank_boxes> boxes = {{{{0, 0, 0}, {4, 1, 1}}}, {{{4, 0, 0}, {4, 1, 1}}}};
    halo::array_layout faces;
    faces.ghost = {{1, 0, 0}, {1, 0, 0}};
    faces.staggered = {true, false, false};
    CHECK(halo::array_extents(boxes[0][0], faces) == std::array<std::int64_t, 3>{7, 1, 1});
    std::vector<mpgpu::buffer<double>> u;
    std::vector<halo::rank_arrays> arrays;
    const auto fill = [&] {
        for (std::size_t rank = 0; rank < 2; ++rank) {
            for (std::size_t i = 0; i < 7; ++i) {
                u[rank].data()[i] = static_cast<double>(100 * (rank + 1) + i);
            }
        }
    };
    for (int rank = 0; rank < 2; ++rank) {
        u.emplace_back(ctx, device::gpu(rank), std::size_t{7});
        arrays.push_back({halo::array_of(u.back(), faces)});
    }
    const auto values = [&](std::size_t rank) { return std::vector<double>(u[rank].data(), u[rank].data() + 7); };
    fill();
    halo::plan shared(ctx, line, boxes, arrays); // no layers: only the shared face
    shared.exchange(stream);
    stream.synchronize();
    CHECK(values(0) == std::vector<double>{100, 101, 102, 103, 104, 201, 106});
    CHECK(values(1) == std::vector<double>{200, 201, 202, 203, 204, 205, 206});
    fill();
    halo::options how;
    how.depth = halo::both_sides({1, 0, 0});
    halo::plan deep(ctx, line, boxes, arrays, how);
    deep.exchange(stream);
    stream.synchronize();
    CHECK(values(0) == std::vector<double>{100, 101, 102, 103, 104, 201, 202});
    CHECK(values(1) == std::vector<double>{104, 201, 202, 203, 204, 205, 206});
    fill();
    line.periodic[0] = true; // the last face of the mesh is the first one
    halo::plan ring(ctx, line, boxes, arrays, how);
    ring.exchange(stream);
    stream.synchronize();
    CHECK(values(0) == std::vector<double>{204, 101, 102, 103, 104, 201, 202});
    CHECK(values(1) == std::vector<double>{104, 201, 202, 203, 204, 101, 102});
}

TEST_CASE_FIXTURE(two_boxes, "boxes that do not go together are refused with the values") {
    std::vector<halo::rank_boxes> boxes = good;
    boxes[1] = {{{6, 3, 0}, {2, 4, 1}}};
    refused(whole, boxes, {array(60), array(24)},
            "rank 0 computes the cells (0, 0, 0) to (7, 3, 0) and rank 1 the cells (6, 3, 0) to (7, 6, 0): the cells "
            "(6, 3, 0) to (7, 3, 0) are in both boxes");
    boxes = good;
    boxes[1][0].first[1] = 5;
    refused(whole, boxes, arrays, "rank 1, box 0: cells (0, 5, 0) to (7, 8, 0): must be one cell or more, all in the");
    boxes[1][0].cells[0] = 0;
    refused(whole, boxes, arrays, "rank 1, box 0: cells (0, 5, 0)");
    boxes[1].clear();
    refused(whole, boxes, arrays, "rank 1 has 0 boxes and 1 arrays");
    refused(whole, {good[0]}, arrays, "arrays of 2 ranks and boxes of 1");
    refused(whole, {}, {}, "arrays of 0 ranks and boxes of 0");
    halo::domain other = whole;
    other.cells.cells[2] = 0;
    refused(other, good, arrays, "cells in z: 0, the first at 0: must be 1 to 2^40");
    other = whole;
    other.reach = static_cast<halo::neighbours>(0);
    refused(other, good, arrays, "reach: 0");
    other = whole;
    constexpr std::int64_t most = std::int64_t{1} << 40;
    other.cells.cells = {most, most, 1};
    const halo::box half = {{0, 0, 0}, {most, most / 2, 1}};
    refused(other, {{half}, {{{0, most / 2, 0}, half.cells}}}, arrays, "elements including ghost cells: too many");
}

TEST_CASE_FIXTURE(two_boxes, "depths and layouts that do not go together are refused with the values") {
    halo::domain other = whole;
    halo::options how;
    how.depth = halo::layers{{1, 2, 0}, {1, 1, 0}};
    refused(whole, good, arrays, "1 ghost cells at the low side in y, and 2 layers to exchange", how);
    how.depth = halo::layers{{0, 0, 0}, {0, -1, 0}};
    refused(whole, good, arrays, "layers to exchange in y: -1: must be 0 to", how);
    other.periodic[0] = true;
    how.depth = halo::layers{{0, 0, 0}, {9, 0, 0}};
    refused(other, good, arrays, "layers to exchange in x: 9: must be 0 to 8, the cells of the periodic mesh;", how);
    halo::array_layout layout;
    layout.ghost = halo::both_sides({1, 1, 0});
    layout.row = 9;
    refused(whole, good, {array(60, layout), array(60)},
            "layout.row is 9 and layout.plane is 0: row must be 0 or at least 10 elements");
    layout.row = 12;
    refused(whole, good, {array(69, layout), array(60)},
            "69 elements: must be at least 70, with padding, for 10 x 6 x 1");
    layout.plane = 71;
    refused(whole, good, {array(70, layout), array(60)}, "layout.plane is 71: row must be 0");
    layout = {};
    layout.ghost = {{1, 1, 0}, {1, -1, 0}};
    refused(whole, good, {array(70, layout), array(60)}, "-1 ghost cells at the high side in y");
    layout.ghost = halo::both_sides({1, 1, 0});
    layout.staggered = {true, false, false};
    refused(whole, good, {array(66, layout), array(60)}, "rank 1 has different variables from rank 0");
    how.depth = halo::layers{{0, 0, 0}, {8, 0, 0}};
    layout.ghost.high[0] = 8;
    refused(other, good, {array(108, layout), array(108, layout)},
            "in x: 8: must be 0 to 7, one less than the cells of", how);
    halo::grid g;
    g.order = static_cast<halo::rank_order>(2);
    CHECK_THROWS_WITH_AS(halo::plan(ctx, g, std::vector<halo::rank_arrays>{array(1)}), doctest::Contains("order: 2"),
                         mpgpu::argument_error);
}

TEST_CASE("two arrays that are swapped in every step are exchanged by one plan") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    const mpgpu::stream other(ctx, device::gpu(1));
    halo::grid line;
    line.cells = {8};
    line.ranks = {2};
    line.ghost = {1};
    std::vector<mpgpu::buffer<double>> cells;
    for (int i = 0; i < 4; ++i) { // arrays 0 and 2 of rank 0, arrays 1 and 3 of rank 1
        cells.emplace_back(ctx, device::gpu(i % 2), std::size_t{6});
        std::fill_n(cells.back().data(), 6, 10.0 * i);
    }
    const std::vector<halo::rank_arrays> first = {{halo::array_of(cells[0])}, {halo::array_of(cells[1])}};
    const std::vector<halo::rank_arrays> second = {{halo::array_of(cells[2])}, {halo::array_of(cells[3])}};
    for (const bool pushed : {false, true}) {
        halo::options how;
        how.pushed = pushed;
        halo::plan plan(ctx, line, first, how);
        CHECK(plan.sets() == 1);
        CHECK_THROWS_WITH_AS(plan.exchange(stream, 1), doctest::Contains("set 1: the plan has 1 set, numbered from 0"),
                             mpgpu::argument_error);
        CHECK_THROWS_WITH_AS(plan.add(ctx, std::vector<halo::rank_arrays>{first[0]}),
                             doctest::Contains("arrays of 1 ranks and boxes of 2"), mpgpu::argument_error);
        CHECK(plan.sets() == 1);
        CHECK(plan.add(ctx, second) == 1);
        CHECK(plan.sets() == 2);
        CHECK(plan.measured().size() == (pushed ? 0 : 2));
        // Each exchange is in another stream than the last one, whose end only the plan orders before it.
        for (int step = 1; step < 200; ++step) {
            const auto set = static_cast<std::size_t>(step % 2);
            const mpgpu::stream &now = step % 3 == 0 ? stream : other;
            now.launch_host([&cells, set, step] {
                cells[2 * set].data()[4] = step;         // last computed cell of rank 0
                cells[2 * set + 1].data()[1] = 2 * step; // first computed cell of rank 1
            });
            plan.start(now, set);
            plan.finish(now);
            plan.finish(step % 3 == 0 ? other : stream);
        }
        plan.start(stream, 0);
        plan.start(stream, 1); // follows the exchange of set 0
        plan.finish(stream);
        stream.synchronize();
        for (const std::size_t set : {std::size_t{0}, std::size_t{1}}) {
            CHECK(cells[2 * set].data()[5] == 2 * (set == 0 ? 198 : 199));
            CHECK(cells[2 * set + 1].data()[0] == (set == 0 ? 198 : 199));
        }
        plan.destroy();
        CHECK(plan.sets() == 0);
        CHECK_THROWS_AS(plan.add(ctx, second), mpgpu::argument_error);
    }
}

TEST_CASE("an exchange of another set follows the last exchange, and later work waits for both") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    const mpgpu::stream other(ctx, device::gpu(1));
    halo::grid line;
    line.cells = {4};
    line.periodic = {true};
    line.ghost = {1};
    mpgpu::buffer<double> first(ctx, device::gpu(0), 6);
    mpgpu::buffer<double> second(ctx, device::gpu(0), 6);
    halo::plan plan(ctx, line, std::vector<halo::rank_arrays>{{halo::array_of(first)}});
    CHECK(plan.add(ctx, std::vector<halo::rank_arrays>{{halo::array_of(second)}}) == 1);
    std::fill_n(first.data(), 6, 0.0);
    std::atomic<bool> may_go_on = false;
    std::atomic<bool> has_waited = false;
    std::atomic<bool> has_run = false;
    stream.launch_host([&] {
        while (!may_go_on) {
            std::this_thread::yield();
        }
        first.data()[1] = 7;
    });
    plan.start(stream, 0);
    plan.start(other, 1);
    plan.finish(other);
    other.launch_host([&] {
        has_waited = first.data()[5] == 7;
        has_run = true;
    });
    for (int i = 0; i < 20000 && !has_run; ++i) { // without the order, the work above runs in this time
        std::this_thread::yield();
    }
    may_go_on = true;
    other.synchronize();
    stream.synchronize();
    CHECK(has_waited);
}

TEST_CASE("rows and planes are contiguous only if neither array has padding or ghost cells there") {
    using halo::detail::split;
    const auto pieces = [](const halo::detail::array_place &source, const halo::detail::array_place &ghost) {
        const halo::detail::pieces_of found = split({8, {4, 3, 2}, 0, source, 0, ghost});
        return std::array<std::int64_t, 3>{found.length, found.rows, found.planes};
    };
    using three = std::array<std::int64_t, 3>;
    CHECK(pieces({0, 4, 12}, {0, 4, 12}) == three{24, 1, 1});
    CHECK(pieces({0, 4, 13}, {0, 4, 12}) == three{12, 1, 2});
    CHECK(pieces({0, 4, 12}, {0, 4, 16}) == three{12, 1, 2});
    CHECK(pieces({0, 5, 15}, {0, 4, 12}) == three{4, 3, 2});
    CHECK(pieces({0, 4, 12}, {0, 6, 18}) == three{4, 3, 2});
}
