/*
 * CUDA driver (libcuda.so) whose calls return immediately, for the benchmark of the cost of mp_execute (overhead.rs).
 * It returns devices, addresses and handles, but copies no data. On request, a launch touches a block of memory: a
 * launch of the real driver takes 25 us and evicts most of the caller's data from the first-level cache. The time of
 * touching the memory is measured, so that the benchmark can subtract it.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

#define GPUS 4
#define EXPORT __attribute__((visibility("default")))
#define NOTHING(name)                                                                                                  \
    EXPORT int name(void) {                                                                                            \
        return 0;                                                                                                      \
    }

enum { NO_BINARY_FOR_GPU = 209 };

/* Stack of current contexts of this thread. The lowest entry stands for no context. */
static _Thread_local uintptr_t stack[16];
static _Thread_local unsigned depth;
static uintptr_t handles = 0x10000;
/* Number of bytes that a launch touches. */
static size_t walk;
static uint64_t walked;
static unsigned char others[1 << 20];

static int put(uintptr_t *out, uintptr_t value) {
    *out = value;
    return 0;
}

static int fresh(uintptr_t *out) {
    return put(out, handles += 64);
}

static uintptr_t context_of(int gpu) {
    return (uintptr_t)(gpu + 1) << 12;
}

/* Functions for the benchmark, which the real driver does not have. */
EXPORT void driver_set_walk(size_t bytes) {
    walk = bytes < sizeof others ? bytes : sizeof others;
}
EXPORT uint64_t driver_walked(void) {
    return walked;
}

NOTHING(cuInit)
NOTHING(cuGetErrorName)
NOTHING(cuGetErrorString)
NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cuDevicePrimaryCtxGetState)
NOTHING(cuCtxEnablePeerAccess)
NOTHING(cuCtxSynchronize)
NOTHING(cuMemFree_v2)
NOTHING(cuMemcpyDtoDAsync_v2)
NOTHING(cuMemHostAlloc)
NOTHING(cuMemFreeHost)
NOTHING(cuMemHostRegister_v2)
NOTHING(cuMemHostUnregister)
NOTHING(cuMemcpyAsync)
NOTHING(cuMemcpyDtoHAsync_v2)
NOTHING(cuStreamDestroy_v2)
NOTHING(cuStreamQuery)
NOTHING(cuStreamSynchronize)
NOTHING(cuStreamWaitEvent)
NOTHING(cuEventDestroy_v2)
NOTHING(cuEventRecord)
NOTHING(cuEventQuery)
NOTHING(cuEventSynchronize)
NOTHING(cuLaunchHostFunc)
NOTHING(cuModuleGetFunction)
NOTHING(cuModuleUnload)
NOTHING(cuFuncGetAttribute)
NOTHING(cuLaunchKernel)
NOTHING(cuGraphDestroy)
NOTHING(cuGraphExecMemcpyNodeSetParams)
NOTHING(cuGraphExecDestroy)
NOTHING(cuThreadExchangeStreamCaptureMode)

EXPORT int cuDriverGetVersion(int *out) {
    *out = 13000;
    return 0;
}

EXPORT int cuDeviceGetCount(int *out) {
    *out = GPUS;
    return 0;
}

EXPORT int cuDeviceGet(int *out, int index) {
    *out = index;
    return 0;
}

EXPORT int cuDeviceGetName(char *out, int length, int device) {
    (void)device;
    strncpy(out, "no GPU", (size_t)length);
    return 0;
}

EXPORT int cuDeviceGetUuid(unsigned char *out, int device) {
    memset(out, device + 1, 16);
    return 0;
}

EXPORT int cuDeviceGetAttribute(int *out, unsigned attribute, int device) {
    (void)attribute, (void)device;
    *out = 1;
    return 0;
}

EXPORT int cuDeviceCanAccessPeer(int *out, int device, int peer) {
    *out = device != peer;
    return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(uintptr_t *out, int device) {
    return put(out, context_of(device));
}
EXPORT int cuCtxGetId(uintptr_t context, uintptr_t *id) {
    return put(id, context);
}
EXPORT int cuCtxGetCurrent(uintptr_t *out) {
    return put(out, stack[depth]);
}

EXPORT int cuCtxPushCurrent_v2(uintptr_t context) {
    stack[++depth % 16] = context;
    return 0;
}

EXPORT int cuCtxPopCurrent_v2(uintptr_t *out) {
    return put(out, stack[depth--]);
}

EXPORT int cuCtxGetDevice(int *out) {
    *out = (int)(stack[depth] >> 12) - 1;
    return 0;
}

/* An address consists of the number of the GPU and that of the allocation. Each allocation has 2^36 addresses. */
EXPORT int cuMemAlloc_v2(uint64_t *out, size_t bytes) {
    static uint64_t count;
    (void)bytes;
    *out = (uint64_t)(stack[depth] >> 12) << 44 | ++count << 36;
    return 0;
}

EXPORT int cuPointerGetAttributes(unsigned count, const unsigned *names, void **values, uint64_t address) {
    enum {
        MEMORY_TYPE = 2,
        BUFFER_ID = 7,
        DEVICE_ORDINAL = 9,
        OF_NO_POOL = 10,
        RANGE_START = 11,
        RANGE_SIZE = 12,
        DEVICE = 2
    };
    const int gpu = (int)(address >> 44) - 1;
    if (gpu < 0 || gpu >= GPUS)
        return 0;
    for (unsigned i = 0; i < count; i++) {
        switch (names[i]) {
        case MEMORY_TYPE:
            *(unsigned *)values[i] = DEVICE;
            break;
        case OF_NO_POOL:
            *(unsigned *)values[i] = 1;
            break;
        case DEVICE_ORDINAL:
            *(int *)values[i] = gpu;
            break;
        case BUFFER_ID:
            *(uint64_t *)values[i] = address >> 36;
            break;
        case RANGE_START:
            *(uint64_t *)values[i] = address >> 36 << 36;
            break;
        case RANGE_SIZE:
            *(uint64_t *)values[i] = (uint64_t)1 << 36;
            break;
        default:
            break;
        }
    }
    return 0;
}

EXPORT int cuStreamCreate(uintptr_t *out, unsigned flags) {
    (void)flags;
    fresh(out);
    return put(out, *out << 16 | stack[depth]);
}

EXPORT int cuStreamCreateWithPriority(uintptr_t *out, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(out, flags);
}

EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

EXPORT int cuStreamIsCapturing(uintptr_t stream, unsigned *out) {
    (void)stream;
    *out = 0;
    return 0;
}

EXPORT int cuStreamGetCtx(uintptr_t stream, uintptr_t *out) {
    return put(out, stream & 0xffff);
}

EXPORT int cuStreamGetId(uintptr_t stream, unsigned long long *out) {
    *out = stream >> 16;
    return 0;
}

EXPORT int cuEventCreate(uintptr_t *out, unsigned flags) {
    (void)flags;
    return fresh(out);
}

EXPORT int cuModuleLoadData(uintptr_t *out, const void *image) {
    (void)out, (void)image;
    return NO_BINARY_FOR_GPU;
}

EXPORT int cuGraphCreate(uintptr_t *out, unsigned flags) {
    (void)flags;
    return fresh(out);
}

EXPORT int cuGraphAddMemcpyNode(uintptr_t *out, uintptr_t graph, const uintptr_t *before, size_t count,
                                const void *copy, uintptr_t context) {
    (void)graph, (void)before, (void)count, (void)copy, (void)context;
    return fresh(out);
}

EXPORT int cuGraphInstantiateWithFlags(uintptr_t *out, uintptr_t graph, unsigned long long flags) {
    (void)graph, (void)flags;
    return fresh(out);
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

EXPORT int cuGraphLaunch(uintptr_t exec, uintptr_t stream) {
    (void)exec, (void)stream;
    if (walk > 0) {
        const uint64_t start = now();
        for (size_t i = 0; i < walk; i += 64)
            ((volatile unsigned char *)others)[i]++;
        walked += now() - start;
    }
    return 0;
}
