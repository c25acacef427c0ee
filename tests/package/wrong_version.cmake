# Tests that CMake refuses incompatible versions of the package and reports the version that it found. Before 1.0, the
# minor version must match.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

string(REGEX MATCH "^([0-9]+)\\.([0-9]+)\\.([0-9]+)$" whole "${VERSION}")
math(EXPR next_major "${CMAKE_MATCH_1} + 1")
math(EXPR next_minor "${CMAKE_MATCH_2} + 1")
math(EXPR next_patch "${CMAKE_MATCH_3} + 1")
set(wanted 99 "${next_major}.0" "${CMAKE_MATCH_1}.${next_minor}" "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${next_patch}")
if(CMAKE_MATCH_1 EQUAL 0 AND CMAKE_MATCH_2 GREATER 0)
    math(EXPR previous_minor "${CMAKE_MATCH_2} - 1")
    list(APPEND wanted "0.${previous_minor}")
endif()
foreach(version IN LISTS wanted)
    file(REMOVE_RECURSE "${BUILD}")
    refused("mpgpu-config.cmake, version: ${VERSION}"
        "${CMAKE_COMMAND}" -S "${PACKAGE_TESTS}/consumer" -B "${BUILD}" -G "${GENERATOR}" "-DCMAKE_C_COMPILER=${CC}"
        "-DCMAKE_PREFIX_PATH=${PREFIX}" -DLANGUAGE=C "-DWANTED=${version}")
endforeach()
