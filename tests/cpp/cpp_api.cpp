// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests the C++ API with the real library on virtual devices. The tests check the behaviour that the documentation
// promises.
#include <mpgpu/mpgpu.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace {

using mpgpu::device;

mpgpu::context virtual_devices(const char *topology = "beluga") {
    mpgpu::context_options options;
    options.backend = mpgpu::backend::host;
    options.topology = topology;
    return mpgpu::context(options);
}

template <class T> void fill(mpgpu::buffer<T> &buffer, T first) {
    std::iota(buffer.data(), buffer.data() + buffer.size(), first);
}

template <class T> bool equal(const mpgpu::buffer<T> &a, const mpgpu::buffer<T> &b) {
    return a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data());
}

/// Blocks a stream until the gate is opened, so that a test can examine the work that is enqueued after it.
class gate {
  public:
    explicit gate(const mpgpu::stream &stream) {
        stream.launch_host([opened = opened_.get_future().share()] { opened.wait(); });
    }
    void open() { opened_.set_value(); }

  private:
    std::promise<void> opened_;
};

} // namespace

TEST_CASE("a plan moves the bytes of all its transfers, as often as it is executed") {
    const mpgpu::context ctx = virtual_devices();
    constexpr std::size_t size = 1'000'003;
    mpgpu::buffer<std::uint32_t> a(ctx, device::gpu(0), size);
    mpgpu::buffer<std::uint32_t> b(ctx, device::gpu(1), size);
    mpgpu::buffer<std::uint32_t> c(ctx, device::host(), size);
    const mpgpu::stream stream(ctx, device::gpu(0));
    const mpgpu::plan plan(ctx, {mpgpu::make_transfer(b, a), mpgpu::make_transfer(c, a)});
    for (std::uint32_t step = 1; step <= 3; ++step) {
        fill(a, step * 1000);
        mpgpu::request done = plan.execute(stream);
        done.synchronize();
        CHECK_FALSE(done);
        CHECK(equal(a, b));
        CHECK(equal(a, c));
    }
    CHECK(ctx.statistics().executions == 3);
    CHECK(ctx.statistics().bytes == 6 * a.size_bytes());
}

TEST_CASE("the device of an address is found on request, and a named one that is wrong is refused") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<std::uint32_t> a(ctx, device::gpu(3), 777);
    fill<std::uint32_t>(a, 42);
    std::vector<std::uint32_t> own(777);
    const mpgpu::device_span<std::uint32_t> from({a.data(), a.size()}, device::automatic());
    const mpgpu::device_span<std::uint32_t> to(own, device::automatic());
    const mpgpu::plan plan(ctx, {mpgpu::make_transfer(to, from)});
    plan.execute(mpgpu::stream_view::default_stream()).synchronize();
    CHECK(std::equal(own.begin(), own.end(), a.data()));
    const mpgpu::device_span<std::uint32_t> wrong({a.data(), a.size()}, device::gpu(1));
    std::error_code ec;
    const mpgpu::plan refused(ctx, {mpgpu::make_transfer(to, wrong)}, {}, ec);
    CHECK(ec == mpgpu::status::invalid_pointer);
}

TEST_CASE("only the elements of the spans are written") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<std::uint16_t> src(ctx, device::gpu(2), 100);
    mpgpu::buffer<std::uint16_t> dst(ctx, device::gpu(3), 100);
    fill<std::uint16_t>(src, 1000);
    fill<std::uint16_t>(dst, 1);
    mpgpu::plan(ctx, {mpgpu::make_transfer(dst.subspan(11, 7), src.subspan(90, 7))})
        .execute(mpgpu::stream_view::default_stream())
        .synchronize();
    for (std::size_t i = 0; i < dst.size(); ++i) {
        CHECK(dst.data()[i] == (i >= 11 && i < 18 ? 1090 + i - 11 : 1 + i));
    }
}

TEST_CASE("an execution starts after earlier work of its stream and later work starts after it") {
    const mpgpu::context ctx = virtual_devices();
    constexpr std::size_t size = 1 << 16;
    mpgpu::buffer<int> a(ctx, device::gpu(0), size);
    mpgpu::buffer<int> b(ctx, device::gpu(1), size);
    const mpgpu::stream stream(ctx, device::gpu(0));
    const mpgpu::plan there(ctx, {mpgpu::make_transfer(b, a)});
    const mpgpu::plan back(ctx, {mpgpu::make_transfer(a, b)});
    fill(a, 0);
    gate closed(stream);
    for (int step = 0; step < 20; ++step) {
        stream.launch_host([&] { std::for_each(a.data(), a.data() + size, [](int &x) { x += 1; }); });
        there.enqueue(stream);
        stream.launch_host([&] { std::for_each(b.data(), b.data() + size, [](int &x) { x += 1; }); });
        back.enqueue(stream);
    }
    closed.open();
    stream.synchronize();
    bool right = true;
    for (std::size_t i = 0; i < size; ++i) {
        right = right && a.data()[i] == static_cast<int>(i) + 40;
    }
    CHECK(right);
}

TEST_CASE("execute returns and a request is pending while the stream is held") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<int> a(ctx, device::gpu(0), 1000);
    mpgpu::buffer<int> b(ctx, device::gpu(1), 1000);
    fill(a, 5);
    fill(b, 0);
    const mpgpu::stream stream(ctx, device::gpu(1));
    const mpgpu::plan plan(ctx, {mpgpu::make_transfer(b, a)});
    gate closed(stream);
    mpgpu::request waited = plan.execute(stream);
    { const mpgpu::request forgotten = plan.execute(stream); } // returns, although nothing can run
    CHECK_FALSE(waited.test());
    CHECK(waited);
    CHECK(b.data()[0] == 0);
    closed.open();
    waited.synchronize();
    CHECK(equal(a, b));
}

TEST_CASE("events order streams of different devices, recorded again and again") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream first(ctx, device::gpu(0));
    const mpgpu::stream second(ctx, device::gpu(1));
    mpgpu::event ping(ctx);
    mpgpu::event pong(ctx);
    std::vector<int> log; // written by both streams alternately: a race here is a race in the library
    for (int turn = 0; turn < 50; ++turn) {
        first.wait(pong);
        first.launch_host([&log, turn] { log.push_back(2 * turn); });
        ping.record(first);
        second.wait(ping);
        second.launch_host([&log, turn] { log.push_back(2 * turn + 1); });
        pong.record(second);
    }
    pong.synchronize();
    CHECK(log.size() == 100);
    CHECK(std::is_sorted(log.begin(), log.end()));
}

TEST_CASE("the default stream takes the calls of the context") {
    const mpgpu::context ctx = virtual_devices();
    const mpgpu::stream_view stream = mpgpu::stream_view::default_stream();
    const mpgpu::stream other(ctx, device::gpu(0));
    mpgpu::event event(ctx);
    std::string log;
    ctx.launch_host(stream, [&log] { log += 'a'; });
    event.record(stream);
    other.wait(event);
    other.launch_host([&log] { log += 'b'; });
    event.record(other);
    ctx.wait(stream, event);
    ctx.launch_host(stream, [&log] { log += 'c'; });
    ctx.synchronize(stream);
    CHECK(log == "abc");
}

TEST_CASE("freeing a buffer waits for the copies that use it") {
    const mpgpu::context ctx = virtual_devices();
    constexpr std::size_t size = 1 << 20;
    mpgpu::buffer<int> b(ctx, device::gpu(1), size);
    {
        mpgpu::buffer<int> a(ctx, device::gpu(0), size);
        fill(a, 7);
        const mpgpu::plan plan(ctx, {mpgpu::make_transfer(b, a)});
        plan.enqueue(mpgpu::stream_view::default_stream());
    }
    CHECK(b.data()[0] == 7);
    CHECK(b.data()[size - 1] == 7 + static_cast<int>(size) - 1);
}

TEST_CASE("a buffer with a stream is freed behind its work, and nobody waits") {
    const mpgpu::context ctx = virtual_devices();
    constexpr std::size_t size = 1 << 20;
    mpgpu::buffer<int> b(ctx, device::gpu(1), size);
    const mpgpu::stream stream(ctx, device::gpu(0));
    gate closed(stream);
    {
        mpgpu::buffer<int> a(ctx, device::gpu(0), size);
        a.set_stream(stream);
        fill(a, 7);
        mpgpu::plan(ctx, {mpgpu::make_transfer(b, a)}).enqueue(stream);
    } // would not return if the call waited
    CHECK(ctx.statistics(device::gpu(0)).allocated_bytes == 0);
    closed.open();
    stream.synchronize();
    CHECK(b.data()[0] == 7);
    CHECK(b.data()[size - 1] == 7 + static_cast<int>(size) - 1);
}

TEST_CASE("a plan can be executed from many threads at once") {
    const mpgpu::context ctx = virtual_devices();
    constexpr std::size_t size = 200'000;
    mpgpu::buffer<int> src(ctx, device::gpu(0), size);
    fill(src, 3);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    threads.reserve(4);
    for (int rank = 0; rank < 4; ++rank) {
        threads.emplace_back([&, rank] {
            const mpgpu::stream stream(ctx, device::gpu(rank));
            mpgpu::buffer<int> dst(ctx, device::gpu(rank == 0 ? 1 : rank), size);
            mpgpu::plan_options options;
            options.min_bytes = 1; // several paths, whose staging memory the threads share
            const mpgpu::plan plan(ctx, {mpgpu::make_transfer(dst, src)}, options);
            for (int step = 0; step < 20; ++step) {
                std::fill_n(dst.data(), size, -1);
                plan.execute(stream).synchronize();
                wrong += equal(dst, src) ? 0 : 1;
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    CHECK(wrong == 0);
}

TEST_CASE("the same request again is found in the plan cache") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<double> a(ctx, device::gpu(0), 64);
    mpgpu::buffer<double> b(ctx, device::gpu(1), 64);
    for (int i = 0; i < 5; ++i) {
        const mpgpu::plan plan(ctx, {mpgpu::make_transfer(b, a)});
    }
    CHECK(ctx.statistics().plan_cache_misses == 1);
    CHECK(ctx.statistics().plan_cache_hits == 4);
}

TEST_CASE("options change the plan") {
    const mpgpu::context ctx = virtual_devices();
    constexpr std::size_t size = 64 << 20;
    mpgpu::memory a(ctx, device::gpu(0), size);
    mpgpu::memory b(ctx, device::gpu(1), size);
    const mpgpu::transfer transfer = mpgpu::make_transfer(b, a);
    const mpgpu::plan free_choice(ctx, {transfer});
    mpgpu::plan_options options;
    options.max_paths = 1;
    const mpgpu::plan one(ctx, {transfer}, options);
    CHECK(one.info().paths == 1);
    CHECK(free_choice.info().paths > 1); // beluga: four GPUs wired to each other
    CHECK(free_choice.info().predicted_seconds < one.info().predicted_seconds);
    CHECK(free_choice.info().bytes == size);
    CHECK(free_choice.info().staging_bytes > 0);

    options.max_paths = 4;
    options.host_path = false;
    options.staging_bytes = 1 << 20;
    const mpgpu::plan bounded(ctx, {transfer}, options);
    CHECK(bounded.info().staging_bytes <= (1 << 20));
    CHECK(bounded.info().paths <= 3);
}

TEST_CASE("a context and a plan describe themselves in text and in JSON") {
    const mpgpu::context ctx = virtual_devices();
    CHECK(ctx.describe().find("beluga") != std::string::npos);
    CHECK(ctx.describe(mpgpu::description::json).front() == '{');
    CHECK(ctx.backend() == mpgpu::backend::host);
    CHECK(ctx.devices().gpus == 4);
    CHECK(ctx.devices().host_domains >= 1);
    mpgpu::memory a(ctx, device::gpu(0), 4096);
    mpgpu::memory b(ctx, device::gpu(1), 4096);
    const mpgpu::plan plan(ctx, {mpgpu::make_transfer(b, a)});
    CHECK_FALSE(plan.describe().empty());
    CHECK(plan.describe().find('\0') == std::string::npos);
    const std::string json = plan.describe(mpgpu::description::json);
    CHECK(json.front() == '{');
    CHECK(json.back() == '}');
}

TEST_CASE("a probe gives a topology file, and writes none when told not to") {
    const mpgpu::context ctx = virtual_devices();
    CHECK_THROWS_AS(static_cast<void>(ctx.probed()), mpgpu::configuration_error);
    mpgpu::probe_options options;
    options.quick = true;
    options.keep = false;
    ctx.probe(options);
    const std::string text = ctx.probed();
    CHECK(text.find("[probe]") != std::string::npos);
    CHECK(text.find("virtual-3") != std::string::npos);
    std::error_code ec;
    options.keep = true;
    options.file = "/dev/null/no/such/place.toml";
    ctx.probe(options, ec);
    CHECK(ec == mpgpu::status::topology);
    CHECK(mpgpu::last_error().message.find("/dev/null/no/such/place.toml") != std::string::npos);
}

TEST_CASE("mistakes are reported with what the caller can act on") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<int> a(ctx, device::gpu(0), 100);
    mpgpu::buffer<int> b(ctx, device::gpu(1), 100);

    try {
        const mpgpu::plan overlapping(ctx, {mpgpu::make_transfer(b.subspan(0, 60), a.subspan(0, 60)),
                                            mpgpu::make_transfer(b.subspan(50, 50), a.subspan(50, 50))});
        FAIL("no exception");
    } catch (const mpgpu::argument_error &e) {
        CHECK(e.status() == mpgpu::status::overlap);
        CHECK(e.argument() == "transfers");
        CHECK(std::string(e.what()).find('1') != std::string::npos);
    }
    try {
        const mpgpu::buffer<int> nowhere(ctx, device::gpu(40), 1);
        FAIL("no exception");
    } catch (const mpgpu::argument_error &e) {
        CHECK(e.code() == mpgpu::status::invalid_device);
        CHECK(std::string(e.what()).find("40") != std::string::npos);
    }
    CHECK_THROWS_AS(virtual_devices("atlantis"), mpgpu::configuration_error);
    CHECK_THROWS_AS(mpgpu::buffer<double>(ctx, device::gpu(0), static_cast<std::size_t>(-1)), mpgpu::out_of_memory);

    std::error_code ec;
    const mpgpu::buffer<int> none(ctx, device::gpu(-1), 1, ec);
    CHECK(ec == mpgpu::status::invalid_device);
    CHECK_FALSE(none);
    CHECK_FALSE(mpgpu::last_error().message.empty());
    const mpgpu::buffer<int> some(ctx, device::gpu(0), 1, ec);
    CHECK_FALSE(ec);
}

TEST_CASE("an object that is default-constructed refuses calls until one is moved there") {
    const mpgpu::context ctx;
    const mpgpu::stream_view order = mpgpu::stream_view::default_stream();
    mpgpu::stream stream;
    mpgpu::event event;
    mpgpu::plan plan;
    mpgpu::node node;
    mpgpu::messenger messages;
    const bool any = stream || event || plan || node || messages;
    CHECK_FALSE(any);
    CHECK_THROWS_AS(static_cast<void>(mpgpu::stream_view(stream)), mpgpu::argument_error);
    const auto refused = [](auto call) {
        std::error_code ec;
        call(ec);
        CHECK(ec == mpgpu::status::invalid_handle);
    };
    refused([&](std::error_code &ec) { stream.synchronize(ec); });
    refused([&](std::error_code &ec) { stream.wait(event, ec); });
    refused([&](std::error_code &ec) { stream.launch_host([] {}, ec); });
    refused([&](std::error_code &ec) { event.record(order, ec); });
    refused([&](std::error_code &ec) { event.synchronize(ec); });
    refused([&](std::error_code &ec) { ctx.wait(order, event, ec); });
    refused([&](std::error_code &ec) { plan.prepare(order, ec); });
    refused([&](std::error_code &ec) { plan.enqueue(order, ec); });
    refused([&](std::error_code &ec) { static_cast<void>(plan.execute(order, ec)); });
    refused([&](std::error_code &ec) { plan.arm(order, ec); });
    refused([&](std::error_code &ec) { plan.synchronize(0, ec); });
    refused([&](std::error_code &ec) { static_cast<void>(plan.trigger(0, 0, ec)); });
    refused([&](std::error_code &ec) { static_cast<void>(plan.describe(mpgpu::description::text, ec)); });
    refused([&](std::error_code &ec) { static_cast<void>(plan.info(ec)); });
    refused([&](std::error_code &ec) { static_cast<void>(node.plan({}, {}, mpgpu::plan_options{}, ec)); });
    refused([&](std::error_code &ec) { static_cast<void>(node.plan({}, {}, mpgpu::partitioning{}, {}, ec)); });
    refused([&](std::error_code &ec) { node.fail("no node", ec); });
    refused([&](std::error_code &ec) { static_cast<void>(mpgpu::messenger(node, {}, ec)); });
    refused([&](std::error_code &ec) { static_cast<void>(messages.probe(0, 0, ec)); });

    stream = mpgpu::stream(ctx, device::gpu(0));
    event = mpgpu::event(ctx);
    node = mpgpu::node(ctx);
    plan = node.plan({}, {});
    plan.enqueue(stream);
    event.record(stream);
    event.synchronize();
}

TEST_CASE("objects that outlive their context are invalid and harmless") {
    auto ctx = std::make_unique<mpgpu::context>(virtual_devices());
    mpgpu::buffer<int> a(*ctx, device::gpu(0), 10);
    mpgpu::buffer<int> b(*ctx, device::gpu(1), 10);
    fill(a, 0);
    const mpgpu::stream stream(*ctx, device::gpu(0));
    const mpgpu::event event(*ctx);
    const mpgpu::plan plan(*ctx, {mpgpu::make_transfer(b, a)});
    mpgpu::request request = plan.execute(mpgpu::stream_view::default_stream());
    ctx.reset();
    std::error_code ec;
    plan.enqueue(mpgpu::stream_view::default_stream(), ec);
    CHECK(ec == mpgpu::status::invalid_handle);
    request.synchronize(ec);
    CHECK(ec == mpgpu::status::invalid_handle);
    stream.synchronize(ec);
    CHECK(ec == mpgpu::status::invalid_handle);
    event.synchronize(ec);
    CHECK(ec == mpgpu::status::invalid_handle);
}

TEST_CASE("a child of fork destroys what it inherits in silence, and is refused the rest") {
    char refused = 0;
    pid_t child = 0;
    std::array<int, 2> answer{};
    REQUIRE(pipe(answer.data()) == 0);
    {
        const mpgpu::context ctx = virtual_devices();
        mpgpu::buffer<int> a(ctx, device::gpu(0), 10);
        mpgpu::buffer<int> b(ctx, device::gpu(1), 10);
        fill(a, 0);
        const mpgpu::imported_memory<int> imported(ctx, mpgpu::export_memory(ctx, a));
        const mpgpu::stream stream(ctx, device::gpu(0));
        const mpgpu::event event(ctx);
        const mpgpu::plan plan(ctx, {mpgpu::make_transfer(b, a)});
        const mpgpu::request request = plan.execute(stream);
        child = fork();
        if (child == 0) {
            try {
                plan.enqueue(stream);
            } catch (const mpgpu::error &error) {
                refused = std::string(error.what()).find("child of fork") == std::string::npos ? 1 : 2;
            }
        }
    } // all destructors run in both processes
    if (child == 0) {
        static_cast<void>(!write(answer[1], &refused, 1));
        // The parent kills this child. If the child exited normally, a leak check would report the objects of the
        // parent, which still exist in the child.
        for (;;) {
            pause();
        }
    }
    REQUIRE(child > 0);
    close(answer[1]);
    CHECK(read(answer[0], &refused, 1) == 1);
    CHECK(refused == 2);
    close(answer[0]);
    kill(child, SIGKILL);
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
}

TEST_CASE("transfers of no bytes, and plans of no transfers, are done at once") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<int> none(ctx, device::gpu(0), 0);
    mpgpu::buffer<int> nothing(ctx, device::gpu(1), 0);
    mpgpu::plan(ctx, {mpgpu::make_transfer(none, nothing)}).execute(mpgpu::stream_view::default_stream()).synchronize();
    mpgpu::plan(ctx, std::vector<mpgpu::transfer>()).execute(mpgpu::stream_view::default_stream()).synchronize();
}

TEST_CASE("a prepared plan moves nothing before it is executed, and then the right bytes") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<int> from(ctx, device::gpu(0), 1 << 20);
    mpgpu::buffer<int> to(ctx, device::gpu(1), 1 << 20);
    fill(from, 3);
    to.data()[0] = -1;
    const mpgpu::plan plan(ctx, {mpgpu::make_transfer(to, from)});
    const mpgpu::stream stream(ctx, device::gpu(0));
    plan.prepare(stream);
    CHECK(to.data()[0] == -1);
    plan.enqueue(stream);
    stream.synchronize();
    CHECK(std::equal(to.data(), to.data() + to.size(), from.data()));
    CHECK(ctx.statistics().executions == 1);
    from = {};
    CHECK_THROWS_AS(plan.prepare(stream), mpgpu::argument_error);
}

TEST_CASE("memory travels as a handle, and an import gives it back when it goes") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::buffer<int> memory(ctx, device::gpu(2), 100);
    mpgpu::buffer<int> received(ctx, device::gpu(0), 40);
    for (int i = 0; i < 100; ++i) {
        memory.data()[i] = i;
    }
    const mpgpu::memory_handle whole = mpgpu::export_memory(ctx, memory);
    const mpgpu::memory_handle part = mpgpu::export_memory(ctx, memory.subspan(30, 40));
    static_assert(std::is_trivially_copyable_v<mpgpu::memory_handle> && sizeof(whole) == 128);

    mpgpu::imported_memory<int> first(ctx, part);
    CHECK(first.data() == memory.data() + 30);
    CHECK(first.size() == 40);
    CHECK(first.location() == device::gpu(2));
    mpgpu::imported_memory<int> second = std::move(first);
    CHECK_FALSE(first); // NOLINT(bugprone-use-after-move): tests a moved-from import
    mpgpu::plan(ctx, {mpgpu::make_transfer(received, second)})
        .execute(mpgpu::stream_view::default_stream())
        .synchronize();
    CHECK(received.data()[0] == 30);
    CHECK(received.data()[39] == 69);

    // The last import of the memory has been closed, so the address is no longer valid.
    int *address = second.data();
    second = {};
    CHECK(mp_memory_close(ctx.get(), address) == MP_ERROR_INVALID_POINTER);

    std::error_code ec;
    mpgpu::memory_handle damaged = whole;
    damaged.bytes[100] ^= 1;
    const mpgpu::imported_memory<int> none(ctx, damaged, ec);
    CHECK(ec == mpgpu::status::invalid_argument);
    CHECK_FALSE(none);
    memory = {};
    CHECK_THROWS_AS(mpgpu::imported_memory<int>(ctx, whole), mpgpu::peer_gone);
}

TEST_CASE("memory of the program's own is registered for as long as its owner lives") {
    const mpgpu::context ctx = virtual_devices();
    std::vector<int> cells(5000);
    std::iota(cells.begin(), cells.end(), 3);
    mpgpu::buffer<int> on_gpu(ctx, device::gpu(1), cells.size());
    mpgpu::registered_memory<int> first(ctx, cells);
    CHECK(first.data() == cells.data());
    CHECK(first.size() == cells.size());
    CHECK(first.location() == device::host());
    CHECK_THROWS_AS(mpgpu::registered_memory<int>(ctx, cells), mpgpu::argument_error);
    mpgpu::registered_memory<int> second = std::move(first);
    CHECK_FALSE(first); // NOLINT(bugprone-use-after-move): tests a moved-from registration
    const mpgpu::plan plan(ctx, {mpgpu::make_transfer(on_gpu, second)});
    plan.execute(mpgpu::stream_view::default_stream()).synchronize();
    CHECK(std::equal(cells.begin(), cells.end(), on_gpu.data()));
    second = {};
    std::error_code ec;
    plan.enqueue(mpgpu::stream_view::default_stream(), ec);
    CHECK(ec == mpgpu::status::invalid_pointer);
    CHECK(mp_memory_unregister(ctx.get(), cells.data()) == MP_ERROR_INVALID_POINTER);
    const mpgpu::registered_memory<int> none(ctx, mpgpu::array_view<int>(), false, ec);
    CHECK(ec == mpgpu::status::invalid_argument);
    CHECK_FALSE(none);
    const mpgpu::registered_memory<int> again(ctx, cells, true);
    CHECK(again);
}

TEST_CASE("a mapped file is a source for as long as its owner lives") {
    const mpgpu::context ctx = virtual_devices();
    std::vector<int> numbers(50'000);
    std::iota(numbers.begin(), numbers.end(), 5);
    std::FILE *written = std::tmpfile();
    REQUIRE(written != nullptr);
    REQUIRE(std::fwrite(numbers.data(), sizeof(int), numbers.size(), written) == numbers.size());
    REQUIRE(std::fflush(written) == 0);
    mpgpu::buffer<int> on_gpu(ctx, device::gpu(1), 3000);
    for (const bool bypass_cache : {false, true}) {
        mpgpu::mapped_file first(ctx, fileno(written), bypass_cache);
        CHECK(first.size() == numbers.size() * sizeof(int));
        mpgpu::mapped_file second = std::move(first);
        CHECK_FALSE(first); // NOLINT(bugprone-use-after-move): tests a moved-from mapping
        CHECK(first.size() == 0);
        const mpgpu::plan plan(ctx,
                               {mpgpu::make_transfer(on_gpu, second.elements<int>(7 * sizeof(int), on_gpu.size()))});
        plan.execute(mpgpu::stream_view::default_stream()).synchronize();
        CHECK(std::equal(on_gpu.data(), on_gpu.data() + on_gpu.size(), numbers.begin() + 7));
        const std::byte *data = second.data();
        second = {};
        CHECK(mp_file_unmap(ctx.get(), data) == MP_ERROR_INVALID_POINTER);
    }
    CHECK(std::fclose(written) == 0);
    std::error_code ec;
    const mpgpu::mapped_file none(ctx, -1, false, ec);
    CHECK(ec == mpgpu::status::invalid_argument);
    CHECK_FALSE(none);
    CHECK(none.size() == 0);
    std::array<int, 2> ends = {};
    REQUIRE(pipe(ends.data()) == 0);
    CHECK_THROWS_AS(mpgpu::mapped_file(ctx, ends[0]), mpgpu::not_supported);
    close(ends[0]);
    close(ends[1]);
}

TEST_CASE("named batches bring each participant its blocks, and what is there already is left alone") {
    const mpgpu::context ctx = virtual_devices();
    constexpr std::size_t n = 1000;
    constexpr int gpus = 3;
    std::vector<mpgpu::buffer<int>> blocks, wholes, others;
    mpgpu::buffer<int> root(ctx, device::host(), gpus * n);
    for (int gpu = 0; gpu < gpus; ++gpu) {
        blocks.emplace_back(ctx, device::gpu(gpu), n);
        wholes.emplace_back(ctx, device::gpu(gpu), gpus * n);
        others.emplace_back(ctx, device::gpu(gpu), gpus * n);
        std::fill_n(wholes.back().data(), gpus * n, -1);
    }
    std::iota(root.data(), root.data() + gpus * n, 0);
    const auto run = [&](const std::vector<mpgpu::transfer> &transfers) {
        mpgpu::plan(ctx, transfers).execute(mpgpu::stream_view::default_stream()).synchronize();
    };
    const auto all_are_root = [&](const std::vector<mpgpu::buffer<int>> &buffers) {
        return std::all_of(buffers.begin(), buffers.end(), [&](const mpgpu::buffer<int> &each) {
            return std::equal(root.data(), root.data() + each.size(), each.data());
        });
    };
    run(mpgpu::broadcast(root, wholes));
    CHECK(all_are_root(wholes));
    run(mpgpu::scatter(root, blocks));
    CHECK(blocks[2].data()[5] == static_cast<int>(2 * n + 5));
    mpgpu::buffer<int> back(ctx, device::gpu(1), gpus * n);
    run(mpgpu::gather(blocks, back));
    CHECK(std::equal(root.data(), root.data() + gpus * n, back.data()));
    for (mpgpu::buffer<int> &whole : wholes) {
        std::fill_n(whole.data(), gpus * n, -1);
    }
    CHECK(mpgpu::all_gather(blocks, wholes).size() == 9);
    run(mpgpu::all_gather(blocks, wholes));
    CHECK(all_are_root(wholes));
    // The exchange is in place: each block is already at its position.
    std::vector<mpgpu::device_span<const int>> places;
    for (std::size_t gpu = 0; gpu < wholes.size(); ++gpu) {
        places.emplace_back(mpgpu::device_span<int>(wholes[gpu]).subspan(gpu * n, n));
    }
    CHECK(mpgpu::all_gather(places, wholes).size() == 6);
    run(mpgpu::all_gather(places, wholes));
    CHECK(all_are_root(wholes));
    run(mpgpu::all_to_all(wholes, others));
    CHECK(others[2].data()[n + 7] == static_cast<int>(2 * n + 7));
    CHECK_THROWS_AS(run(mpgpu::all_to_all(wholes, wholes)), mpgpu::argument_error);
    // The sizes are indexed by sender. The first sender sends all of its data to the second.
    const std::vector<std::size_t> sizes = {0, gpus * n, 0, 0, 0, 0, 0, 0, 0};
    std::error_code ec;
    CHECK(mpgpu::all_to_all(wholes, others, sizes, ec).empty());
    CHECK(ec == mpgpu::status::invalid_argument);
    CHECK(mpgpu::broadcast(root, blocks, ec).empty());
    CHECK(ec == mpgpu::status::invalid_argument);
    CHECK(mpgpu::gather(blocks, wholes[0], ec).size() == 3);
    CHECK_FALSE(ec);
}

TEST_CASE("signals order streams, and a thread waits for one no longer than it says") {
    const mpgpu::context ctx = virtual_devices();
    mpgpu::signal_counters counters(ctx, 2);
    mpgpu::buffer<int> from(ctx, device::gpu(0), 1);
    mpgpu::buffer<int> to(ctx, device::gpu(1), 1);
    from.data()[0] = 7;
    to.data()[0] = 0;
    const mpgpu::stream receiver(ctx, device::gpu(1));
    const mpgpu::stream sender(ctx, device::gpu(0));
    const std::vector<mpgpu::signal_value> go = {{counters.data(), 1}};
    const std::vector<mpgpu::signal_value> done = {{counters.data() + 1, 3}};

    ctx.wait(receiver, go);
    mpgpu::plan(ctx, {mpgpu::make_transfer(to, from)}).enqueue(receiver);
    ctx.raise(receiver, done);
    CHECK_THROWS_AS(ctx.synchronize({counters.data() + 1, 3}, 0.0), mpgpu::timeout);
    std::error_code ec;
    ctx.synchronize({counters.data() + 1, 3}, 0.01, ec);
    CHECK(ec == mpgpu::status::timeout);
    CHECK(ec == std::errc::timed_out);
    CHECK(to.data()[0] == 0);
    ctx.raise(sender, {{counters.data(), 1}});
    ctx.synchronize({counters.data() + 1, 3}, 60.0);
    CHECK(to.data()[0] == 7);
    ctx.wait(receiver, {{counters.data(), 1}, {counters.data() + 1, 2}});
    receiver.synchronize();

    // Here the calling thread waits instead of a stream. It also reads a counter without waiting.
    ctx.wait(receiver, {{counters.data(), 2}});
    ctx.raise(receiver, {{counters.data() + 1, 4}});
    CHECK_FALSE(ctx.is_reached({counters.data() + 1, 4}));
    CHECK(ctx.read_counter(counters.data()) == 1);
    ctx.raise_from_host({counters.data(), 2});
    ctx.synchronize({counters.data() + 1, 4}, 60.0);
    CHECK(ctx.is_reached({counters.data() + 1, 4}));
    CHECK(ctx.read_counter(counters.data() + 1) == 4);
    const mpgpu::imported_memory<std::uint64_t> same(ctx, mpgpu::export_memory(ctx, counters));
    CHECK(same.data() == counters.data());
    CHECK_THROWS_AS(static_cast<void>(ctx.read_counter(nullptr)), mpgpu::argument_error);

    CHECK_THROWS_AS(ctx.synchronize({nullptr, 1}, 0.0), mpgpu::argument_error);
    const std::vector<mpgpu::signal_value> bad = {{nullptr, 1}};
    ctx.raise(sender, bad, ec);
    CHECK(ec == mpgpu::status::invalid_pointer);
    ctx.wait(sender, bad, ec);
    CHECK(ec == mpgpu::status::invalid_pointer);
}
