# cmake -D… -P archive.cmake: builds lib${NAME}.a (libmpgpu.a), whose only global symbols are mp_*.
#
# A Rust static library contains the standard library and every dependency as global symbols, and its C++ contains
# inline functions and templates as weak symbols. If a program also links a second Rust archive, or C++ that instantiates
# the same templates, the linker would report duplicates or silently mix both. Therefore, everything is merged into one
# object file, in which all symbols except the public ones become local:
#
#   cargo rustc   builds one staticlib and no other kind of library, because cargo turns fat LTO off if it must also
#                 build an rlib.
#   ld -r         merges the members that the mp_* symbols need, and dissolves section groups (COMDAT). A group is
#                 identified by its name, even if the name is local. The final link could otherwise drop our group in
#                 favour of the consumer's group of the same name, and local references into our group would dangle.
#                 --gc-sections is not used: in a partial link, it leaves the unwind entries of removed functions. The
#                 final link can still remove unused functions, because each function keeps its own section.
#   objcopy       makes symbols local, and drops what a Release build does not ship.
#   ar            creates the archive with this one member and an index.
#
# Symbols are read with readelf. nm may load an LLVM plugin that aborts if LLVM bitcode is newer than the plugin, and
# Rust's standard library contains bitcode.

cmake_minimum_required(VERSION 3.22)

function(run what)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT result EQUAL 0)
        list(JOIN ARGN " " command)
        # The text is a notice, because CMake breaks the lines of an error's text.
        message(NOTICE "${command}\n${output}")
        message(FATAL_ERROR "${what} failed (${result}), see above.")
    endif()
endfunction()

get_filename_component(directory "${OUTPUT}" DIRECTORY)
file(MAKE_DIRECTORY "${directory}")

# --- cargo ---------------------------------------------------------------------------------------------------------------
set(native_libs_file "${TARGET_DIR}/native-static-libs-${PROFILE}.txt")
file(MAKE_DIRECTORY "${TARGET_DIR}")
set(options --lib --crate-type staticlib --profile "${PROFILE}" --locked --target-dir "${TARGET_DIR}")
if(FEATURES)
    list(APPEND options --features "${FEATURES}")
endif()
if(OFFLINE)
    list(APPEND options --offline)
endif()
if(DEBUG_SECTIONS AND PROFILE STREQUAL "release")
    list(APPEND options --config "profile.release.debug='limited'")
endif()
# Commands of a custom build step have no access to the job server of make. Without these settings, cargo would warn
# that it cannot reach it.
set(environment --unset=MAKEFLAGS --unset=MFLAGS "RUSTC=${RUSTC}")
if(CXX)
    list(APPEND environment "CXX=${CXX}")
endif()
# cargo prints JSON that contains the location of the archive. Settings such as build.target or the profile change this
# location.
execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env ${environment} "${CARGO}" rustc ${options}
        --message-format=json-render-diagnostics -- "--print=native-static-libs=${native_libs_file}"
    WORKING_DIRECTORY "${SOURCE}"
    OUTPUT_VARIABLE messages
    RESULT_VARIABLE result)
if(NOT result EQUAL 0)
    set(hint "")
    if(OFFLINE)
        set(hint " MPGPU_OFFLINE is ON: run `cargo fetch --locked` or `cargo vendor` where there is a network, or turn it OFF.")
    endif()
    message(FATAL_ERROR "cargo could not build ${NAME} (${result}), see above.${hint}")
endif()
if(NOT messages MATCHES "\"([^\"]*/lib${NAME}\\.a)\"")
    message(FATAL_ERROR "cargo built no lib${NAME}.a. Its messages:\n${messages}")
endif()
set(staticlib "${CMAKE_MATCH_1}")

# --- the libraries that the package files name ---------------------------------------------------------------------------
file(READ "${native_libs_file}" native_libs)
string(REGEX MATCHALL "-l[^ \n]+" native_libs "${native_libs}")
separate_arguments(NATIVE_LIBS UNIX_COMMAND "${NATIVE_LIBS}")
foreach(lib IN LISTS native_libs)
    string(REGEX REPLACE "^-l" "" lib "${lib}")
    if(NOT lib IN_LIST NATIVE_LIBS AND NOT lib MATCHES "^(gcc_s|c)$")
        message(FATAL_ERROR "With this toolchain lib${NAME}.a needs -l${lib}, which the package does not name: "
            "add it to MPGPU_NATIVE_LIBS in cmake/library.cmake.")
    endif()
endforeach()

# --- roots ---------------------------------------------------------------------------------------------------------------
execute_process(COMMAND "${READELF}" --symbols --wide "${staticlib}" OUTPUT_VARIABLE symbols RESULT_VARIABLE result ERROR_QUIET)
# Num: Value Size Type Bind Vis Ndx Name
string(REGEX MATCHALL " GLOBAL +DEFAULT +[0-9]+ mp_[A-Za-z0-9_]+\n" roots "${symbols}")
list(TRANSFORM roots REPLACE ".* (mp_[A-Za-z0-9_]+)\n" "--undefined=\\1")
list(REMOVE_DUPLICATES roots)
if(NOT roots)
    message(FATAL_ERROR "${staticlib} defines no mp_* symbol (${READELF} exited with ${result}).")
endif()

# --- merge, localise, archive --------------------------------------------------------------------------------------------
set(merged "${OUTPUT}.merged.o")
set(object "${directory}/${NAME}.o")
run("Merging lib${NAME}.a" "${LD}" -r --force-group-allocation ${roots} -o "${merged}" "${staticlib}")

# objcopy leaves STB_GNU_UNIQUE symbols global (static variables of inline functions and templates, from g++). They are
# first made weak, so that the next pass makes them local like all others. This needs a separate pass, because objcopy
# decides by the binding that a symbol has in its input.
execute_process(COMMAND "${READELF}" --symbols --wide "${merged}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL " UNIQUE +[A-Z]+ +[0-9]+ [^ \n]+\n" unique "${symbols}")
list(TRANSFORM unique REPLACE ".* ([^ \n]+)\n" "\\1\n")
if(unique)
    list(JOIN unique "" unique)
    file(WRITE "${OUTPUT}.unique" "${unique}")
    run("Hiding the internal symbols of lib${NAME}.a" "${OBJCOPY}" "--weaken-symbols=${OUTPUT}.unique" "${merged}")
endif()

set(strip "")
if(NOT DEBUG_SECTIONS)
    set(strip --strip-debug)
endif()
run("Hiding the internal symbols of lib${NAME}.a" "${OBJCOPY}" ${strip} --remove-section=.llvmbc --remove-section=.llvmcmd
    --wildcard "--keep-global-symbol=mp_*" "${merged}" "${object}")

# The archive is written under another name and then renamed. An interrupted build therefore leaves no incomplete
# archive that seems to be up to date.
file(REMOVE "${OUTPUT}.new")
run("Writing lib${NAME}.a" "${AR}" qcs "${OUTPUT}.new" "${object}")
file(REMOVE "${merged}" "${object}" "${OUTPUT}.unique")

# --- dependencies --------------------------------------------------------------------------------------------------------
# cargo lists every source file of the crate and the files that the build script watches, for its own output.
string(REGEX REPLACE "\\.a$" ".d" cargo_depfile "${staticlib}")
file(READ "${cargo_depfile}" dependencies)
string(REGEX REPLACE "^[^\n]*lib${NAME}\\.a:" "" dependencies "${dependencies}")
string(REGEX REPLACE "\n.*" "" dependencies "${dependencies}")
string(REPLACE " " "\\ " target "${OUTPUT}")
file(WRITE "${OUTPUT}.d" "${target}:${dependencies}\n")

file(RENAME "${OUTPUT}.new" "${OUTPUT}")
