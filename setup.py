"""Build of the compiled code of the package, for decode steps on the CPU.

Everything else is in pyproject.toml. Without a C compiler, the package is installed without this code, and torch runs
the steps. `python setup.py build_ext --inplace` compiles it in a clone after a change.
"""

from __future__ import annotations

import platform

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "mindie_mm/device/cpu"
FLAGS: dict[str, list[str]] = {"generic": []}
"""Compiler options of each library, by the instruction set in its name. decode_step.py chooses a library."""
if platform.machine() == "x86_64":
    FLAGS["avx2"] = ["-mavx2", "-mfma"]
    FLAGS["avx512"] = ["-mfma", *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")), "-mprefer-vector-width=512"]


class BuildLibraries(build_ext):
    """Builds libraries for ctypes. Their names do not contain a version of Python, because they do not use its API."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


class PlatformWheel(bdist_wheel):
    """Builds wheels for one kind of machine and any version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"{FOLDER.replace('/', '.')}.decode_step_{name}",
            [f"{FOLDER}/decode_step.c", f"{FOLDER}/workers.c"],
            depends=[f"{FOLDER}/workers.h"],
            extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wno-psabi", "-fno-math-errno", *flags],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
        for name, flags in FLAGS.items()
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
