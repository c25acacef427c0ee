# Tests a program that contains three Rust runtimes: libmpgpu.a, an unrelated archive as built by rustc, and the same
# unrelated crate with hidden symbols. In all of them, panics must still unwind and be caught. The test uses every
# compiler and linker of this machine, and both orders of the archives.
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

file(MAKE_DIRECTORY "${BUILD}")
run("${CARGO}" build --release --locked --offline --manifest-path "${PACKAGE_TESTS}/second_rust/Cargo.toml" --target-dir "${BUILD}/second")
set(second "${BUILD}/second/release/libsecond.a")
run("${CMAKE_COMMAND}" "-DNAME=second" "-DSOURCE=${PACKAGE_TESTS}/second_rust" "-DOUTPUT=${BUILD}/hidden/libsecond.a"
    -DPROFILE=release -DDEBUG_SECTIONS=0 "-DTARGET_DIR=${BUILD}/hidden/cargo" -DFEATURES=hidden -DOFFLINE=ON
    "-DNATIVE_LIBS=${NATIVE_LIBS}" "-DCARGO=${CARGO}" "-DRUSTC=${RUSTC}" "-DLD=${LD}" "-DOBJCOPY=${OBJCOPY}"
    "-DREADELF=${READELF}" "-DAR=${AR}" -P "${SOURCE}/cmake/archive.cmake")
set(hidden "${BUILD}/hidden/libsecond.a")

set(compilers "${CC}")
foreach(name IN ITEMS gcc clang)
    find_program(${name} ${name})
    if(${name} AND NOT ${name} IN_LIST compilers)
        list(APPEND compilers "${${name}}")
    endif()
endforeach()
set(linkers "")
foreach(name IN ITEMS bfd gold lld mold)
    find_program(ld_${name} ld.${name})
    if(ld_${name})
        list(APPEND linkers ${name})
    endif()
endforeach()

set(linked 0)
foreach(compiler IN LISTS compilers)
    foreach(linker IN LISTS linkers)
        foreach(option IN ITEMS -Wl,--no-gc-sections -Wl,--gc-sections)
            foreach(archives IN ITEMS "${ARCHIVE};${hidden};${second}" "${second};${ARCHIVE};${hidden}")
                run("${compiler}" "-fuse-ld=${linker}" ${option} -Wl,--fatal-warnings "-I${SOURCE}/include"
                    "${PACKAGE_TESTS}/second_rust/main.c" "${PACKAGE_TESTS}/consumer/copy_check.c" ${archives}
                    ${NATIVE_FLAGS} -o "${BUILD}/both")
                run_consumer("${BUILD}/both")
                math(EXPR linked "${linked} + 1")
            endforeach()
        endforeach()
    endforeach()
endforeach()
message(STATUS "${linked} programs: ${compilers} with ${linkers}")
if(linked EQUAL 0)
    message(FATAL_ERROR "no compiler or linker was found")
endif()
