// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests mpgpu.hpp alone: ownership, errors and arguments. A test double of the library counts handles.
#include "counting_library.hpp"

#include <mpgpu/mpgpu.hpp>

#include <doctest/doctest.h>

#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using counting::kind;
using mpgpu::device;

/// Checks at the end of every test that no handle is live and that none was destroyed twice.
struct balance {
    balance() = default;
    balance(const balance &) = delete;
    balance(balance &&) = delete;
    balance &operator=(const balance &) = delete;
    balance &operator=(balance &&) = delete;
    ~balance() {
        for (const kind what : {kind::context, kind::plan, kind::request, kind::stream, kind::event, kind::memory}) {
            CHECK(counting::live(what) == 0);
        }
        CHECK(counting::misuses() == misuses_);
    }

  private:
    int misuses_ = counting::misuses();
};

struct two_buffers {
    mpgpu::context ctx;
    mpgpu::buffer<int> src{ctx, device::gpu(0), 8};
    mpgpu::buffer<int> dst{ctx, device::gpu(1), 8};
    [[nodiscard]] mpgpu::plan plan() { return mpgpu::plan(ctx, {mpgpu::make_transfer(dst, src)}); }
};

/// Assigns an object to itself by a move. The reference prevents the compiler from detecting the self-move.
template <class T> void move_into_itself(T &object) {
    T &alias = object;
    object = std::move(alias);
}

} // namespace

TEST_CASE("every owning type gives its handle back once, whatever is moved where") {
    const balance balanced;
    two_buffers world;
    const auto exercise = [](kind what, auto make) {
        const int made = counting::made(what);
        const int live = counting::live(what);
        {
            auto first = make();
            auto second = make();
            CHECK(counting::live(what) == live + 2);
            const auto handle = first.get();

            auto third = std::move(first);
            CHECK_FALSE(first); // NOLINT(bugprone-use-after-move): a moved-from object is empty, by contract
            CHECK(third.get() == handle);

            second = std::move(third); // destroys its previous handle
            CHECK(counting::live(what) == live + 1);
            CHECK(second.get() == handle);
            CHECK_FALSE(third); // NOLINT(bugprone-use-after-move)

            move_into_itself(second);
            CHECK(second.get() == handle);
            CHECK(counting::live(what) == live + 1);

            first = std::move(second); // a moved-from object can be used again
            CHECK(first.get() == handle);
        }
        CHECK(counting::live(what) == live);
        CHECK(counting::made(what) == made + 2);
    };
    exercise(kind::context, [] { return mpgpu::context(); });
    exercise(kind::plan, [&] { return world.plan(); });
    exercise(kind::stream, [&] { return mpgpu::stream(world.ctx, device::gpu(0)); });
    exercise(kind::event, [&] { return mpgpu::event(world.ctx); });
    const mpgpu::plan plan = world.plan();
    exercise(kind::request, [&] { return plan.execute(mpgpu::stream_view::default_stream()); });
}

TEST_CASE("a borrowed context is not destroyed") {
    const balance balanced;
    const mpgpu::context owner;
    {
        mpgpu::context borrowed = mpgpu::context::borrow(owner.get());
        CHECK(borrowed.get() == owner.get());
        const mpgpu::stream stream(borrowed, device::gpu(0));
        const mpgpu::context moved = std::move(borrowed);
        CHECK(moved.get() == owner.get());
        CHECK_FALSE(borrowed); // NOLINT(bugprone-use-after-move): a moved-from object is empty, by contract
        borrowed = mpgpu::context();
        borrowed = mpgpu::context::borrow(owner.get()); // destroys its previous context
        CHECK(counting::live(kind::context) == 1);
    }
    CHECK(counting::live(kind::context) == 1);
    CHECK_FALSE(mpgpu::context::borrow(nullptr));
}

TEST_CASE("objects have their context wherever it, or what they were used with, is moved") {
    const balance balanced;
    std::optional<two_buffers> moved; // outlives the other objects
    auto made = std::make_unique<two_buffers>();
    mpgpu::plan plan = made->plan();
    mpgpu::stream stream(made->ctx, device::gpu(0));
    mpgpu::event event(made->ctx);
    mpgpu::request request = plan.execute(stream);
    stream.launch_host([] {});
    moved = std::move(*made);
    made.reset(); // an object that kept an old address would now read freed memory
    event.record(stream);
    stream.wait(event);
    stream.launch_host([] {});
    event.synchronize();
    stream.synchronize();
    plan.enqueue(stream);
    request.synchronize();
    moved->ctx.wait(stream, event);
    CHECK(moved->src.size() == 8);
}

TEST_CASE("a buffer owns memory, and its size goes where the memory goes") {
    const balance balanced;
    const mpgpu::context ctx;
    mpgpu::buffer<double> a(ctx, device::gpu(2), 5);
    CHECK(counting::last_bytes() == 5 * sizeof(double));
    CHECK(a.size() == 5);
    CHECK(a.size_bytes() == 5 * sizeof(double));
    CHECK(a.location() == device::gpu(2));

    double *const where = a.data();
    mpgpu::buffer<double> b = std::move(a);
    CHECK(b.data() == where);
    CHECK(b.size() == 5);
    CHECK(a.size() == 0); // NOLINT(bugprone-use-after-move)
    CHECK(a.data() == nullptr);

    move_into_itself(b);
    CHECK(b.data() == where);
    b = mpgpu::buffer<double>(ctx, device::host(), 2);
    CHECK(counting::live(kind::memory) == 1);
    CHECK(b.location().is_host());

    const auto shared = mpgpu::buffer<double>::shared(ctx, device::host(), 3);
    CHECK(counting::last_bytes() == 3 * sizeof(double));
    CHECK(shared.size() == 3);
    CHECK(counting::live(kind::memory) == 2);

    const mpgpu::buffer<double> none(ctx, device::gpu(0), 0);
    CHECK_FALSE(none);
    CHECK(counting::live(kind::memory) == 2);
}

TEST_CASE("a buffer that has a stream is freed in its order, or at once where that is refused") {
    const balance balanced;
    const mpgpu::context ctx;
    const mpgpu::stream stream(ctx, device::gpu(0));
    mpgpu::buffer<int> moved;
    {
        mpgpu::buffer<int> a(ctx, device::gpu(0), 4);
        a.set_stream(stream);
        moved = std::move(a); // its stream moves with it
    }
    CHECK(counting::freed_in() == nullptr);
    moved = {};
    CHECK(counting::freed_in() == stream.get());
    CHECK(counting::live(kind::memory) == 0);
    {
        mpgpu::buffer<int> a(ctx, device::gpu(0), 4);
        a.set_stream(stream);
        counting::fail_next(MP_ERROR_NOT_SUPPORTED, 0, "", "captured");
    }
    CHECK(counting::live(kind::memory) == 0);
}

TEST_CASE("a handle that is NULL is an empty object") {
    const mpgpu::context ctx;
    const auto told = [&](mp_status_t status, const char *argument, const char *text) {
        counting::fail_next(status, 0, argument, text);
        std::error_code ec;
        const mpgpu::stream none(ctx, device::gpu(0), ec);
        return mpgpu::last_error().message;
    };
    CHECK(told(MP_ERROR_INVALID_HANDLE, "plan", "plan is NULL") ==
          "plan is empty: create an object and move it there first");
    CHECK(told(MP_ERROR_INVALID_HANDLE, "plan", "plan was destroyed") == "plan was destroyed");
    CHECK(told(MP_ERROR_INVALID_ARGUMENT, "transfers", "transfers is NULL") == "transfers is NULL");
    CHECK(told(MP_ERROR_INTERNAL, "", "").empty());
}

TEST_CASE("more elements than bytes can be counted are not asked for as a small number of bytes") {
    const balance balanced;
    const mpgpu::context ctx;
    counting::fail_next(MP_ERROR_OUT_OF_MEMORY, 0, "bytes", "too many");
    CHECK_THROWS_AS(mpgpu::buffer<double>(ctx, device::gpu(0), std::numeric_limits<std::size_t>::max() / 8 + 2),
                    mpgpu::out_of_memory);
    CHECK(counting::last_bytes() == std::numeric_limits<std::uint64_t>::max());
}

TEST_CASE("objects that outlive their context are harmless") {
    int misuses = 0;
    {
        auto ctx = std::make_unique<mpgpu::context>();
        const mpgpu::stream stream(*ctx, device::gpu(0));
        const mpgpu::event event(*ctx);
        const mpgpu::buffer<int> memory(*ctx, device::gpu(0), 4);
        ctx.reset();
        CHECK(counting::live(kind::stream) == 0);
        CHECK_THROWS_AS(stream.synchronize(), mpgpu::argument_error);
        misuses = counting::misuses();
    }
    CHECK(counting::misuses() == misuses + 3); // the library refuses each, and the destructors report nothing
}

TEST_CASE("a moved-from object reports an invalid handle") {
    const balance balanced;
    const mpgpu::context ctx;
    mpgpu::stream stream(ctx, device::gpu(0));
    const mpgpu::stream taken = std::move(stream);
    std::error_code ec;
    stream.synchronize(ec); // NOLINT(bugprone-use-after-move)
    CHECK(ec == mpgpu::status::invalid_handle);

    mpgpu::event event(ctx);
    const mpgpu::event kept = std::move(event);
    taken.wait(event, ec); // NOLINT(bugprone-use-after-move)
    CHECK(ec == mpgpu::status::invalid_handle);
}

TEST_CASE("destroying a pending request forgets it and does not wait") {
    const balance balanced;
    two_buffers world;
    const mpgpu::plan plan = world.plan();
    const int waited = counting::waited();
    const int forgotten = counting::forgotten();
    { const mpgpu::request pending = plan.execute(mpgpu::stream_view::default_stream()); }
    CHECK(counting::forgotten() == forgotten + 1);
    CHECK(counting::waited() == waited);

    const int made = counting::made(kind::request);
    plan.enqueue(mpgpu::stream_view::default_stream());
    CHECK(counting::made(kind::request) == made); // no request is created
}

TEST_CASE("a request is empty once waited for or tested as done") {
    const balance balanced;
    two_buffers world;
    const mpgpu::plan plan = world.plan();
    mpgpu::request done = plan.execute(mpgpu::stream_view::default_stream());
    CHECK(done);
    done.synchronize();
    CHECK_FALSE(done);
    done.synchronize(); // an empty request returns immediately
    CHECK(done.test());

    mpgpu::request tested = plan.execute(mpgpu::stream_view::default_stream());
    counting::hold(true);
    CHECK_FALSE(tested.test());
    CHECK(tested);
    counting::hold(false);
    CHECK(tested.test());
    CHECK_FALSE(tested);
}

TEST_CASE("a failed call throws its class with status, driver code, argument and message") {
    const balance balanced;
    const mpgpu::context ctx;
    counting::fail_next(MP_ERROR_DRIVER, 719, "stream", "the launch failed: reset the device");
    try {
        const mpgpu::stream stream(ctx, device::gpu(0));
        FAIL("no exception");
    } catch (const mpgpu::driver_error &e) {
        CHECK(e.status() == mpgpu::status::driver);
        CHECK(e.code() == mpgpu::status::driver);
        CHECK(e.driver_code() == 719);
        CHECK(e.argument() == "stream");
        CHECK(std::string(e.what()) == "the launch failed: reset the device");
    }
}

TEST_CASE("each status has its exception") {
    const balance balanced;
    const mpgpu::context ctx;
    const auto thrown_for = [&](mp_status_t status, auto tag) {
        using expected = typename decltype(tag)::type;
        counting::fail_next(status, 0, "", "because");
        try {
            static_cast<void>(ctx.describe());
        } catch (const mpgpu::error &e) {
            return typeid(e) == typeid(expected) && static_cast<mp_status_t>(e.status()) == status &&
                   e.argument().empty();
        }
        return false;
    };
    struct as_invalid_argument {
        using type = mpgpu::argument_error;
    };
    struct as_out_of_memory {
        using type = mpgpu::out_of_memory;
    };
    struct as_not_supported {
        using type = mpgpu::not_supported;
    };
    struct as_configuration_error {
        using type = mpgpu::configuration_error;
    };
    struct as_driver_error {
        using type = mpgpu::driver_error;
    };
    struct as_data_corruption {
        using type = mpgpu::data_corruption;
    };
    struct as_internal_error {
        using type = mpgpu::internal_error;
    };
    CHECK(thrown_for(MP_ERROR_INVALID_ARGUMENT, as_invalid_argument{}));
    CHECK(thrown_for(MP_ERROR_INVALID_HANDLE, as_invalid_argument{}));
    CHECK(thrown_for(MP_ERROR_INVALID_DEVICE, as_invalid_argument{}));
    CHECK(thrown_for(MP_ERROR_INVALID_POINTER, as_invalid_argument{}));
    CHECK(thrown_for(MP_ERROR_OVERLAP, as_invalid_argument{}));
    CHECK(thrown_for(MP_ERROR_NO_ROUTE, as_not_supported{}));
    CHECK(thrown_for(MP_ERROR_OUT_OF_MEMORY, as_out_of_memory{}));
    CHECK(thrown_for(MP_ERROR_NOT_SUPPORTED, as_not_supported{}));
    CHECK(thrown_for(MP_ERROR_NO_DRIVER, as_not_supported{}));
    CHECK(thrown_for(MP_ERROR_DRIVER, as_driver_error{}));
    CHECK(thrown_for(MP_ERROR_TOPOLOGY, as_configuration_error{}));
    CHECK(thrown_for(MP_ERROR_ENVIRONMENT, as_configuration_error{}));
    CHECK(thrown_for(MP_ERROR_VERSION_MISMATCH, as_configuration_error{}));
    CHECK(thrown_for(MP_ERROR_DATA_CORRUPTION, as_data_corruption{}));
    CHECK(thrown_for(MP_ERROR_INTERNAL, as_internal_error{}));
}

TEST_CASE("the no-throw forms report the status, leave the object empty, and clear the code on success") {
    const balance balanced;
    std::error_code ec;
    counting::fail_next(MP_ERROR_TOPOLOGY, 0, "topology", "no such preset");
    const mpgpu::context none({}, ec);
    CHECK_FALSE(none);
    CHECK(ec == mpgpu::status::topology);
    CHECK(mpgpu::last_error().message == "no such preset");
    CHECK(mpgpu::last_error().argument == "topology");

    const mpgpu::context ctx({}, ec);
    CHECK(ctx);
    CHECK_FALSE(ec);

    counting::fail_next(MP_ERROR_OUT_OF_MEMORY, 0, "bytes", "device 0: out of memory");
    const mpgpu::buffer<int> memory(ctx, device::gpu(0), 8, ec);
    CHECK_FALSE(memory);
    CHECK(memory.size() == 0);
    CHECK(ec == std::errc::not_enough_memory);
    CHECK(ec.message() == "out of memory");
    CHECK(std::string(ec.category().name()) == "mpgpu");

    counting::fail_next(MP_ERROR_DRIVER, 1, "", "no");
    const mpgpu::stream stream(ctx, device::gpu(0), ec);
    CHECK_FALSE(stream);
    CHECK(ec == mpgpu::status::driver);
    counting::fail_next(MP_ERROR_DRIVER, 1, "", "no");
    const mpgpu::event event(ctx, ec);
    CHECK_FALSE(event);
    counting::fail_next(MP_ERROR_OVERLAP, 0, "transfers", "transfers 0 and 1 overlap");
    const mpgpu::plan plan(ctx, {}, {}, ec);
    CHECK_FALSE(plan);
    CHECK(ec == mpgpu::status::overlap);
    counting::fail_next(MP_ERROR_INTERNAL, 0, "", "no");
    CHECK(ctx.describe(mpgpu::description::text, ec).empty());
    CHECK(ec == mpgpu::status::internal);
    counting::fail_next(MP_ERROR_OUT_OF_MEMORY, 0, "", "no");
    ctx.probe({}, ec);
    CHECK(ec == mpgpu::status::out_of_memory);
    counting::fail_next(MP_ERROR_TOPOLOGY, 0, "context", "no");
    CHECK(ctx.probed(ec).empty());
    CHECK(ec == mpgpu::status::topology);
    ctx.probe({}, ec);
    CHECK_FALSE(ec);
    CHECK(ctx.probed() == "described");
}

TEST_CASE("a transfer takes addresses, devices and bytes from its two ends") {
    const balance balanced;
    two_buffers world;
    const mpgpu::transfer whole = mpgpu::make_transfer(world.dst, world.src);
    CHECK(whole.dst == world.dst.data());
    CHECK(whole.src == world.src.data());
    CHECK(whole.dst_device == 1);
    CHECK(whole.src_device == 0);
    CHECK(whole.bytes == 8 * sizeof(int));

    const mpgpu::buffer<int> &read_only = world.src;
    const mpgpu::transfer part = mpgpu::make_transfer(world.dst.subspan(6, 2), read_only.subspan(1, 2));
    CHECK(part.dst == world.dst.data() + 6);
    CHECK(part.src == world.src.data() + 1);
    CHECK(part.bytes == 2 * sizeof(int));

    std::vector<int> host(8); // memory of the caller
    const mpgpu::transfer out =
        mpgpu::make_transfer(mpgpu::device_span<int>(host, device::host()), std::as_const(world.src));
    CHECK(out.dst == host.data());
    CHECK(out.dst_device == MP_DEVICE_HOST);
}

TEST_CASE("a transfer between different sizes is refused, with both sizes") {
    const balance balanced;
    two_buffers world;
    try {
        static_cast<void>(mpgpu::make_transfer(world.dst.subspan(0, 7), world.src));
        FAIL("no exception");
    } catch (const mpgpu::argument_error &e) {
        CHECK(e.argument() == "dst");
        const std::string what = e.what();
        CHECK(what.find("8 elements") != std::string::npos);
        CHECK(what.find("destination of 7") != std::string::npos);
    }
    std::error_code ec;
    const mpgpu::transfer none = mpgpu::make_transfer(world.dst.subspan(0, 7), world.src, ec);
    CHECK(ec == std::errc::invalid_argument);
    CHECK(none.bytes == 0);
    static_cast<void>(mpgpu::make_transfer(world.dst, world.src, ec));
    CHECK_FALSE(ec);
}

TEST_CASE("a plan takes a list, a vector, an array or a span of transfers") {
    const balance balanced;
    two_buffers world;
    const mpgpu::transfer t = mpgpu::make_transfer(world.dst, world.src);
    const std::vector<mpgpu::transfer> vector(3, t);
    const mpgpu::transfer array[] = {t, t};
    CHECK(mpgpu::plan(world.ctx, {t}).info().bytes == t.bytes);
    CHECK(mpgpu::plan(world.ctx, {t, t, t, t}).info().bytes == 4 * t.bytes);
    CHECK(mpgpu::plan(world.ctx, vector).info().bytes == 3 * t.bytes);
    CHECK(mpgpu::plan(world.ctx, array).info().bytes == 2 * t.bytes);
    CHECK(mpgpu::plan(world.ctx, mpgpu::array_view<const mpgpu::transfer>(vector).subspan(1, 2)).info().bytes ==
          2 * t.bytes);
}

TEST_CASE("a plan is prepared for the stream that it is given") {
    const balance balanced;
    two_buffers world;
    const mpgpu::plan plan(world.ctx, {mpgpu::make_transfer(world.dst, world.src)});
    const mpgpu::stream stream(world.ctx, device::gpu(0));
    plan.prepare(stream);
    CHECK(counting::prepared_for() == stream.get());
    std::error_code ec;
    counting::fail_next(MP_ERROR_DRIVER, 0, "", "no");
    plan.prepare(stream, ec);
    CHECK(ec == mpgpu::status::driver);
}

TEST_CASE("counters of signals are a buffer that frees itself, and the host raises, reads and asks") {
    const balance balanced;
    const mpgpu::context ctx;
    mpgpu::signal_counters counters(ctx, 3);
    CHECK(counters.size() == 3);
    CHECK(counters.location() == device::host());
    CHECK(counting::last_bytes() == 24);
    const mpgpu::signal_value third = {counters.data() + 2, 4};
    CHECK_FALSE(ctx.is_reached(third));
    ctx.raise_from_host(third);
    CHECK(ctx.is_reached(third));
    CHECK(ctx.read_counter(third.counter) == 4);
    const mpgpu::signal_counters moved = std::move(counters);
    CHECK(moved.size() == 3);
    CHECK_FALSE(counters); // NOLINT(bugprone-use-after-move): tests a moved-from owner
    CHECK_FALSE(mpgpu::signal_counters(ctx, 0));
    CHECK_FALSE(mpgpu::signal_counters());
    std::error_code ec;
    counting::fail_next(MP_ERROR_NOT_SUPPORTED, 0, "", "no");
    const mpgpu::signal_counters none(ctx, 1, ec);
    CHECK(ec == mpgpu::status::not_supported);
    CHECK_FALSE(none);
}

TEST_CASE("options reach the library as the C structs want them") {
    const balance balanced;
    mpgpu::context_options machine;
    machine.topology = "beluga";
    machine.backend = mpgpu::backend::host;
    machine.staging_bytes = 1 << 20;
    machine.cache_plans = 9;
    machine.signal_wait = mpgpu::signal_wait::kernel;
    machine.host_threads = -1;
    machine.cache_graphs = 10;
    const mpgpu::context ctx(machine);
    CHECK(counting::last_topology() == "beluga");
    CHECK(counting::last_context_options().size == sizeof(mp_context_options_t));
    CHECK(counting::last_context_options().backend == MP_BACKEND_HOST);
    CHECK(counting::last_context_options().staging_bytes == 1 << 20);
    CHECK(counting::last_context_options().cache_plans == 9);
    CHECK(counting::last_context_options().signal_wait == MP_SIGNAL_WAIT_KERNEL);
    CHECK(counting::last_context_options().host_threads == -1);
    CHECK(counting::last_context_options().cache_graphs == 10);
    const mpgpu::context plain;
    CHECK(counting::last_context_options().host_threads == 0);
    CHECK(counting::last_context_options().signal_wait == MP_SIGNAL_WAIT_DEFAULT);
    CHECK(counting::last_context_options().topology == nullptr);

    mpgpu::plan_options how;
    CHECK_NOTHROW(mpgpu::plan(ctx, {}, how));
    CHECK(counting::last_plan_options().size == sizeof(mp_plan_options_t));
    CHECK(counting::last_plan_options().host_path == MP_DEFAULT);
    CHECK(counting::last_plan_options().adapt == MP_DEFAULT);
    CHECK(counting::last_plan_options().engine == MP_ENGINE_AUTO);
    how.engine = mpgpu::engine::graph;
    how.max_paths = 2;
    how.host_path = false;
    how.adapt = true;
    how.chunk_bytes = 3;
    how.min_bytes = 4;
    how.staging_bytes = 5;
    how.relay_chunks = 6;
    how.host_chunks = 7;
    CHECK_NOTHROW(mpgpu::plan(ctx, {}, how));
    CHECK(counting::last_plan_options().engine == MP_ENGINE_GRAPH);
    CHECK(counting::last_plan_options().max_paths == 2);
    CHECK(counting::last_plan_options().host_path == MP_OFF);
    CHECK(counting::last_plan_options().adapt == MP_ON);
    CHECK(counting::last_plan_options().chunk_bytes == 3);
    CHECK(counting::last_plan_options().min_bytes == 4);
    CHECK(counting::last_plan_options().staging_bytes == 5);
    CHECK(counting::last_plan_options().relay_chunks == 6);
    CHECK(counting::last_plan_options().host_chunks == 7);
    how.host_path = true;
    CHECK_NOTHROW(mpgpu::plan(ctx, {}, how));
    CHECK(counting::last_plan_options().host_path == MP_ON);
}

TEST_CASE("a description arrives whole, even one that grows between two calls, and even an empty one") {
    const balance balanced;
    const mpgpu::context ctx;
    counting::describe_as("short", "a text that has become longer in the meantime");
    CHECK(ctx.describe() == "a text that has become longer in the meantime");
    counting::describe_as("a text that has become shorter in the meantime", "short");
    CHECK(ctx.describe(mpgpu::description::json) == "short");
    counting::describe_as("", "");
    CHECK(ctx.describe().empty());
}

TEST_CASE("statistics are asked for with the right sizes") {
    const balance balanced;
    const mpgpu::context ctx;
    CHECK(ctx.statistics().executions == 7);
    CHECK(ctx.statistics(device::gpu(3)).streams == 13);
    CHECK(ctx.devices().gpus == 4);
    CHECK(ctx.devices().host_domains == 1);
    CHECK(ctx.backend() == mpgpu::backend::host);
    CHECK(mpgpu::version() == MP_VERSION);
}

TEST_CASE("a host task is run once and destroyed once, also when it could not be enqueued") {
    const balance balanced;
    const mpgpu::context ctx;
    const mpgpu::stream stream(ctx, device::gpu(0));
    const auto witness = std::make_shared<int>(0);
    stream.launch_host([witness] { ++*witness; });
    CHECK(*witness == 1);
    CHECK(witness.use_count() == 1);

    counting::fail_next(MP_ERROR_DRIVER, 0, "", "no");
    CHECK_THROWS_AS(stream.launch_host([witness] { ++*witness; }), mpgpu::driver_error);
    std::error_code ec;
    counting::fail_next(MP_ERROR_DRIVER, 0, "", "no");
    stream.launch_host([witness] { ++*witness; }, ec);
    CHECK(ec == mpgpu::status::driver);
    CHECK(*witness == 1);
    CHECK(witness.use_count() == 1);

    auto owned = std::make_unique<int>(5); // a move-only task
    int seen = 0;
    ctx.launch_host(mpgpu::stream_view::default_stream(),
                    [owned = std::move(owned), &seen]() mutable { seen = *owned; });
    CHECK(seen == 5);
}

TEST_CASE("a captured host task runs at every launch of the graph and is destroyed once, with the graph") {
    const balance balanced;
    const mpgpu::context ctx;
    const mpgpu::stream stream(ctx, device::gpu(0));
    const auto witness = std::make_shared<int>(0);
    for (const int launches : {3, 0}) {
        counting::capture();
        *witness = 0;
        stream.launch_host([witness, own = std::make_unique<int>(2)]() mutable { *witness += *own; });
        CHECK(*witness == 0);
        for (int launch = 0; launch < launches; ++launch) {
            counting::launch_captured();
        }
        CHECK(*witness == 2 * launches);
        CHECK(witness.use_count() == 2);
        counting::destroy_captured();
        CHECK(witness.use_count() == 1);
    }
    counting::capture();
    counting::fail_next(MP_ERROR_NOT_SUPPORTED, 0, "", "the driver is too old");
    CHECK_THROWS_AS(stream.launch_host([witness] { ++*witness; }), mpgpu::not_supported);
    CHECK(witness.use_count() == 1);
    counting::destroy_captured();
}

TEST_CASE("the log callback gets what the caller gave") {
    int calls = 0;
    mpgpu::set_log_callback(
        MP_LOG_WARN,
        [](mp_log_level_t level, const char *, const char *, void *user) {
            *static_cast<int *>(user) += level == MP_LOG_WARN ? 1 : 0;
        },
        &calls);
    CHECK(calls == 1);
    mpgpu::set_log_callback(MP_LOG_OFF, nullptr, nullptr);
    CHECK(calls == 1);
}
