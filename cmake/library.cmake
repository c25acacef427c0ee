# Defines mpgpu::mpgpu. cargo builds the static library, and archive.cmake hides all of its symbols except mp_*.

# cargo itself reads the variables CARGO and RUSTC.
find_program(MPGPU_CARGO cargo HINTS ENV CARGO PATHS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin" DOC "cargo")
find_program(MPGPU_RUSTC rustc HINTS ENV RUSTC PATHS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin" DOC "rustc")
# The full name of GNU ld is tried first. `ld` may be lld, mold or gold, which cannot dissolve section groups in a
# partial link.
find_program(MPGPU_LD NAMES ld.bfd ld HINTS "${CMAKE_LINKER}" DOC "GNU ld")
find_program(MPGPU_OBJCOPY NAMES objcopy DOC "GNU objcopy")
find_program(MPGPU_READELF NAMES readelf DOC "GNU readelf")
mark_as_advanced(MPGPU_CARGO MPGPU_RUSTC MPGPU_LD MPGPU_OBJCOPY MPGPU_READELF)

function(mpgpu_check_rust_tool name program)
    if(NOT program)
        message(FATAL_ERROR "mpgpu needs ${name} ${MPGPU_RUST_VERSION} or newer, and found none. Install Rust "
            "(https://rustup.rs), put ${name} on PATH, or set MPGPU_CARGO and MPGPU_RUSTC.")
    endif()
    # The command runs in the source folder, because a rust-toolchain file there or a rustup override may select another
    # toolchain.
    execute_process(COMMAND "${program}" --version WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}"
        OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
    if(NOT result EQUAL 0 OR NOT output MATCHES "${name} ([0-9]+\\.[0-9]+\\.[0-9]+)")
        message(FATAL_ERROR "${program} --version failed (${result}): ${output}")
    endif()
    if(CMAKE_MATCH_1 VERSION_LESS MPGPU_RUST_VERSION)
        message(FATAL_ERROR "mpgpu needs ${name} ${MPGPU_RUST_VERSION} or newer, and ${program} is ${CMAKE_MATCH_1}. "
            "Update it (rustup update), or set MPGPU_CARGO and MPGPU_RUSTC to a newer toolchain.")
    endif()
endfunction()
mpgpu_check_rust_tool(cargo "${MPGPU_CARGO}")
mpgpu_check_rust_tool(rustc "${MPGPU_RUSTC}")

function(mpgpu_check_binutils option program version)
    set(output "")
    if(program)
        execute_process(COMMAND "${program}" --version OUTPUT_VARIABLE output ERROR_QUIET)
    endif()
    if(NOT output MATCHES "^GNU [^\n]* ([0-9]+\\.[0-9]+)[^\n]*\n" OR CMAKE_MATCH_1 VERSION_LESS version)
        string(REGEX REPLACE "\n.*" "" output "${output}")
        message(FATAL_ERROR "mpgpu hides its internal symbols with GNU binutils ${version} or newer; "
            "${option}=${program} is not that (\"${output}\"). Install binutils, or set ${option}.")
    endif()
endfunction()
# Version 2.29 introduced --force-group-allocation.
mpgpu_check_binutils(MPGPU_LD "${MPGPU_LD}" 2.29)
mpgpu_check_binutils(MPGPU_OBJCOPY "${MPGPU_OBJCOPY}" 2.29)
mpgpu_check_binutils(MPGPU_READELF "${MPGPU_READELF}" 2.29)

# The list is the output of `rustc --print native-static-libs` without gcc_s and c, which every compiler driver adds
# itself (and which a -static link replaces). The list contains the C++ runtime for consumers that link as C.
# archive.cmake compares the list with rustc's output in every build.
find_package(Threads REQUIRED)
set(MPGPU_NATIVE_LIBS stdc++ pthread dl rt util m)

# A multi-configuration generator needs one archive per configuration.
if(MPGPU_MULTI_CONFIG)
    set(MPGPU_ARCHIVE "${CMAKE_CURRENT_BINARY_DIR}/lib/$<CONFIG>/libmpgpu.a")
else()
    set(MPGPU_ARCHIVE "${CMAKE_CURRENT_BINARY_DIR}/lib/libmpgpu.a")
endif()

# The build script compiles the C++ sources in cpp/, by default with `c++` from PATH. Only these two compilers are
# passed to it. Other compilers (nvc++, icpx, wrappers) compile only the consumer, and the archive does not depend on
# the consumer's compiler.
set(MPGPU_CARGO_CXX "")
if(CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
    set(MPGPU_CARGO_CXX "${CMAKE_CXX_COMPILER}")
endif()

add_custom_command(
    OUTPUT "${MPGPU_ARCHIVE}"
    COMMAND "${CMAKE_COMMAND}"
        -DNAME=mpgpu
        "-DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}"
        "-DOUTPUT=${MPGPU_ARCHIVE}"
        "-DPROFILE=$<IF:$<CONFIG:Debug>,dev,release>"
        "-DDEBUG_SECTIONS=$<CONFIG:Debug,RelWithDebInfo>"
        "-DTARGET_DIR=${MPGPU_CARGO_TARGET_DIR}"
        "-DFEATURES=${MPGPU_CARGO_FEATURES}"
        "-DOFFLINE=${MPGPU_OFFLINE}"
        "-DNATIVE_LIBS=$<JOIN:${MPGPU_NATIVE_LIBS}, >"
        "-DCARGO=${MPGPU_CARGO}"
        "-DRUSTC=${MPGPU_RUSTC}"
        "-DCXX=${MPGPU_CARGO_CXX}"
        "-DLD=${MPGPU_LD}"
        "-DOBJCOPY=${MPGPU_OBJCOPY}"
        "-DREADELF=${MPGPU_READELF}"
        "-DAR=${CMAKE_AR}"
        -P "${CMAKE_CURRENT_SOURCE_DIR}/cmake/archive.cmake"
    DEPENDS Cargo.toml Cargo.lock cmake/archive.cmake
    DEPFILE "${MPGPU_ARCHIVE}.d"
    COMMENT "Building libmpgpu.a"
    USES_TERMINAL VERBATIM)
add_custom_target(mpgpu_archive ALL DEPENDS "${MPGPU_ARCHIVE}")

add_library(mpgpu::mpgpu STATIC IMPORTED GLOBAL)
add_dependencies(mpgpu::mpgpu mpgpu_archive)
list(TRANSFORM MPGPU_NATIVE_LIBS REPLACE "^pthread$" "Threads::Threads" OUTPUT_VARIABLE MPGPU_INTERFACE_LIBS)
set_target_properties(mpgpu::mpgpu PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_SOURCE_DIR}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_LINK_LIBRARIES "${MPGPU_INTERFACE_LIBS}")
if(MPGPU_MULTI_CONFIG)
    foreach(config IN LISTS CMAKE_CONFIGURATION_TYPES)
        string(TOUPPER "${config}" CONFIG)
        set_target_properties(mpgpu::mpgpu PROPERTIES
            IMPORTED_LOCATION_${CONFIG} "${CMAKE_CURRENT_BINARY_DIR}/lib/${config}/libmpgpu.a")
    endforeach()
else()
    set_target_properties(mpgpu::mpgpu PROPERTIES IMPORTED_LOCATION "${MPGPU_ARCHIVE}")
endif()
