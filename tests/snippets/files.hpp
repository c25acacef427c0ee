// Names that docs/guide/files.md omits.
#include <mpgpu/mpgpu.hpp>

#include <fcntl.h>
#include <unistd.h>

extern mpgpu::context ctx;
extern mpgpu::stream stream;
extern mpgpu::buffer<double> pressure, velocity;
