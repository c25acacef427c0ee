// Names that docs/guide/comb.md omits.
#include <mpgpu/message.hpp>
#include <mpgpu/mpi.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

struct neighbour {
    int rank;
    std::uint64_t tag_of_mine, tag_of_theirs;
    mpgpu::buffer<double> inbox, outbox;
    mpgpu::stream stream;
    mpgpu::event unpacked;
};
extern std::vector<neighbour> neighbours;
extern std::vector<neighbour *> by_mpi;
extern const std::size_t steps;
extern const mpgpu::mpi::node node;
extern const mpgpu::messenger messages;
extern mpgpu::stream stream;
extern mpgpu::event packed;
void pack(mpgpu::stream_view stream);
void unpack(mpgpu::stream_view stream);
void unpack(neighbour &from, mpgpu::stream_view stream);
