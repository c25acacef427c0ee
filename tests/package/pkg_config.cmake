# Builds a C program without CMake, by the compiler's command line only.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

file(GLOB_RECURSE pc "${PREFIX}/*/mpgpu.pc")
get_filename_component(folder "${pc}" DIRECTORY)
set(ENV{PKG_CONFIG_PATH} "${folder}")
run("${PKG_CONFIG}" --modversion mpgpu)
if(NOT output MATCHES "^${VERSION}\n")
    message(FATAL_ERROR "pkg-config says version ${output}, and it is ${VERSION}")
endif()
refused("" "${PKG_CONFIG}" "mpgpu >= 99")
file(MAKE_DIRECTORY "${BUILD}")
run("${PKG_CONFIG}" --cflags mpgpu)
separate_arguments(cflags UNIX_COMMAND "${output}")
run("${PKG_CONFIG}" --libs mpgpu)
separate_arguments(libs UNIX_COMMAND "${output}")
run("${CC}" -Wall -Wextra -Werror -pedantic -std=c11 ${cflags} "${PACKAGE_TESTS}/consumer/main.c"
    "${PACKAGE_TESTS}/consumer/copy_check.c" -o "${BUILD}/consumer" ${libs})
run_consumer("${BUILD}/consumer")
