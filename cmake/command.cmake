# Builds the mpgpu command with its manual pages and shell completions, in bin/ and share/ of the build folder. cargo
# determines what must be rebuilt.

include(GNUInstallDirs)
set(MPGPU_COMMAND_ENVIRONMENT --unset=MAKEFLAGS --unset=MFLAGS "RUSTC=${MPGPU_RUSTC}")
if(MPGPU_CARGO_CXX)
    list(APPEND MPGPU_COMMAND_ENVIRONMENT "CXX=${MPGPU_CARGO_CXX}")
endif()
# Location of the interposer relative to the command. `mpgpu run` searches it in addition to fixed locations
# (rust/cli/run.rs).
file(RELATIVE_PATH MPGPU_BIN_TO_LIB "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
if(NOT MPGPU_BIN_TO_LIB MATCHES "^\\.\\./(lib|lib64|lib/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu)$")
    list(APPEND MPGPU_COMMAND_ENVIRONMENT "MPGPU_LIBRARY_FOLDER=${MPGPU_BIN_TO_LIB}")
endif()

set(MPGPU_COMMAND "${CMAKE_CURRENT_BINARY_DIR}/bin/mpgpu")
set(MPGPU_COMMAND_SHARE "${CMAKE_CURRENT_BINARY_DIR}/share")
set(MPGPU_COMMAND_LINE "${CMAKE_COMMAND}" -E env ${MPGPU_COMMAND_ENVIRONMENT} "${MPGPU_CARGO}" install --quiet --path rust/cli --bin mpgpu
    --root "${CMAKE_CURRENT_BINARY_DIR}" --no-track --force --profile "$<IF:$<CONFIG:Debug>,dev,release>" --locked
    --target-dir "${MPGPU_CARGO_TARGET_DIR}" "$<$<BOOL:${MPGPU_OFFLINE}>:--offline>")
add_custom_target(mpgpu_command ALL
    COMMAND ${MPGPU_COMMAND_LINE}
    COMMAND "${MPGPU_COMMAND}" pages "${MPGPU_COMMAND_SHARE}"
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}"
    BYPRODUCTS "${MPGPU_COMMAND}"
    COMMENT "Building the mpgpu command, which takes minutes the first time"
    COMMAND_EXPAND_LISTS USES_TERMINAL VERBATIM)
# This cargo must not run at the same time as the one that builds the library, because both use the same target folder.
add_dependencies(mpgpu_command mpgpu_archive)

if(MPGPU_INSTALL)
    install(PROGRAMS "${MPGPU_COMMAND}" DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT mpgpu)
    install(DIRECTORY "${MPGPU_COMMAND_SHARE}/" DESTINATION "${CMAKE_INSTALL_DATAROOTDIR}" COMPONENT mpgpu)
endif()
