# Defines mpgpu::halo_c, the C functions of mpgpu/halo_indexed.h, if the project uses C++ and has found MPI for C or
# C++. If the project also uses Fortran, this file also defines mpgpu::halo_fortran, the Fortran module mpgpu_indexed.
# The project compiles both targets with its own MPI. If the project uses CUDA, its CUDA compiler compiles the C
# functions, so that they work on GPUs. MPGPU_C_DIR contains their source. This file is included after fortran.cmake.

set(mpgpu_halo_mpi "")
foreach(target MPI::MPI_C MPI::MPI_CXX)
    if(TARGET ${target} AND mpgpu_halo_mpi STREQUAL "")
        set(mpgpu_halo_mpi ${target})
    endif()
endforeach()
if(CMAKE_CXX_COMPILER_LOADED AND mpgpu_halo_mpi AND NOT TARGET mpgpu_halo_c)
    add_library(mpgpu_halo_c STATIC EXCLUDE_FROM_ALL "${MPGPU_C_DIR}/halo_indexed.cpp")
    add_library(mpgpu::halo_c ALIAS mpgpu_halo_c)
    set_target_properties(mpgpu_halo_c PROPERTIES POSITION_INDEPENDENT_CODE ON
        CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF)
    if(CMAKE_CUDA_COMPILER_LOADED)
        set_source_files_properties("${MPGPU_C_DIR}/halo_indexed.cpp" PROPERTIES LANGUAGE CUDA)
    endif()
    # Only the header folders of MPI are used, because nvcc does not accept the flags of MPI's C++ compiler.
    target_include_directories(mpgpu_halo_c SYSTEM PRIVATE $<TARGET_PROPERTY:${mpgpu_halo_mpi},INTERFACE_INCLUDE_DIRECTORIES>)
    target_link_libraries(mpgpu_halo_c PUBLIC mpgpu::mpgpu INTERFACE ${mpgpu_halo_mpi})

    if(CMAKE_Fortran_COMPILER_LOADED)
        mpgpu_add_fortran(halo_fortran indexed.f90)
        target_link_libraries(mpgpu_halo_fortran PUBLIC mpgpu_fortran mpgpu_halo_c)
    endif()
endif()
unset(mpgpu_halo_mpi)
