// SPDX-License-Identifier: MIT OR Apache-2.0
// Tests the header in a program that is compiled with -fno-exceptions. The forms with std::error_code work, and an
// error that is not checked ends the program with its message.
#include "counting_library.hpp"

#include <mpgpu/mpgpu.hpp>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

static_assert(MPGPU_EXCEPTIONS == 0, "this file is compiled without exceptions");

namespace {

constexpr int aborted = 77;
int failures = 0;

void expect(bool condition, const char *what) {
    if (!condition) {
        std::fprintf(stderr, "not so: %s\n", what);
        ++failures;
    }
}

/// Returns the text that a failing child process writes to stderr before it aborts. The text is empty if the child does
/// not abort.
std::string last_words_of_a_failing_call() {
    int ends[2];
    if (pipe(ends) != 0) {
        return {};
    }
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        // The handler ends the child here, because memcheck reports programs that a signal has ended.
        std::signal(SIGABRT, [](int) { _exit(aborted); });
        counting::fail_next(MP_ERROR_TOPOLOGY, 0, "topology", "atlantis: there is no such preset");
        const mpgpu::context ctx;
        _exit(0);
    }
    close(ends[1]);
    std::string words;
    char part[256];
    for (ssize_t got = read(ends[0], part, sizeof part); got > 0; got = read(ends[0], part, sizeof part)) {
        words.append(part, static_cast<std::size_t>(got));
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == aborted ? words : std::string();
}

} // namespace

int main() {
    std::error_code ec;
    const mpgpu::context ctx({}, ec);
    expect(!ec && ctx, "a context is made");
    mpgpu::buffer<int> a(ctx, mpgpu::device::gpu(0), 4, ec);
    mpgpu::buffer<int> b(ctx, mpgpu::device::gpu(1), 4, ec);
    std::memset(a.data(), 7, a.size_bytes());
    const mpgpu::transfer transfer = mpgpu::make_transfer(b, a, ec);
    const mpgpu::plan plan(ctx, {transfer}, {}, ec);
    expect(!ec && plan, "a plan is made");
    mpgpu::request done = plan.execute(mpgpu::stream_view::default_stream(), ec);
    done.synchronize(ec);
    expect(!ec && !done, "the plan is executed");
    expect(std::memcmp(a.data(), b.data(), a.size_bytes()) == 0, "the bytes have arrived");

    counting::fail_next(MP_ERROR_OUT_OF_MEMORY, 0, "bytes", "device 0: out of memory");
    const mpgpu::memory none(ctx, mpgpu::device::gpu(0), 4, ec);
    expect(ec == mpgpu::status::out_of_memory && !none, "a failure is reported");

    expect(last_words_of_a_failing_call() == "mpgpu: atlantis: there is no such preset\n",
           "a failure ends the program");
    return failures == 0 ? 0 : 1;
}
