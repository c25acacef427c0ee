// Declarations that nvcc provides, and the CUDA names that pages use. A kernel launch is parsed as a call.
#define __global__

struct dim3 {
    unsigned x, y, z;
};
extern const dim3 blockIdx, threadIdx, blockDim, gridDim;
struct CUstream_st;
using cudaStream_t = CUstream_st *;
extern const unsigned blocks, threads;
