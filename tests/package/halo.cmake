# Builds an outside project that exchanges entries by index lists in C and Fortran with the installed package, whose
# prefix was moved. Then builds the C program without CMake, as the guide describes.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

find_program(MPICC mpicc)
find_program(MPICXX mpicxx)
if(NOT MPICC OR NOT MPICXX)
    message("skipped: no mpicc or mpicxx was found; install libopenmpi-dev (Debian)")
    return()
endif()
# Containers run as root.
set(ENV{OMPI_ALLOW_RUN_AS_ROOT} 1)
set(ENV{OMPI_ALLOW_RUN_AS_ROOT_CONFIRM} 1)

build_project("${PACKAGE_TESTS}/halo" "${BUILD}/project" "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DCMAKE_Fortran_COMPILER=${FORTRAN}")
run_consumer("${BUILD}/project/in_c")
if(FORTRAN)
    run_consumer("${BUILD}/project/in_fortran")
endif()

file(GLOB_RECURSE archive "${PREFIX}/*/libmpgpu.a")
run("${MPICXX}" -std=c++17 -O2 "-I${PREFIX}/include" -c "${PREFIX}/include/mpgpu/c/halo_indexed.cpp" -o "${BUILD}/halo_indexed.o")
run("${MPICC}" -std=c99 "-I${PREFIX}/include" "${PACKAGE_TESTS}/halo/main.c" "${BUILD}/halo_indexed.o" "${archive}" ${NATIVE_FLAGS}
    -o "${BUILD}/by_hand")
run_consumer("${BUILD}/by_hand")
