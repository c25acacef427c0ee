// The table of whose memory IPC handles stand for.
#include "../../cpp/preload/owners.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

using mpgpu_preload::find_owner;
using mpgpu_preload::ipc_handle;
using mpgpu_preload::owner;
using mpgpu_preload::publish;

namespace {

void check(bool holds, const char *what) {
    if (!holds) {
        std::printf("owners: not so: %s\n", what);
        std::_Exit(1);
    }
}

/// A handle that no other process has.
ipc_handle handle(std::uint32_t number) {
    ipc_handle made{};
    const pid_t process = getpid();
    std::memcpy(made.bytes.data(), &process, sizeof(process));
    std::memcpy(made.bytes.data() + 8, &number, sizeof(number));
    return made;
}

bool is(const ipc_handle &asked, std::uint64_t base) {
    const auto found = find_owner(asked);
    return found && found->base == base && found->bytes == 2 * base && found->gpu[15] == 7;
}

owner memory(std::uint64_t base) {
    owner made{{}, base, 2 * base};
    made.gpu[15] = 7;
    return made;
}

} // namespace

int main() {
    check(!find_owner(handle(0)), "what nobody has told is not known");
    publish(handle(1), memory(100));
    publish(handle(2), memory(200));
    check(is(handle(1), 100) && is(handle(2), 200) && !find_owner(handle(0)), "what was told is known");
    publish(handle(1), memory(300));
    check(is(handle(1), 300) && is(handle(2), 200),
          "a handle that is given again stands for what it was given for last");

    const ipc_handle of_child = handle(3);
    const pid_t child = fork();
    if (child == 0) {
        publish(of_child, memory(400));
        check(is(handle(3), 400) == false && is(of_child, 400), "a child tells for itself");
        std::_Exit(0);
    }
    int status = 0;
    check(waitpid(child, &status, 0) == child && status == 0, "the child ends well");
    check(!find_owner(of_child), "what a process has told ends with it");

    // More than there is room for.
    for (std::uint32_t number = 0; number < 5000; ++number) {
        publish(handle(1000 + number), memory(number));
    }
    check(is(handle(5999), 4999), "the last is known, however many there were");
    for (std::uint32_t number = 0; number < 5000; ++number) {
        const auto found = find_owner(handle(1000 + number));
        check(!found || found->base == number, "the others are known or not, and never wrong");
    }
    return 0;
}
