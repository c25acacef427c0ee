// libnvidia-ml.so.1 on machines without a GPU: UCX's CUDA module is linked against it, and goes on without what it
// lacks.
extern "C" const char *nvmlErrorString(int /*code*/) { // NOLINT(readability-identifier-naming): NVML's name
    return "an error of the fake NVML";
}
