# Installs mpgpu into a prefix and moves the prefix, so that nothing remains at the original location. The new path
# contains a space.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

set(first "${BUILD}/first")
file(REMOVE_RECURSE "${first}" "${PREFIX}")
run("${CMAKE_COMMAND}" --install "${BINARY}" --config "${CONFIG}" --prefix "${first}")
get_filename_component(parent "${PREFIX}" DIRECTORY)
file(MAKE_DIRECTORY "${parent}")
file(RENAME "${first}" "${PREFIX}")

file(GLOB_RECURSE installed RELATIVE "${PREFIX}" "${PREFIX}/*")
foreach(wanted IN ITEMS "include/mpgpu/mpgpu.h" "include/mpgpu/mpgpu.hpp" "include/mpgpu/fortran/mpgpu.f90" "include/mpgpu/c/halo_indexed.cpp" "lib[^/]*(/.*)?/libmpgpu.a" "cmake/mpgpu/mpgpu-config.cmake"
        "pkgconfig/mpgpu.pc" "licenses/mpgpu/LICENSE-MIT" "licenses/mpgpu/LICENSE-APACHE" "licenses/mpgpu/LICENSE-THIRD-PARTY")
    if(NOT installed MATCHES "${wanted}")
        message(FATAL_ERROR "not installed: ${wanted}; installed: ${installed}")
    endif()
endforeach()
foreach(file IN LISTS installed)
    if(file MATCHES "\\.(cmake|pc|h|hpp|cuh|f90|cpp)$")
        file(READ "${PREFIX}/${file}" text)
        foreach(path IN ITEMS "${first}" "${SOURCE}" "${BINARY}")
            string(FIND "${text}" "${path}" at)
            if(NOT at EQUAL -1)
                message(FATAL_ERROR "${file} names ${path}: the prefix cannot be moved")
            endif()
        endforeach()
    endif()
endforeach()
