# Tests a C program that is linked with -static. The driver cannot be loaded, which must be reported, and the host
# backend must work.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

file(MAKE_DIRECTORY "${BUILD}")
execute_process(COMMAND "${CC}" -print-file-name=libc.a OUTPUT_VARIABLE libc OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT IS_ABSOLUTE "${libc}")
    message(NOTICE "skipped: there is no libc.a")
    return()
endif()
run("${CC}" -static "-I${SOURCE}/include" "${PACKAGE_TESTS}/static_program/main.c" "${PACKAGE_TESTS}/consumer/copy_check.c" "${ARCHIVE}"
    ${NATIVE_FLAGS} -o "${BUILD}/program")
run_consumer("${BUILD}/program")
