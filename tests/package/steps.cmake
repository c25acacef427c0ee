# Functions for the cases of this folder. Each case is `cmake -D… -P CASE.cmake`, with the variables
#   SOURCE      mpgpu's source folder          PREFIX      the installed and moved package
#   BUILD       a folder of its own            ARCHIVE     libmpgpu.a in the build tree
#   CC, CXX …   the compilers                  CARGO …     the tools that built the archive
#   GENERATOR   of outside projects

cmake_minimum_required(VERSION 3.22)

set(PACKAGE_TESTS "${SOURCE}/tests/package")

# Runs a command, and ends the case if the command fails. The command's output is stored in ${output}.
function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE stdout ERROR_VARIABLE stderr)
    if(NOT result EQUAL 0)
        list(JOIN ARGN " " command)
        # The text is a notice, because CMake breaks the lines of an error's text.
        message(NOTICE "${command}\n${stdout}${stderr}")
        message(FATAL_ERROR "exited with ${result}: see above")
    endif()
    set(output "${stdout}" PARENT_SCOPE)
endfunction()

# Runs a command that must fail with output that matches `pattern`.
function(refused pattern)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE stdout ERROR_VARIABLE stderr)
    list(JOIN ARGN " " command)
    if(result EQUAL 0)
        message(NOTICE "${command}\n${stdout}${stderr}")
        message(FATAL_ERROR "succeeded, and should have been refused: see above")
    endif()
    # CMake breaks the lines of its messages.
    string(REGEX REPLACE "[ \n]+" " " text "${stdout}${stderr}")
    if(NOT text MATCHES "${pattern}")
        message(NOTICE "${command}\n${stdout}${stderr}")
        message(FATAL_ERROR "failed, but said nothing like \"${pattern}\": see above")
    endif()
endfunction()

# Runs a consumer's program, which prints "copied" if every byte was right.
function(run_consumer)
    run(${ARGN})
    if(NOT output MATCHES "copied")
        message(FATAL_ERROR "${ARGN} printed: ${output}")
    endif()
endfunction()

# Configures and builds an outside project in an empty folder.
function(build_project source binary)
    file(REMOVE_RECURSE "${binary}")
    run("${CMAKE_COMMAND}" -S "${source}" -B "${binary}" -G "${GENERATOR}"
        "-DCMAKE_C_COMPILER=${CC}" "-DCMAKE_CXX_COMPILER=${CXX}" ${ARGN})
    run("${CMAKE_COMMAND}" --build "${binary}")
endfunction()
