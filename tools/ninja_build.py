"""A build.ninja for the units of setup.py, and the run of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class Ninja:
    """A build.ninja in the making: objects by rule, one shared library.

    Args:
        sources: the folder by which units are named.
        linker: the command that links, before its arguments.
        folder: of build.ninja and the objects.
    """

    def __init__(self, sources: Path, linker: str, folder: Path) -> None:
        self.sources, self.folder = sources, folder
        self.lines = [
            "rule cxx",
            "  command = $compiler $flags -MMD -MF $out.d -c $in -o $out",
            "  description = $name",
            "  depfile = $out.d",
            "  deps = gcc",
            # The report of ptxas on registers is kept beside the object (tests/test_cuda_build.py).
            "rule nvcc",
            "  command = $compiler $flags -MMD -MF $out.d -c $in -o $out 2> $out.ptxas "
            "|| (cat $out.ptxas; exit 1)",
            "  description = $name",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = {linker} -shared $in $flags -o $out",
            "  description = $name",
        ]

    def compile(
        self, source: Path, compiler: str, flags: str, rule: str = "cxx", isa: str = ""
    ) -> str:
        name = (
            source.relative_to(self.sources) if source.is_relative_to(self.sources) else source.name
        )
        out = self.folder / f"{name}{isa and '.'}{isa}.o"
        self._build(rule, out, [str(source)], compiler, flags)
        return str(out)

    def link(self, out: Path, objects: list[str], compiler: str, flags: str) -> None:
        self._build("link", out, objects, compiler, flags)

    def _build(self, rule: str, out: Path, inputs: list[str], compiler: str, flags: str) -> None:
        def path(p: object) -> str:
            return str(p).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

        name = out.name if rule == "link" else out.relative_to(self.folder).with_suffix("")
        self.lines += [
            f"build {path(out)}: {rule} {' '.join(map(path, inputs))}",
            f"  compiler = {compiler}",
            f"  flags = {flags}",
            f"  name = {name}",
        ]

    def run(self, program: str, duration: str) -> None:
        """Compiles what is not up to date; silent where all is.

        Args:
            program: ninja.
            duration: of the whole, as a first line for the user.

        Raises:
            subprocess.CalledProcessError: a compiler failed; its messages are printed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "build.ninja").write_text("\n".join(self.lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        plan = subprocess.run(
            [program, "-n"], cwd=self.folder, capture_output=True, text=True, check=False
        )
        if "no work to do" in plan.stdout:
            return
        print(f"fusedtrain: compiling {duration}", flush=True)
        status = {"NINJA_STATUS": "  %f of %t, %e s: ", **os.environ}
        subprocess.run([program, *jobs], cwd=self.folder, check=True, env=status)
