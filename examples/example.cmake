# Settings that each C++ example includes after project(): mpgpu itself, an optimised build, and the variable `cuda`, which is ON if the GPU
# code is built too.
if(NOT TARGET mpgpu::mpgpu)
    find_package(mpgpu CONFIG REQUIRED)
endif()
get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(PROJECT_IS_TOP_LEVEL AND NOT multi_config AND NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release) # an example computes on CPU threads, and says how long it took
endif()

set(MPGPU_EXAMPLES_CUDA AUTO CACHE STRING "Build the example's GPU code: AUTO (where a CUDA compiler works), ON, OFF")
set_property(CACHE MPGPU_EXAMPLES_CUDA PROPERTY STRINGS AUTO ON OFF)
set(cuda OFF)
string(REPLACE "mpgpu_example_" "" example "${PROJECT_NAME}")
if(MPGPU_SANITIZE AND MPGPU_EXAMPLES_CUDA STREQUAL "AUTO")
    message(STATUS "${example}: virtual devices only, as nvcc knows no -fsanitize")
elseif(MPGPU_EXAMPLES_CUDA)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
        # One build runs on every GPU type of a cluster, whatever machine it is built on.
        if(NOT CMAKE_CUDA_ARCHITECTURES AND DEFINED ENV{CUDAARCHS})
            set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}")
        elseif(NOT CMAKE_CUDA_ARCHITECTURES AND NOT CMAKE_VERSION VERSION_LESS 3.23)
            set(CMAKE_CUDA_ARCHITECTURES all-major)
        endif()
        enable_language(CUDA)
        set(cuda ON)
        message(STATUS "${example}: for GPUs and virtual devices, CUDA ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}), "
            "architectures ${CMAKE_CUDA_ARCHITECTURES}")
    elseif(MPGPU_EXAMPLES_CUDA STREQUAL "AUTO")
        message(STATUS "${example}: virtual devices only, as no CUDA compiler was found; put nvcc on PATH or set CMAKE_CUDA_COMPILER")
    else()
        message(FATAL_ERROR "MPGPU_EXAMPLES_CUDA=${MPGPU_EXAMPLES_CUDA}, but no CUDA compiler works: put nvcc on PATH, set "
            "CMAKE_CUDA_COMPILER, or take AUTO or OFF. Why it does not work is in CMakeFiles/CMakeError.log.")
    endif()
else()
    message(STATUS "${example}: virtual devices only, as MPGPU_EXAMPLES_CUDA=${MPGPU_EXAMPLES_CUDA} says")
endif()
