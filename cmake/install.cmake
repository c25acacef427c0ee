# Installs the headers, the archive, the CMake and pkg-config files, and the licences. No installed file contains an
# absolute path, so the prefix can be moved.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(MPGPU_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/mpgpu")
set(MPGPU_PKGCONFIG_DIR "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

install(FILES "${MPGPU_ARCHIVE}" DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT mpgpu)
install(DIRECTORY include/mpgpu DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT mpgpu
    FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" PATTERN "*.cuh" PATTERN "*.f90" PATTERN "*.cpp")
install(FILES LICENSE-MIT LICENSE-APACHE LICENSE-THIRD-PARTY DESTINATION "${CMAKE_INSTALL_DATAROOTDIR}/licenses/mpgpu" COMPONENT mpgpu)

foreach(path IN ITEMS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
    if(IS_ABSOLUTE "${${path}}")
        message(FATAL_ERROR "${path}=${${path}} is absolute: mpgpu installs a prefix that can be moved, so give a folder "
            "below CMAKE_INSTALL_PREFIX, or set MPGPU_INSTALL=OFF.")
    endif()
endforeach()

set(MPGPU_ARCHIVE_INSTALLED "${CMAKE_INSTALL_LIBDIR}/libmpgpu.a")
set(MPGPU_SHARED_INSTALLED "${CMAKE_INSTALL_LIBDIR}/libmpgpu.so.${PROJECT_VERSION}")
configure_package_config_file(cmake/mpgpu-config.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/mpgpu-config.cmake"
    INSTALL_DESTINATION "${MPGPU_CMAKE_DIR}"
    PATH_VARS MPGPU_ARCHIVE_INSTALLED MPGPU_SHARED_INSTALLED CMAKE_INSTALL_INCLUDEDIR
    NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Before version 1.0, a minor version may be incompatible with the previous one.
if(PROJECT_VERSION_MAJOR EQUAL 0)
    set(compatibility SameMinorVersion)
else()
    set(compatibility SameMajorVersion)
endif()
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/mpgpu-config-version.cmake"
    VERSION "${PROJECT_VERSION}" COMPATIBILITY ${compatibility})
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/mpgpu-config.cmake" "${CMAKE_CURRENT_BINARY_DIR}/mpgpu-config-version.cmake"
    DESTINATION "${MPGPU_CMAKE_DIR}" COMPONENT mpgpu)
install(FILES cmake/fortran.cmake DESTINATION "${MPGPU_CMAKE_DIR}" RENAME mpgpu-fortran.cmake COMPONENT mpgpu)
install(FILES cmake/halo.cmake DESTINATION "${MPGPU_CMAKE_DIR}" RENAME mpgpu-halo.cmake COMPONENT mpgpu)

# Path from the folder of mpgpu.pc to the prefix.
file(RELATIVE_PATH MPGPU_PC_TO_PREFIX "/${MPGPU_PKGCONFIG_DIR}" "/")
string(REGEX REPLACE "/$" "" MPGPU_PC_TO_PREFIX "${MPGPU_PC_TO_PREFIX}")
list(TRANSFORM MPGPU_NATIVE_LIBS PREPEND "-l" OUTPUT_VARIABLE MPGPU_PC_LIBS)
list(JOIN MPGPU_PC_LIBS " " MPGPU_PC_LIBS)
# If both libraries exist, -lmpgpu links the shared library, which needs no further libraries.
set(MPGPU_PC_PRIVATE "")
if(MPGPU_BUILD_SHARED)
    set(MPGPU_PC_PRIVATE "${MPGPU_PC_LIBS}")
    set(MPGPU_PC_LIBS "")
endif()
configure_file(cmake/mpgpu.pc.in "${CMAKE_CURRENT_BINARY_DIR}/mpgpu.pc" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/mpgpu.pc" DESTINATION "${MPGPU_PKGCONFIG_DIR}" COMPONENT mpgpu)
