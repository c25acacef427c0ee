# Builds an outside project in LANGUAGE that finds the installed package, whose prefix was moved.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

build_project("${PACKAGE_TESTS}/consumer" "${BUILD}" "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DLANGUAGE=${LANGUAGE}" "-DWANTED=${VERSION}")
run_consumer("${BUILD}/consumer")
