#include "copy_check.h"

#include <mpgpu/mpgpu.hpp>

#include <iostream>
#include <string>

// The C++ API throws in the consumer's code. The archive's own C++ runtime symbols are hidden and must not interfere.
static std::string refusal() {
    mpgpu::context_options options;
    options.topology = "no such topology";
    try {
        mpgpu::context context(options);
    } catch (const mpgpu::error &error) {
        return error.what();
    }
    return {};
}

int main() {
    if (const char *wrong = copy_check()) {
        std::cout << wrong << '\n';
        return 1;
    }
    if (refusal().find("no such topology") == std::string::npos) {
        std::cout << "an unknown topology was not refused by name: " << refusal() << '\n';
        return 1;
    }
    std::cout << "copied\n";
}
