// Runs the client program as a library that is loaded with RTLD_DEEPBIND: `deepbound LIBRARY WAY CASE`.
#include <cstdio>
#include <dlfcn.h>

int main(int count, char **arguments) {
    void *library = count < 2 ? nullptr : dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    void *run = library == nullptr ? nullptr : dlsym(library, "run_client");
    if (run == nullptr) {
        std::printf("deepbound: %s\n", dlerror());
        return 1;
    }
    return reinterpret_cast<int (*)(int, char **)>(run)(count - 1, arguments + 1);
}
