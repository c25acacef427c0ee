// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests halo exchanges between virtual devices of one process. Every cell of every array, including ghost cells, is
// compared with an undivided mesh.
#include "halo_reference.hpp"

#include <mpgpu/halo.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using mpgpu::device;
namespace halo = mpgpu::halo;
namespace reference = halo_reference;

constexpr std::uint64_t never_pack = std::numeric_limits<std::uint64_t>::max();

mpgpu::context virtual_devices() {
    mpgpu::context_options machine;
    machine.backend = mpgpu::backend::host;
    machine.topology = "beluga";
    return mpgpu::context(machine);
}

std::string text_of(const halo::grid &g, const std::vector<std::size_t> &sizes,
                    std::optional<std::uint64_t> direct_pieces) {
    std::string text = "direct_pieces " + (direct_pieces ? std::to_string(*direct_pieces) : "measured") + ", reach " +
                       std::to_string(static_cast<int>(g.reach)) + ", variables of";
    for (const std::size_t bytes : sizes) {
        text += " " + std::to_string(bytes);
    }
    for (std::size_t d = 0; d < 3; ++d) {
        text += "; cells " + std::to_string(g.cells.at(d)) + ", ranks " + std::to_string(g.ranks.at(d)) + ", ghost " +
                std::to_string(g.ghost.at(d)) + (g.periodic.at(d) ? ", periodic" : "");
    }
    return text;
}

/// Arrays of all ranks of a grid. Rank r uses GPU r modulo the number of GPUs.
struct mesh {
    mesh(const mpgpu::context &ctx, const halo::grid &g, const std::vector<std::size_t> &sizes) : grid(g) {
        for (int rank = 0; rank < halo::rank_count(g); ++rank) {
            variables.emplace_back();
            arrays.emplace_back();
            for (const std::size_t bytes : sizes) {
                const device where = device::gpu(rank % ctx.devices().gpus);
                const std::size_t elements = reference::elements(g, rank);
                variables.back().emplace_back(ctx, where, elements * bytes);
                arrays.back().push_back({variables.back().back().data(), where, bytes, elements});
            }
        }
    }

    /// Sets all computed cells to new values, and all ghost cells to a value that no exchange may leave in place.
    void fill(std::uint64_t cycle) {
        for (int rank = 0; rank < halo::rank_count(grid); ++rank) {
            reference::fill(grid, rank, arrays.at(static_cast<std::size_t>(rank)), cycle);
        }
    }

    [[nodiscard]] std::string first_difference(std::uint64_t cycle) const {
        for (int rank = 0; rank < halo::rank_count(grid); ++rank) {
            std::string found =
                reference::first_difference(grid, rank, arrays.at(static_cast<std::size_t>(rank)), cycle);
            if (!found.empty()) {
                return found;
            }
        }
        return {};
    }

    halo::grid grid;
    std::vector<std::vector<mpgpu::memory>> variables;
    std::vector<halo::rank_arrays> arrays;
};

template <class Run> void check_cycles(mesh &all, const mpgpu::stream &stream, std::uint64_t cycles, const Run &run) {
    for (std::uint64_t cycle = 1; cycle <= cycles; ++cycle) {
        // The cells are set in stream order, so that only the stream orders the exchange after this work.
        stream.launch_host([&all, cycle] { all.fill(cycle); });
        run(stream);
        stream.synchronize();
        const std::string difference = all.first_difference(cycle);
        REQUIRE_MESSAGE(difference.empty(), difference);
    }
}

} // namespace

TEST_CASE("every cell of random decompositions is as in a mesh of one piece, over hundreds of cycles") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(1));
    std::mt19937 random(20261121);
    std::uint64_t direct_bytes = 0;
    std::uint64_t packed_bytes = 0;
    for (int run = 0; run < 60; ++run) {
        const std::pair<halo::grid, std::vector<std::size_t>> problem = reference::random_problem(random);
        const halo::grid &g = problem.first;
        const std::vector<std::size_t> &sizes = problem.second;
        const auto direct_pieces =
            std::array<std::optional<std::uint64_t>, 5>{0, 1, 5, never_pack, std::nullopt}.at(random() % 5);
        halo::options how;
        how.direct_pieces = direct_pieces;
        how.pushed = direct_pieces ? std::nullopt : std::array<std::optional<bool>, 3>{true, false}.at(random() % 3);
        INFO(text_of(g, sizes, direct_pieces), how.pushed ? (*how.pushed ? ", pushed" : ", not pushed") : "");
        mesh all(ctx, g, sizes);
        halo::plan halo(ctx, g, all.arrays, how);
        CHECK(halo.pushed() == how.pushed.value_or(halo.pushed() && !direct_pieces));
        CHECK((!halo.pushed() || halo.direct_bytes() == 0));
        check_cycles(all, stream, 5, [&](const mpgpu::stream &s) { halo.exchange(s); });
        CHECK(halo.direct_bytes() + halo.packed_bytes() == reference::exchanged_bytes(g, sizes));
        CHECK((!direct_pieces || halo.direct_pieces() == *direct_pieces));
        CHECK((halo.direct_pieces() != 0 || halo.direct_bytes() == 0));
        CHECK((halo.direct_pieces() != never_pack || halo.packed_bytes() == 0));
        direct_bytes += halo.direct_bytes();
        packed_bytes += halo.packed_bytes();
    }
    CHECK(direct_bytes > 0);
    CHECK(packed_bytes > 0);
}

TEST_CASE("one plan serves hundreds of exchanges, enqueued without waiting, each with new values") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::grid g;
    g.cells = {11, 7, 9};
    g.ranks = {2, 1, 3};
    g.periodic = {true, true, false};
    g.ghost = {2, 1, 3};
    mesh all(ctx, g, {8, 4});
    halo::plan halo(ctx, g, all.arrays);
    std::vector<std::string> differences;
    constexpr std::uint64_t cycles = 300;
    for (std::uint64_t cycle = 1; cycle <= cycles; ++cycle) {
        stream.launch_host([&all, cycle] { all.fill(cycle); });
        halo.exchange(stream);
        stream.launch_host([&all, &differences, cycle] { differences.push_back(all.first_difference(cycle)); });
    }
    stream.synchronize();
    REQUIRE(differences.size() == cycles);
    for (const std::string &difference : differences) {
        REQUIRE_MESSAGE(difference.empty(), difference);
    }
}

TEST_CASE("between start and finish, work runs that the exchange does not wait for") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    const mpgpu::stream other(ctx, device::gpu(2));
    halo::grid g;
    g.cells = {8, 8, 8};
    g.ranks = {1, 2, 2};
    g.periodic = {true, true, true};
    g.ghost = {1, 1, 1};
    mesh all(ctx, g, {8});
    halo::plan halo(ctx, g, all.arrays);

    stream.launch_host([&all] { all.fill(1); });
    halo.start(stream);
    // Work that overlaps with the exchange continues in `stream`. Work that needs only the exchange may be enqueued in
    // another stream.
    std::uint64_t overlapped = 0;
    stream.launch_host([&overlapped] { ++overlapped; });
    halo.finish(other);
    other.synchronize();
    CHECK(all.first_difference(1).empty());
    halo.finish(stream);
    stream.synchronize();
    CHECK(overlapped == 1);

    // Exchanges in different streams still run in order, although there is no finish between them.
    for (std::uint64_t cycle = 2; cycle < 100; ++cycle) {
        const mpgpu::stream &now = cycle % 2 == 0 ? stream : other;
        now.launch_host([&all, cycle] { all.fill(cycle); });
        halo.start(now);
        halo.finish(now);
        halo.finish(cycle % 2 == 0 ? other : stream);
    }
    other.synchronize();
    CHECK(all.first_difference(99).empty());
}

TEST_CASE("what lies in one piece goes straight into the ghost cells, and messages are one transfer for each pair") {
    const mpgpu::context ctx = virtual_devices();
    halo::grid g;
    g.cells = {100, 1, 1};
    g.ranks = {4, 1, 1};
    g.ghost = {2, 0, 0};
    mesh line(ctx, g, {8, 4});
    halo::options single_pieces;
    single_pieces.direct_pieces = 1;
    const halo::plan one(ctx, g, line.arrays, single_pieces);
    CHECK(one.packed_bytes() == 0);
    CHECK(one.direct_bytes() == 6 * 2 * (8 + 4));
    REQUIRE(one.transfers() != nullptr);
    CHECK(one.transfers()->info().bytes == one.direct_bytes());

    g = {};
    g.cells = {16, 16, 16};
    g.ranks = {2, 1, 1};
    g.periodic = {true, false, false};
    g.ghost = {1, 1, 1};
    mesh cube(ctx, g, {8, 4});
    const halo::plan two(ctx, g, cube.arrays, single_pieces);
    CHECK(two.direct_bytes() == 0);
    CHECK(two.packed_bytes() == 2 * 2 * 16 * 16 * (8 + 4)); // both faces in x of both ranks
    REQUIRE(two.transfers() != nullptr);
    CHECK(two.transfers()->describe().find("2 transfers") != std::string::npos);
}

TEST_CASE("left open, the form is the fastest of those that differ, and the description has all readings") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    const auto check = [&](const halo::grid &g, const std::vector<std::uint64_t> &forms) {
        INFO(text_of(g, {8, 4}, std::nullopt));
        mesh all(ctx, g, {8, 4});
        all.fill(1000);
        halo::plan halo(ctx, g, all.arrays);
        check_cycles(all, stream, 5, [&](const mpgpu::stream &s) { halo.exchange(s); });
        const std::string text = halo.describe();
        INFO(text);
        CHECK(text.find("up to " + std::to_string(halo.direct_pieces()) + " piece") != std::string::npos);
        CHECK((text.find("measurement") != std::string::npos) == !forms.empty());
        if (forms.empty()) {
            CHECK(halo.measured().empty());
            CHECK(halo.direct_pieces() == 0);
            CHECK_FALSE(halo.pushed());
            return;
        }
        REQUIRE(halo.measured().size() == forms.size() + 1); // the last is the pushed form
        std::vector<double> seconds;
        std::size_t chosen = halo.measured().size();
        for (std::size_t i = 0; i <= forms.size(); ++i) {
            const halo::measured_form &form = halo.measured()[i];
            CHECK(form.pushed == (i == forms.size()));
            CHECK(form.direct_pieces == (form.pushed ? 0 : forms[i]));
            CHECK(form.seconds > 0);
            const std::string name = form.pushed ? "pushed: " : "up to " + std::to_string(forms[i]) + ": ";
            CHECK(text.find(", " + name) != (i == 0 ? 0 : std::string::npos));
            seconds.push_back(form.seconds);
            chosen = form.direct_pieces == halo.direct_pieces() && form.pushed == halo.pushed() ? i : chosen;
        }
        CHECK(chosen == halo::detail::fastest_of(seconds));
    };

    halo::grid g;
    g.cells = {100, 1, 1};
    g.ranks = {4, 1, 1};
    check(g, {}); // nothing to exchange
    g.ghost = {2, 0, 0};
    check(g, {0, 1});
    g = {};
    g.cells = {16, 12, 10};
    g.ranks = {1, 1, 2};
    g.ghost = {1, 1, 1};
    check(g, {0, 12}); // there are only faces in z, of 12 rows
    g.ranks = {2, 1, 2};
    check(g, {0, 60}); // also faces in x of 12 * 5 cells: all are in few pieces
    g.cells = {100, 100, 100};
    g.periodic = {true, true, true};
    check(g, {0, 1, 100}); // faces in x of 100 * 50 cells and two variables would be too many transfers
    // If the caller specifies the values, they are used, and nothing is measured.
    halo::options how;
    how.direct_pieces = 3;
    mesh all(ctx, g, {8, 4});
    const halo::plan asked(ctx, g, all.arrays, how);
    CHECK(asked.direct_pieces() == 3);
    CHECK(asked.measured().empty());
    how.pushed = true;
    CHECK_THROWS_WITH_AS(halo::plan(ctx, g, all.arrays, how), doctest::Contains("direct_pieces=3"),
                         mpgpu::argument_error);
    how.direct_pieces = 0;
    const halo::plan pushed(ctx, g, all.arrays, how);
    CHECK(pushed.pushed());
    CHECK(pushed.measured().empty());
    CHECK(pushed.transfers() == nullptr);
    CHECK(pushed.describe().find("pushed into the memory of the receivers") != std::string::npos);
}

TEST_CASE("forms that are compared take turns in rows, and neither a first exchange nor a lone one counts") {
    std::vector<std::pair<std::size_t, int>> asked;
    const std::vector<double> least = halo::detail::least_seconds(2, [&](std::size_t form, int exchanges) {
        asked.emplace_back(form, exchanges);
        const double alone = form == 0 ? 0.8e-3 : 0.1e-3;
        const double behind = form == 0 ? 0.8e-3 : 2.4e-3;
        return asked.size() <= 2 ? 0.0 : alone + (behind * (exchanges - 1));
    });
    CHECK(least[0] == doctest::Approx(0.8e-3));
    CHECK(least[1] == doctest::Approx(2.4e-3).epsilon(0.1));
    for (std::size_t i = 0; i < asked.size(); ++i) {
        CHECK(asked[i].first == i % 2);
        CHECK(asked[i].second == (i < 4 ? 1 : 16));
    }
    CHECK(asked.size() == 10); // 0.9 ms for single exchanges, 49 ms for each round: three exceed a tenth of a second
    // Slow forms of the exchange are measured in shorter series, and very slow forms in only two exchanges each.
    int longest = 0;
    static_cast<void>(halo::detail::least_seconds(2, [&](std::size_t, int exchanges) {
        longest = std::max(longest, exchanges);
        return 5e-3 * exchanges;
    }));
    CHECK(longest == 5);
    // A short delay of the machine during single exchanges does not shorten the series of measurements to one exchange.
    int calls = 0;
    longest = 0;
    const std::vector<double> held_up = halo::detail::least_seconds(2, [&](std::size_t, int exchanges) {
        longest = std::max(longest, exchanges);
        return ++calls == 3 ? 1.0 : 0.5e-3 * exchanges;
    });
    CHECK(longest == 16);
    CHECK(held_up == std::vector<double>{0.5e-3, 0.5e-3});
    int slow = 0;
    const std::vector<double> of_slow = halo::detail::least_seconds(3, [&](std::size_t, int exchanges) {
        slow += exchanges;
        return 5.0 * exchanges;
    });
    CHECK(slow == 6);
    CHECK(of_slow == std::vector<double>{5.0, 5.0, 5.0});
}

TEST_CASE("a form that is refused when it is measured is not asked again") {
    constexpr double never = std::numeric_limits<double>::infinity();
    int asked = 0;
    const std::vector<double> least = halo::detail::least_seconds(3, [&](std::size_t form, int exchanges) {
        asked += form == 1 ? 1 : 0;
        return form == 1 ? never : form == 2 && exchanges > 1 ? never : 1e-3 * exchanges;
    });
    CHECK(asked == 1);
    CHECK(least[0] == doctest::Approx(1e-3));
    CHECK(least[1] == never);
    CHECK(least[2] == never);
}

TEST_CASE("a form of more pieces is taken only where it is faster by more than readings differ") {
    constexpr double never = std::numeric_limits<double>::infinity();
    using halo::detail::fastest_of;
    CHECK(fastest_of({330, 318, 320}) == 0);
    CHECK(fastest_of({330, 318, 300}) == 2);
    CHECK(fastest_of({330, 300, 290}) == 1);
    CHECK(fastest_of({330, 300, 250}) == 2);
    CHECK(fastest_of({never, 300, 299}) == 1);
    CHECK(fastest_of({300, never, 200}) == 2);
    CHECK(fastest_of({300}) == 0);
}

TEST_CASE("where nothing packs, only forms that need none are tried") {
    halo::grid g;
    g.cells = {64, 64, 1};
    g.ranks = {2, 2, 1};
    g.ghost = {1, 1, 0};
    const halo::options open;
    const std::vector<std::size_t> sizes = {8};
    CHECK(halo::detail::limits_to_try(reference::connections_of(g, sizes), open, true, 4) ==
          std::vector<std::uint64_t>{0, 1, 32});
    CHECK(halo::detail::limits_to_try(reference::connections_of(g, sizes), open, false, 4) ==
          std::vector<std::uint64_t>{32});
    g.cells = {64, 64000, 1};
    CHECK(halo::detail::limits_to_try(reference::connections_of(g, sizes), open, false, 4) ==
          std::vector<std::uint64_t>{1}); // and is refused
    g.ranks = {1, 4, 1};
    g.ghost = {0, 1, 0};
    CHECK(halo::detail::limits_to_try(reference::connections_of(g, sizes), open, false, 4) ==
          std::vector<std::uint64_t>{1});
    CHECK(halo::detail::limits_to_try(reference::connections_of(g, sizes), open, true, 4) ==
          std::vector<std::uint64_t>{0, 1});
    g.cells = {6400, 6400, 1};
    g.ranks = {8, 1, 1};
    g.ghost = {1, 0, 0};
    CHECK(halo::detail::limits_to_try(reference::connections_of(g, sizes), open, true, 8) ==
          std::vector<std::uint64_t>{0});
    CHECK(halo::detail::limits_to_try(reference::connections_of(g, sizes), open, true, 1) ==
          std::vector<std::uint64_t>{0, 6400}); // eight nodes
}

TEST_CASE("a rank that is its own neighbour, and one that has none") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::grid g;
    g.cells = {4, 3, 5};
    g.ghost = {3, 2, 1};
    for (const bool periodic : {true, false}) {
        g.periodic = {periodic, periodic, periodic};
        mesh all(ctx, g, {4});
        const std::uint64_t exchanged = reference::exchanged_bytes(g, {4});
        CHECK((exchanged > 0) == periodic);
        // The last form is not specified, so measurements choose the fastest form.
        for (const std::optional<std::uint64_t> direct_pieces :
             std::array<std::optional<std::uint64_t>, 3>{0, never_pack, std::nullopt}) {
            halo::options how;
            how.direct_pieces = direct_pieces;
            INFO(text_of(g, {4}, direct_pieces));
            halo::plan halo(ctx, g, all.arrays, how);
            CHECK(halo.packed_bytes() + halo.direct_bytes() == exchanged);
            CHECK((halo.direct_pieces() != 0 || halo.direct_bytes() == 0));
            CHECK((halo.direct_pieces() != never_pack || halo.packed_bytes() == 0));
            check_cycles(all, stream, 3, [&](const mpgpu::stream &s) { halo.exchange(s); });
        }
    }
}

TEST_CASE("variables of any trivially copyable type") {
    struct state {
        double pressure;
        float velocity[3];
        std::uint8_t material;
    };
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::grid g;
    g.cells = {6, 6, 1};
    g.ranks = {2, 1, 1};
    g.ghost = {1, 1, 0};
    std::vector<mpgpu::buffer<state>> cells;
    std::vector<halo::rank_arrays> arrays;
    for (int rank = 0; rank < 2; ++rank) {
        cells.emplace_back(ctx, device::gpu(rank), std::size_t{40}); // 5 x 8
        arrays.push_back({halo::array_of(cells.back())});
        for (std::size_t i = 0; i < cells.back().size(); ++i) {
            cells.back().data()[i] = {double(i), {float(rank), 0, 0}, 7};
        }
    }
    halo::plan halo(ctx, g, arrays);
    halo.exchange(stream);
    stream.synchronize();
    const state &last = cells[0].data()[15 + 4]; // of row 3, the ghost cell of each rank
    const state &first = cells[1].data()[15];
    CHECK(last.velocity[0] == 1);
    CHECK(last.pressure == 15 + 1);
    CHECK(first.pressure == 15 + 3);
    CHECK(first.material == 7);
}

TEST_CASE("a copier of the caller's is given every piece, and launched in each exchange") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::grid g;
    g.cells = {6, 6, 6};
    g.ranks = {2, 2, 1};
    g.periodic = {true, true, true};
    g.ghost = {1, 1, 1};
    mesh all(ctx, g, {8, 4});
    int made = 0;
    int launched = 0;
    halo::options how;
    how.direct_pieces = 1;
    how.copy = [&](const mpgpu::context &context, device, mpgpu::array_view<const halo::piece> pieces,
                   halo::direction way) -> halo::launch_function {
        ++made;
        for (const halo::piece &p : pieces) {
            REQUIRE(reinterpret_cast<std::uintptr_t>(p.message) % 16 == 0);
        }
        return [&launched, way, context = &context,
                kept = std::vector<halo::piece>(pieces.begin(), pieces.end())](mpgpu::stream_view s) {
            ++launched;
            context->launch_host(s, [kept, way] { halo::copy_on_cpu(kept, way); });
        };
    };
    halo::plan halo(ctx, g, all.arrays, how);
    CHECK(made == 8); // one pack and one unpack on each of four ranks
    check_cycles(all, stream, 10, [&](const mpgpu::stream &s) { halo.exchange(s); });
    CHECK(launched == 80);
}

TEST_CASE("a plan can be moved, and moved again, between exchanges, and so can its context") {
    std::optional<mpgpu::context> ctx; // outlives the others
    auto made = std::make_unique<mpgpu::context>(virtual_devices());
    const mpgpu::stream stream(*made, device::gpu(0));
    halo::grid g;
    g.cells = {9, 9, 1};
    g.ranks = {3, 1, 1};
    g.ghost = {1, 1, 0};
    mesh all(*made, g, {4});
    halo::plan first(*made, g, all.arrays);
    check_cycles(all, stream, 2, [&](const mpgpu::stream &s) { first.exchange(s); });
    ctx = std::move(*made);
    made.reset();
    std::vector<halo::plan> plans;
    plans.push_back(std::move(first));
    plans.emplace_back(*ctx, g, all.arrays);
    check_cycles(all, stream, 2, [&](const mpgpu::stream &s) { plans.front().exchange(s); });
}

TEST_CASE("a plan that is default-constructed or destroyed refuses exchanges until another is moved there") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::grid g;
    g.cells = {8, 8, 1};
    g.ranks = {2, 2, 1};
    g.ghost = {1, 1, 0};
    mesh all(ctx, g, {4});
    halo::plan plan;
    const auto refuses = [&] {
        CHECK_FALSE(plan);
        CHECK_THROWS_AS(plan.exchange(stream), mpgpu::argument_error);
        CHECK_THROWS_AS(plan.start(stream), mpgpu::argument_error);
        CHECK_THROWS_AS(plan.finish(stream), mpgpu::argument_error);
        CHECK_THROWS_AS(plan.destroy(), mpgpu::argument_error);
    };
    refuses();
    plan = halo::plan(ctx, g, all.arrays);
    CHECK(plan);
    check_cycles(all, stream, 2, [&](const mpgpu::stream &s) { plan.exchange(s); });
    plan.destroy();
    refuses();
}

TEST_CASE("a plane by aggregate assignment is one of one cell and one rank in z") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream stream(ctx, device::gpu(0));
    halo::grid plane;
    plane.cells = {9, 8};
    plane.ranks = {2, 2};
    plane.ghost = {2, 1};
    plane.periodic = {true, false};
    halo::grid same = plane;
    same.cells[2] = 1;
    same.ranks[2] = 1;
    CHECK(halo::rank_count(plane) == 4);
    for (int rank = 0; rank < 4; ++rank) {
        CHECK(halo::place_of(plane, rank) == halo::place_of(same, rank));
        CHECK(halo::array_extents(plane, rank) == halo::array_extents(same, rank));
    }
    mesh all(ctx, same, {8, 4});
    halo::plan halo(ctx, plane, all.arrays);
    check_cycles(all, stream, 3, [&](const mpgpu::stream &s) { halo.exchange(s); });
    halo::grid line;
    line.cells = {9};
    line.ranks = {3};
    CHECK(halo::rank_count(line) == 3);
    CHECK(halo::array_extents(line, 0) == std::array<std::int64_t, 3>{3, 1, 1});
}

TEST_CASE("what does not go together is refused with the value and the remedy") {
    const mpgpu::context ctx = virtual_devices();
    halo::grid good;
    good.cells = {8, 8, 1};
    good.ranks = {2, 2, 1};
    good.ghost = {2, 2, 0};
    mesh all(ctx, good, {8, 4});
    const auto refused = [&](const halo::grid &g, const std::vector<halo::rank_arrays> &arrays,
                             const std::string &words) {
        try {
            const halo::plan made(ctx, g, arrays);
            FAIL("accepted; expected: " << words);
        } catch (const mpgpu::argument_error &e) {
            INFO(e.what());
            CHECK(std::string(e.what()).find(words) != std::string::npos);
        }
    };

    halo::grid g = good;
    g.ghost = {5, 2, 0};
    refused(g, all.arrays,
            "ghost cells in x: 5: must be 0 to 4, the cells of the smallest rank there; use fewer ranks in that");
    g = good;
    g.ranks = {2, 9, 1};
    refused(g, all.arrays, "ranks in y: 9: must be 1 to 8");
    g = good;
    g.cells = {0, 8, 1};
    refused(g, all.arrays, "cells in x: 0: must be 1 to 2^40");
    g = good;
    g.cells = {8, 8, -1};
    refused(g, all.arrays, "cells in z: -1: must be 1 to 2^40");
    g = good;
    g.ranks = {0, 2, 1};
    refused(g, all.arrays, "ranks in x: 0: must be 1 to 8");
    g = good;
    g.cells = {std::int64_t{1} << 40, std::int64_t{1} << 40, 1};
    g.ranks = {65536, 65536, 1};
    refused(g, all.arrays, "more than 2^31 - 2 ranks");
    g = good;
    g.periodic = {false, false, true};
    g.ghost = {2, 2, 2};
    refused(g, all.arrays,
            "ghost cells in z: 2: must be 0 to 1, the cells of the smallest rank there; use fewer ghost "
            "cells or a larger mesh");
    g = good;
    g.reach = static_cast<halo::neighbours>(4);
    refused(g, all.arrays, "reach: 4");

    std::vector<halo::rank_arrays> arrays = all.arrays;
    arrays.pop_back();
    refused(good, arrays, "arrays of 3 ranks: the grid has 4");
    arrays = all.arrays;
    arrays[1].clear();
    refused(good, arrays, "rank 1 has no variables");
    arrays = all.arrays;
    arrays[2].pop_back();
    refused(good, arrays, "rank 2 has different variables from rank 0");
    arrays = all.arrays;
    --arrays[3][1].size;
    refused(good, arrays, "rank 3, variable 1: 63 elements: must be 8 x 8 x 1");
    arrays = all.arrays;
    arrays[0][1].location = device::gpu(3);
    refused(good, arrays, "rank 0, variable 1: is on device 3, variable 0 on device 0");
    arrays = all.arrays;
    arrays[0][0].data = nullptr;
    refused(good, arrays, "rank 0, variable 0: the address is null");
}
