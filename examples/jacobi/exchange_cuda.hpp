// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_JACOBI_EXCHANGE_CUDA_HPP
#define MPGPU_EXAMPLES_JACOBI_EXCHANGE_CUDA_HPP

#include "exchange.hpp"

#include <memory>

/// Creates the halo exchange that uses cudaMemcpyPeerAsync and events instead of mpgpu.
std::unique_ptr<exchange> plain_exchange_on_gpus(const mpgpu::context &ctx, const halo_exchange &halos);

#endif // MPGPU_EXAMPLES_JACOBI_EXCHANGE_CUDA_HPP
