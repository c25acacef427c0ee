// Names that docs/guide/cpp.md omits.
#include <mpgpu/mpgpu.hpp>

#include <string>
#include <vector>

/// GPU of a step, with the program's data for it.
struct gpu_of_step {
    mpgpu::stream stream;
    mpgpu::event computed;
};

extern mpgpu::context ctx;
extern std::vector<mpgpu::transfer> transfers;
extern std::vector<gpu_of_step> devices;
extern mpgpu::stream exchange;
extern mpgpu::event exchanged;
extern mpgpu::plan halos;
extern mpgpu::buffer<float> model;
extern std::vector<mpgpu::buffer<float>> copies, parts, wholes;
void log(const std::string &line);
void launch(mpgpu::stream_view stream, gpu_of_step &on);
