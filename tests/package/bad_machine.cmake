# Tests the error messages of configuring with wrong sources or tools.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

file(REMOVE_RECURSE "${BUILD}")
set(configure "${CMAKE_COMMAND}" -G "${GENERATOR}" "-DCMAKE_C_COMPILER=${CC}" "-DCMAKE_CXX_COMPILER=${CXX}"
    -DMPGPU_BUILD_TESTS=OFF -DMPGPU_BUILD_EXAMPLES=OFF)

# Case: cargo is missing.
refused("mpgpu needs cargo [0-9.]+ or newer, and found none" ${configure} -S "${SOURCE}" -B "${BUILD}/no-cargo" -DMPGPU_CARGO=)

# Case: rustc is older than the rust-version of the crate.
file(WRITE "${BUILD}/rustc" "#!/bin/sh\necho 'rustc 1.70.0 (90c541806 2023-05-31)'\n")
file(CHMOD "${BUILD}/rustc" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
refused("needs rustc [0-9.]+ or newer, and .* is 1.70.0" ${configure} -S "${SOURCE}" -B "${BUILD}/old-rustc" "-DMPGPU_RUSTC=${BUILD}/rustc")

# Case: the linker is not GNU ld.
refused("MPGPU_LD=/bin/true is not that" ${configure} -S "${SOURCE}" -B "${BUILD}/no-ld" -DMPGPU_LD=/bin/true)

# Case: the version of the header differs from Cargo.toml.
file(COPY "${SOURCE}/CMakeLists.txt" "${SOURCE}/Cargo.toml" "${SOURCE}/cmake" "${SOURCE}/include" DESTINATION "${BUILD}/source")
file(READ "${BUILD}/source/include/mpgpu/mpgpu.h" header)
string(REGEX REPLACE "#define MP_VERSION_MINOR [0-9]+" "#define MP_VERSION_MINOR 77" header "${header}")
file(WRITE "${BUILD}/source/include/mpgpu/mpgpu.h" "${header}")
refused("mpgpu.h states version [0-9]+.77.[0-9]+, Cargo.toml ${VERSION}" ${configure} -S "${BUILD}/source" -B "${BUILD}/header")
