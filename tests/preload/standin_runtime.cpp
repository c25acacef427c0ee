// Replaces the CUDA runtime library to which ucx_perftest is linked, because that library refuses a driver that is not
// NVIDIA's. Implements the functions for GPUs and their memory that ucx_perftest uses, and refuses its kernels.
#include "driver.hpp"

#include <cstring>

// NOLINTBEGIN(readability-identifier-naming): the runtime's names
extern "C" {

int cudaGetDeviceCount(int *count) {
    *count = 4;
    return cuInit(0);
}
int cudaSetDevice(int gpu) {
    CUcontext context = nullptr;
    const int code = cuDevicePrimaryCtxRetain(&context, gpu);
    return code == 0 ? cuCtxSetCurrent(context) : code;
}
int cudaDeviceSynchronize() {
    return 0;
}
int cudaMalloc(CUdeviceptr *made, std::size_t bytes) {
    return cuMemAlloc_v2(made, bytes);
}
int cudaFree(CUdeviceptr memory) {
    return cuMemFree_v2(memory);
}
int cudaMemcpy(void *dst, const void *src, std::size_t bytes, int) {
    std::memcpy(dst, src, bytes);
    return 0;
}
int cudaMemset(void *memory, int value, std::size_t bytes) {
    std::memset(memory, value, bytes);
    return 0;
}
int cudaGetLastError() {
    return 0;
}
const char *cudaGetErrorString(int) {
    return "an error of the fake driver";
}

#define REFUSED(name)                                                                                                  \
    int name() {                                                                                                       \
        return 801;                                                                                                    \
    }
REFUSED(cudaHostAlloc)
REFUSED(cudaHostGetDevicePointer)
REFUSED(cudaFreeHost)
REFUSED(cudaMallocManaged)
REFUSED(__cudaGetKernel)
REFUSED(__cudaLaunchKernel)
REFUSED(__cudaPopCallConfiguration)
REFUSED(__cudaPushCallConfiguration)
REFUSED(__cudaRegisterFatBinary)
REFUSED(__cudaRegisterFatBinaryEnd)
REFUSED(__cudaRegisterFunction)
REFUSED(__cudaRegisterVar)
REFUSED(__cudaUnregisterFatBinary)

} // extern "C"
// NOLINTEND(readability-identifier-naming)
