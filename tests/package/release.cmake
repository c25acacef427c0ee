# Tests packaging/release. Its source archive must build without a network, alone and in another project's tree. CMake
# and pkg-config must find its binary archive.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

foreach(command IN ITEMS "git;rev-parse;HEAD" "unshare;-rn;true")
    execute_process(COMMAND ${command} WORKING_DIRECTORY "${SOURCE}" RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
    if(NOT result EQUAL 0)
        list(JOIN command " " command)
        message("skipped: `${command}` does not work here")
        return()
    endif()
endforeach()

# The library is not optimised, because the test checks only that it builds.
set(ENV{CARGO_PROFILE_RELEASE_LTO} off)
set(ENV{CARGO_PROFILE_RELEASE_OPT_LEVEL} 0)
set(ENV{CARGO_PROFILE_RELEASE_CODEGEN_UNITS} 16)
set(ENV{CC} "${CC}")
set(ENV{CXX} "${CXX}")
file(REMOVE_RECURSE "${BUILD}")
# The folder for commands is unusual, so that only the build can determine the path from a command to the interposer.
set(bin libexec/mpgpu)
run("${SOURCE}/packaging/release" "${BUILD}/release" "-DCMAKE_INSTALL_BINDIR=${bin}")
if(NOT output MATCHES "built without a network: ")
    message(FATAL_ERROR "packaging/release printed: ${output}")
endif()
run("${CMAKE_COMMAND}" -E chdir "${BUILD}/release" sha256sum --check --strict SHA256SUMS)
file(GLOB archive "${BUILD}/release/mpgpu-${VERSION}-linux-*.tar.gz")
run("${CMAKE_COMMAND}" -E chdir "${BUILD}" "${CMAKE_COMMAND}" -E tar xf "${archive}")
file(GLOB prefix "${BUILD}/mpgpu-${VERSION}-linux-*")
foreach(file IN ITEMS ${bin}/mpgpu lib/libmpgpu.a lib/libmpgpu_preload.so lib/libmpgpu_audit.so share/man/man1/mpgpu-plan.1
        share/bash-completion/completions/mpgpu share/licenses/mpgpu/LICENSE-THIRD-PARTY)
    if(NOT EXISTS "${prefix}/${file}")
        message(FATAL_ERROR "not in the archive: ${file}")
    endif()
endforeach()
# No file may contain the path of the build folder.
run(sh -c "! grep -rl '/\\.release\\.' '${prefix}'")

# A consumer needs neither Rust nor a network.
foreach(language IN ITEMS C CXX)
    build_project("${PACKAGE_TESTS}/consumer" "${BUILD}/${language}" "-DCMAKE_PREFIX_PATH=${prefix}" "-DLANGUAGE=${language}" "-DWANTED=${VERSION}")
    run_consumer(unshare -rn "${BUILD}/${language}/consumer")
endforeach()
if(PKG_CONFIG)
    set(ENV{PKG_CONFIG_PATH} "${prefix}/lib/pkgconfig")
    run("${PKG_CONFIG}" --cflags --libs mpgpu)
    separate_arguments(flags UNIX_COMMAND "${output}")
    run("${CC}" "${PACKAGE_TESTS}/consumer/main.c" "${PACKAGE_TESTS}/consumer/copy_check.c" -o "${BUILD}/consumer" ${flags})
    run_consumer("${BUILD}/consumer")
endif()
run("${prefix}/${bin}/mpgpu" bench --list)
run("${prefix}/${bin}/mpgpu" run -- sh -c "echo $LD_PRELOAD")
if(NOT output STREQUAL "${prefix}/lib/libmpgpu_preload.so\n")
    message(FATAL_ERROR "mpgpu run found ${output}")
endif()

# The source archive is part of another project's tree, and cargo's cache is empty.
run("${CMAKE_COMMAND}" -E chdir "${BUILD}" "${CMAKE_COMMAND}" -E tar xf "release/mpgpu-${VERSION}.tar.gz")
set(ENV{CARGO_HOME} "${BUILD}/cargo-home")
run(unshare -rn "${CMAKE_COMMAND}" -S "${PACKAGE_TESTS}/subdirectory" -B "${BUILD}/subdirectory" -G "${GENERATOR}" -DMODE=add_subdirectory
    "-DMPGPU_SOURCE=${BUILD}/mpgpu-${VERSION}" "-DMPGPU_CARGO=${CARGO}" "-DMPGPU_RUSTC=${RUSTC}" "-DCMAKE_C_COMPILER=${CC}" "-DCMAKE_CXX_COMPILER=${CXX}")
run(unshare -rn "${CMAKE_COMMAND}" --build "${BUILD}/subdirectory")
run_consumer(unshare -rn "${BUILD}/subdirectory/consumer")
