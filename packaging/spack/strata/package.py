# A Spack recipe: copy this folder to a repository's `packages` and set `git` to where the sources are.
from spack.package import *


class Strata(Package):
    """NCCL's interface, with collectives in two levels for thousands of GPUs."""

    license("Apache-2.0")

    version("main", branch="main")

    variant("mpi", default=True, description="Build the plugin that carries messages between nodes over MPI")

    depends_on("c", type="build")
    depends_on("rust@1.88:", type="build")
    depends_on("mpi", when="+mpi")
    depends_on("llvm+clang", type="build", when="+mpi")

    def setup_build_environment(self, env):
        # Without an mpicc scripts/install leaves the plugin out.
        env.set("MPICC", self.spec["mpi"].mpicc if self.spec.satisfies("+mpi") else "/nonexistent/mpicc")

    def install(self, spec, prefix):
        Executable("scripts/install")("--prefix", prefix)
