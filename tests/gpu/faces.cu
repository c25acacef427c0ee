// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures the memory bandwidth of one GPU for a halo exchange of a mesh that is divided along x, the contiguous
// dimension. One kernel reads the two faces of each of three arrays, and another writes the adjacent ghost cells. A
// face contains one cell of each row. Messages are read and written as a whole, but not sent. Prints medians. Uses GPU
// 0, without mpgpu.
//   faces [cells a side...]
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cuda_runtime.h>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int variables = 3;
constexpr unsigned threads = 256;
constexpr std::size_t tile_rows = 128; // per warp, four per thread, as in halo exchanges
constexpr int rows_of_thread = 4;

void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
    }
}

struct faces {
    double *cells;    ///< array with one ghost cell at each end of a row
    double *message;  ///< faces in sequence
    std::size_t row;  ///< distance between rows in cells
    std::size_t rows; ///< rows of the array
    std::size_t left; ///< position in the row
    std::size_t right;
};

template <bool Writes> __global__ void __launch_bounds__(threads) copy_faces(faces f) {
    const std::size_t tiles = (f.rows + tile_rows - 1) / tile_rows;
    const std::size_t each = (tiles + gridDim.x - 1) / gridDim.x;
    const std::size_t end = min((blockIdx.x + 1) * each, tiles);
    for (std::size_t tile = blockIdx.x * each + threadIdx.x / 32; tile < end; tile += threads / 32) {
        for (int face = 0; face < 2; ++face) {
            double *const cells = f.cells + (face == 0 ? f.left : f.right);
            double *const message = f.message + face * f.rows;
            const std::size_t first = tile * tile_rows + threadIdx.x % 32;
            double read[rows_of_thread];
            for (int n = 0; n < rows_of_thread; ++n) {
                const std::size_t row = first + 32 * n;
                read[n] = row < f.rows ? (Writes ? message[row] : cells[row * f.row]) : 0;
            }
            for (int n = 0; n < rows_of_thread; ++n) {
                const std::size_t row = first + 32 * n;
                if (row < f.rows) {
                    (Writes ? cells[row * f.row] : message[row]) = read[n];
                }
            }
        }
    }
}

double median_us(const std::function<void()> &work) {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<float> all;
    for (int round = 0; round < 31; ++round) {
        check(cudaEventRecord(begin), "cudaEventRecord");
        work();
        check(cudaEventRecord(end), "cudaEventRecord");
        check(cudaEventSynchronize(end), "cudaEventSynchronize");
        float elapsed = 0;
        check(cudaEventElapsedTime(&elapsed, begin, end), "cudaEventElapsedTime");
        all.push_back(elapsed * 1e3F);
    }
    check(cudaEventDestroy(begin), "cudaEventDestroy");
    check(cudaEventDestroy(end), "cudaEventDestroy");
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
}

void measure(std::size_t side, unsigned blocks) {
    const std::size_t row = side + 2;
    const std::size_t rows = row * row;
    std::vector<double *> arrays(variables);
    double *message = nullptr;
    for (double *&array : arrays) {
        check(cudaMalloc(&array, row * rows * sizeof(double)), "cudaMalloc");
        check(cudaMemset(array, 1, row * rows * sizeof(double)), "cudaMemset");
    }
    check(cudaMalloc(&message, 2 * rows * sizeof(double)), "cudaMalloc");
    check(cudaMemset(message, 2, 2 * rows * sizeof(double)), "cudaMemset");
    const auto read = [&](double *array) {
        copy_faces<false><<<blocks, threads>>>({array, message, row, rows, 1, side});
        check(cudaGetLastError(), "reading faces");
    };
    const auto write = [&](double *array) {
        copy_faces<true><<<blocks, threads>>>({array, message, row, rows, 0, side + 1});
        check(cudaGetLastError(), "writing faces");
    };
    const auto all = [&](const std::function<void(double *)> &work) {
        std::for_each(arrays.begin(), arrays.end(), work);
    };
    const double reading = median_us([&] { all(read); });
    const double writing = median_us([&] { all(write); });
    const double both = median_us([&] {
        all(read);
        all(write);
    });
    std::printf("%zu cells a side, %d variables: reading two faces %.1f us, writing two faces %.1f us, both %.1f us\n",
                side, variables, reading, writing, both);
    for (double *array : arrays) {
        check(cudaFree(array), "cudaFree");
    }
    check(cudaFree(message), "cudaFree");
}

} // namespace

int main(int count, char **arguments) {
    try {
        int multiprocessors = 0;
        check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
        std::vector<std::size_t> sides;
        for (int i = 1; i < count; ++i) {
            sides.push_back(std::stoul(arguments[i]));
        }
        for (const std::size_t side : sides.empty() ? std::vector<std::size_t>{100, 256, 512} : sides) {
            measure(side, 4U * static_cast<unsigned>(multiprocessors));
        }
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "faces: %s\n", error.what());
        return 1;
    }
}
