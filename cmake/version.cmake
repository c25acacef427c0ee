# Reads the version from Cargo.toml, which defines it. The header repeats the version for the preprocessor and must
# agree.

function(mpgpu_read_version version rust_version)
    set(manifest "${CMAKE_CURRENT_SOURCE_DIR}/Cargo.toml")
    # A change of Cargo.toml must cause CMake to configure again.
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${manifest}")
    file(READ "${manifest}" text)
    # Only the first table of the file is used, because dependencies have their own versions.
    string(REGEX REPLACE "\n\\[.*" "" package "${text}")
    if(NOT package MATCHES "\nversion *= *\"([0-9]+\\.[0-9]+\\.[0-9]+)\"")
        message(FATAL_ERROR "${manifest}: no line like version = \"1.2.3\" under [package].")
    endif()
    set(${version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    if(NOT package MATCHES "\nrust-version *= *\"([0-9.]+)\"")
        message(FATAL_ERROR "${manifest}: no line like rust-version = \"1.88\" under [package].")
    endif()
    set(${rust_version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

function(mpgpu_check_header_version version)
    set(header "${CMAKE_CURRENT_SOURCE_DIR}/include/mpgpu/mpgpu.h")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
    file(READ "${header}" text)
    set(parts "")
    foreach(part IN ITEMS MAJOR MINOR PATCH)
        if(NOT text MATCHES "#define MP_VERSION_${part} ([0-9]+)")
            message(FATAL_ERROR "${header}: no #define MP_VERSION_${part}.")
        endif()
        list(APPEND parts "${CMAKE_MATCH_1}")
    endforeach()
    list(JOIN parts "." stated)
    if(NOT stated VERSION_EQUAL version)
        message(FATAL_ERROR "mpgpu.h states version ${stated}, Cargo.toml ${version}: "
            "regenerate the header with UPDATE_HEADER=1 cargo build.")
    endif()
endfunction()
