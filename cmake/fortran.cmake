# Defines mpgpu::fortran, the Fortran modules, if the project uses Fortran, and mpgpu::fortran_mpi if the project has
# also found MPI's Fortran interface. The project's compiler compiles the modules, because module files differ between
# compilers. MPGPU_FORTRAN_DIR contains the sources.

if(CMAKE_Fortran_COMPILER_LOADED)
    # mpgpu_add_fortran(<name> <source>...)
    function(mpgpu_add_fortran name)
        if(NOT TARGET mpgpu_${name})
            list(TRANSFORM ARGN PREPEND "${MPGPU_FORTRAN_DIR}/")
            set(modules "${CMAKE_CURRENT_BINARY_DIR}/mpgpu_${name}")
            add_library(mpgpu_${name} STATIC EXCLUDE_FROM_ALL ${ARGN})
            add_library(mpgpu::${name} ALIAS mpgpu_${name})
            set_target_properties(mpgpu_${name} PROPERTIES Fortran_MODULE_DIRECTORY "${modules}" POSITION_INDEPENDENT_CODE ON)
            target_include_directories(mpgpu_${name} PUBLIC "${modules}")
            target_link_libraries(mpgpu_${name} PUBLIC mpgpu::mpgpu)
        endif()
    endfunction()

    mpgpu_add_fortran(fortran c_abi.f90 errors.f90 mesh.f90 streams.f90 mpgpu.f90)
    if(TARGET MPI::MPI_Fortran)
        mpgpu_add_fortran(fortran_mpi mpi.f90)
        target_link_libraries(mpgpu_fortran_mpi PUBLIC mpgpu_fortran MPI::MPI_Fortran)
    endif()
endif()
