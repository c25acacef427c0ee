// Names that docs/guide/concepts.md omits.
#include <mpgpu/mpgpu.hpp>

#include <array>
#include <cstddef>
#include <vector>

extern mpgpu::context ctx;
extern const std::size_t n;

/// View with the members of `Kokkos::View`.
struct kokkos_like_view {
    [[nodiscard]] float *data() const;
    [[nodiscard]] std::size_t size() const;
    [[nodiscard]] bool span_is_contiguous() const;
};
extern kokkos_like_view view;
