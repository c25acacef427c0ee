// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_INDEXED_HPP
#define MPGPU_HALO_INDEXED_HPP

/// @file
/// Exchange of vector entries by index lists, for finite elements, graphs and sparse matrices. Each rank is a process.
/// Needs mpi.hpp and MPI.
///
/// @code
/// mpgpu::mpi::node node(ctx, MPI_COMM_WORLD);
/// std::vector<mpgpu::halo::index_neighbour> neighbours;
/// // Rank, entries to send, entries to receive.
/// neighbours.push_back({2, entries_for_2, mpgpu::halo::index_list::range(owned, from_2)});
/// mpgpu::halo::index_options how;
/// how.entry_bytes = 4 * sizeof(double); // maximum bytes per entry, summed over the fields of an exchange
/// mpgpu::halo::indexed ex(ctx, node, node.device(), local_entries, neighbours, how); // collective
///
/// ex.exchange(stream, x); // one vector
/// ex.exchange(stream, {mpgpu::halo::field_of(p), mpgpu::halo::field_of(v, 3)}); // two fields, one message
/// ex.add(stream, x); // sends received entries back and adds them to the entries of the send lists
/// ex.start(stream, x);
/// interior(stream); // other work
/// ex.finish(stream);
/// ex.destroy(); // collective, before MPI_Finalize
/// @endcode
///
/// Mechanism: one kernel per rank gathers the entries directly into the memory of the neighbours, sets flags there,
/// waits for the flags of the messages to this rank, and scatters them. The vectors are accessed by the rank's own
/// kernel only. They may therefore be in any memory of the rank's GPU, and may differ in each exchange.
/// halo/index_kernel.hpp states the protocol and its proof. On the host backend, CPU threads do the work of the kernel.
///
/// Errors are thrown as described in mpgpu.hpp.

#include <mpgpu/halo/index_arrays.hpp>
#include <mpgpu/halo/index_exchange.hpp>
#include <mpgpu/halo/index_lists.hpp>
#include <mpgpu/halo_mpi.hpp>

#endif // MPGPU_HALO_INDEXED_HPP
