# Tests a shared object that contains the archive and has no undefined symbols. A program that does not use mpgpu loads
# the shared object.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

file(MAKE_DIRECTORY "${BUILD}")
set(plugin "${BUILD}/libplugin.so")
run("${CC}" -shared -fPIC -fvisibility=hidden "-I${SOURCE}/include" "${PACKAGE_TESTS}/shared_object/plugin.c"
    "${PACKAGE_TESTS}/consumer/copy_check.c" "${ARCHIVE}" ${NATIVE_FLAGS}
    -Wl,-z,defs -Wl,-z,text -Wl,--fatal-warnings -Wl,--exclude-libs,ALL -o "${plugin}")
run("${READELF}" --dyn-syms --wide "${plugin}")
string(REGEX MATCHALL " (GLOBAL|WEAK|UNIQUE) +[A-Z]+ +[0-9]+ [^ \n]+" exported "${output}")
list(TRANSFORM exported REPLACE ".* " "")
list(REMOVE_ITEM exported _init _fini __bss_start _edata _end)
if(NOT exported STREQUAL "plugin_run")
    message(FATAL_ERROR "the plugin exports more than plugin_run: ${exported}")
endif()
run("${CC}" "${PACKAGE_TESTS}/shared_object/host.c" -o "${BUILD}/host" -ldl)
run_consumer("${BUILD}/host" "${plugin}")
