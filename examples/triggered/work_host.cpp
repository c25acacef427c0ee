// SPDX-License-Identifier: MIT OR Apache-2.0
#include "blocks.hpp"
#include "work.hpp"

#include <cstddef>
#include <cstring>
#include <new>

namespace {

using blocks::receivers;

/// Runs the blocks of a kernel one after the other on a CPU thread, in stream order.
template <class Block> void launch(const mpgpu::stream &stream, std::size_t count, Block block) {
    stream.launch_host([count, block] {
        for (std::size_t i = 0; i < count; ++i) {
            block(static_cast<unsigned>(i));
        }
    });
}

void make(const mpgpu::stream &stream, int, const making &task, const outputs &out) {
    launch(stream, making_blocks, [task, to = receivers(out)](unsigned block) { blocks::make(task, to, block); });
}

void consume(const mpgpu::stream &stream, int, const consuming &task, const outputs &out) {
    launch(stream, making_blocks, [task, in = blocks::incoming(task), to = receivers(out)](unsigned block) {
        blocks::consume(task, in, to, block);
    });
}

void sweep(const mpgpu::stream &stream, int, const sweeping &task, const outputs &out) {
    const std::size_t inner = (task.rows - 2 + inner_rows - 1) / inner_rows * inner_columns(task.nx);
    launch(stream, 2 * edge_pieces(task.nx) + inner,
           [task, to = receivers(out)](unsigned block) { blocks::sweep(task, to, block); });
}

std::size_t blocks_of(std::size_t rows) {
    return (rows + rows_per_block - 1) / rows_per_block;
}

void rank(const mpgpu::stream &stream, int, const ranking &task, const outputs &out) {
    launch(stream, blocks_of(task.part.rows), [task, to = receivers(out)](unsigned block) {
        blocks::step(blocks::rank_rule{task}, task.part.rows, task.x_new + task.part.first, to, block);
    });
}

void shorten(const mpgpu::stream &stream, int, const shortening &task, const outputs &out) {
    launch(stream, blocks_of(task.part.rows), [task, to = receivers(out)](unsigned block) {
        blocks::step(blocks::distance_rule{task}, task.part.rows, task.x_new + task.part.first, to, block);
    });
}

void fit(const mpgpu::stream &stream, int, const fitting &task, const outputs &out) {
    launch(stream, blocks_of(task.part.rows),
           [task, to = receivers(out)](unsigned block) { blocks::fit(task, to, block); });
}

void relax(const mpgpu::stream &stream, int, const relaxing &task, const outputs &out) {
    launch(stream, blocks_of(task.rows), [task, to = receivers(out)](unsigned block) {
        blocks::step(blocks::relax_rule{task}, task.rows, task.x_new + task.first, to, block);
    });
}

void scatter(const mpgpu::stream &stream, int, const scattering &task) {
    launch(stream, task.words / (std::size_t{line_words} * region_lines),
           [task](unsigned block) { blocks::scatter(task, block); });
}

void copy(const mpgpu::stream &stream, int, const mpgpu::transfer &copied) {
    stream.launch_host([copied] { std::memcpy(copied.dst, copied.src, copied.bytes); });
}

void connect(int) {}

/// Returns ordinary memory, which all virtual devices can access.
void *share(std::size_t bytes) {
    return ::operator new (bytes, std::align_val_t{64});
}

void release(void *shared) {
    ::operator delete (shared, std::align_val_t{64});
}

void place(void *, std::size_t, int, int) {}

} // namespace

const device_code on_virtual_devices = {make,    consume, sweep,   rank,  shorten, fit,  relax,
                                        scatter, copy,    connect, share, release, place};
