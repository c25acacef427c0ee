# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recipe of Spack. From a checkout:

spack repo add packaging/spack
spack dev-build mpgpu@main

or, of a release, from the archive that packaging/release makes, which has all crates in it: put it into a mirror of Spack as
mpgpu/mpgpu-VERSION.tar.gz and add its checksum below.
"""

from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Mpgpu(CMakePackage):
    """Moves data between the memories of one node, GPUs and host, over every link that can help at once: library for C, C++ and Fortran,
    with the command mpgpu."""

    # Of releases until their archives have an address.
    manual_download = True

    license("MIT OR Apache-2.0", checked_by="mpgpu contributors")

    version("main", deprecated=False)

    variant("shared", default=False, description="Also build libmpgpu.so")
    variant("command", default=True, description="Build mpgpu and mpgpu-bench, the commands")
    variant("preload", default=True, description="Build the interposer, by which mpgpu run works")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("ninja", type="build")
    depends_on("rust@1.88:", type="build")
    # ld, objcopy and readelf make the archive that exports mp_* alone.
    depends_on("binutils@2.29:", type="build")

    conflicts("platform=darwin", msg="mpgpu is for Linux")
    conflicts("platform=windows", msg="mpgpu is for Linux")
    requires("target=x86_64:", "target=aarch64:", policy="one_of", msg="mpgpu is for x86-64 and AArch64")

    generator("ninja")

    def cmake_args(self):
        return [
            self.define("MPGPU_BUILD_TESTS", False),
            self.define("MPGPU_BUILD_EXAMPLES", False),
            self.define_from_variant("MPGPU_BUILD_SHARED", "shared"),
            self.define_from_variant("MPGPU_BUILD_COMMAND", "command"),
            self.define_from_variant("MPGPU_BUILD_PRELOAD", "preload"),
            # Release archives have the crates beside them; a checkout's are fetched.
            self.define("MPGPU_OFFLINE", self.spec.satisfies("@0:")),
            self.define("MPGPU_CARGO", self.spec["rust"].prefix.bin.cargo),
            self.define("MPGPU_RUSTC", self.spec["rust"].prefix.bin.rustc),
        ]
