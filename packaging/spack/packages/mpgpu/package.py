# SPDX-License-Identifier: MIT OR Apache-2.0
# Recipe of Spack: spack repo add packaging/spack, and then one of
#
#   spack dev-build mpgpu@main                      in a checkout
#   spack install --no-checksum mpgpu@0.1.0         beside the source archive of packaging/release, which has all crates in it
import os

from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Mpgpu(CMakePackage):
    """Moves data between the memories of one node, GPUs and host, over every link that can help at once: a library for C, C++ and
    Fortran, and the command mpgpu."""

    # The package must be downloaded by hand until archives of releases have a URL.
    manual_download = True
    url = f"file://{os.getcwd()}/mpgpu-0.1.0.tar.gz"

    license("MIT OR Apache-2.0")

    version("main")
    version("0.1.0")

    variant("shared", default=False, description="Also build libmpgpu.so")
    variant("command", default=True, description="Build the command mpgpu")
    variant("preload", default=True, description="Build the interposer, by which mpgpu run works")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("rust@1.88:", type="build")
    # ld, objcopy and readelf build the archive, which exports only mp_*.
    depends_on("binutils@2.29:", type="build")

    requires("platform=linux", msg="mpgpu is for Linux")
    requires("target=x86_64:", "target=aarch64:", policy="one_of", msg="mpgpu is for x86-64 and AArch64")

    generator("ninja")

    def cmake_args(self):
        rust = self.spec["rust"].prefix.bin
        return [
            self.define("MPGPU_BUILD_TESTS", False),
            self.define("MPGPU_BUILD_EXAMPLES", False),
            self.define_from_variant("MPGPU_BUILD_SHARED", "shared"),
            self.define_from_variant("MPGPU_BUILD_COMMAND", "command"),
            self.define_from_variant("MPGPU_BUILD_PRELOAD", "preload"),
            # A checkout does not contain the crates, so they are downloaded.
            self.define("MPGPU_OFFLINE", not self.spec.satisfies("@main")),
            self.define("MPGPU_CARGO", rust.cargo),
            self.define("MPGPU_RUSTC", rust.rustc),
        ]
