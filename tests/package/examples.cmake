# Builds the examples as separate projects against the installed package, whose prefix was moved.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

foreach(example IN ITEMS c halo3d jacobi jacobi3d)
    build_project("${SOURCE}/examples/${example}" "${BUILD}/${example}" "-DCMAKE_PREFIX_PATH=${PREFIX}" -DCMAKE_BUILD_TYPE=Release)
    run("${CTEST}" --test-dir "${BUILD}/${example}" --no-tests=error --output-on-failure)
endforeach()

if(FORTRAN)
    build_project("${SOURCE}/examples/fortran" "${BUILD}/fortran" "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DCMAKE_Fortran_COMPILER=${FORTRAN}")
    run("${CTEST}" --test-dir "${BUILD}/fortran" --no-tests=error --output-on-failure)
endif()

find_program(MPICXX mpicxx)
if(MPICXX)
    foreach(example IN ITEMS conjugate_gradient jacobi_mpi)
        build_project("${SOURCE}/examples/${example}" "${BUILD}/${example}" "-DCMAKE_PREFIX_PATH=${PREFIX}" -DCMAKE_BUILD_TYPE=Release)
        run("${CTEST}" --test-dir "${BUILD}/${example}" --no-tests=error --output-on-failure)
    endforeach()
endif()
