# Tests mpgpu as part of another project's tree, built offline from cargo's cache. The test reuses the target folder of
# the outer build, so that nothing is compiled twice.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

build_project("${PACKAGE_TESTS}/subdirectory" "${BUILD}" "-DMODE=${MODE}" "-DMPGPU_SOURCE=${SOURCE}" -DMPGPU_OFFLINE=ON
    "-DMPGPU_CARGO=${CARGO}" "-DMPGPU_RUSTC=${RUSTC}" "-DMPGPU_CARGO_TARGET_DIR=${TARGET_DIR}" "-DMPGPU_CARGO_FEATURES=${FEATURES}")
run_consumer("${BUILD}/consumer")
