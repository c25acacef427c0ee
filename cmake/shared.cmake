# Defines mpgpu::shared, the shared library libmpgpu.so, which contains the archive. With it, several plugins of a
# process use the same mpgpu. The library exports mp_* under one symbol version. The soname changes with incompatible
# versions. Before 1.0, these are the minor versions.

if(PROJECT_VERSION_MAJOR EQUAL 0)
    set(MPGPU_SOVERSION "0.${PROJECT_VERSION_MINOR}")
else()
    set(MPGPU_SOVERSION "${PROJECT_VERSION_MAJOR}")
endif()
set(map "${CMAKE_CURRENT_BINARY_DIR}/mpgpu.map")
file(CONFIGURE OUTPUT "${map}" CONTENT "MPGPU_@MPGPU_SOVERSION@ { global: mp_*; local: *; };\n" @ONLY)
file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/shared.c" CONTENT "/* All of libmpgpu.so is in libmpgpu.a. */\ntypedef int mpgpu_shared;\n")

add_library(mpgpu_shared SHARED "${CMAKE_CURRENT_BINARY_DIR}/shared.c")
add_library(mpgpu::shared ALIAS mpgpu_shared)
add_dependencies(mpgpu_shared mpgpu_archive)
set_target_properties(mpgpu_shared PROPERTIES OUTPUT_NAME mpgpu VERSION "${PROJECT_VERSION}" SOVERSION "${MPGPU_SOVERSION}"
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/shared" LINK_DEPENDS "${map};${MPGPU_ARCHIVE}")
target_include_directories(mpgpu_shared INTERFACE "${CMAKE_CURRENT_SOURCE_DIR}/include")
target_compile_features(mpgpu_shared INTERFACE cxx_std_17)
target_link_libraries(mpgpu_shared PRIVATE
    -Wl,--whole-archive "$<TARGET_FILE:mpgpu::mpgpu>" -Wl,--no-whole-archive -Wl,--as-needed ${MPGPU_INTERFACE_LIBS})
# The library is never unloaded, because its threads would continue to run.
target_link_options(mpgpu_shared PRIVATE "LINKER:--version-script=${map}" LINKER:-z,defs LINKER:-z,nodelete LINKER:-Bsymbolic-functions LINKER:--gc-sections)

if(MPGPU_INSTALL)
    include(GNUInstallDirs)
    install(TARGETS mpgpu_shared LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT mpgpu)
endif()
