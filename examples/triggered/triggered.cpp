// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Transfers that start while a kernel still computes their data, in the programs of PROACT (Muthukrishnan et al., ISCA
// 2021). They are compared with plain copies and plans after the kernel, with stores by the kernel itself, and with the
// limit in which transfers cost nothing. One process uses all GPUs. Read forms.cpp first, then jacobi.cpp.
#include "forms.hpp"
#include "options.hpp"

#include <cstdio>
#include <exception>

int main(int argc, char *argv[]) {
    try {
        const options opt = parse(argc, argv);
        if (opt.help) {
            std::fputs(usage, stdout);
            return 0;
        }
        const machine m(opt);
        const int wrong = opt.program == "microbenchmark" ? microbenchmark(m, opt)
                          : opt.program == "stores"       ? stores(m, opt)
                          : opt.program == "jacobi"       ? jacobi(m, opt)
                          : opt.program == "banded"       ? banded(m, opt)
                          : opt.program == "pipeline"     ? pipeline(m, opt)
                                                          : graphs(m, opt);
        return wrong == 0 ? 0 : 1;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "triggered: %s\n", e.what());
        return 2;
    }
}
