"""Builds psplus: CMake makes the extension ``psplus._C`` and the ``psplus-server`` executable.

Environment variables heeded at build time:

- ``MAX_JOBS``: compile jobs at a time.
- ``CMAKE_ARGS``: further arguments for CMake's configure step.
- ``PSPLUS_WERROR=1``: warnings are errors.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCH_PIN = "2.13.0"
TORCH_MINORS = ("2.13", "2.14")
HOW_TO_INSTALL = f"""
    pip install torch=={TORCH_PIN} 'setuptools>=77' wheel 'cmake>=3.22' ninja
    pip install --no-build-isolation .
"""


def fail(what: str) -> None:
    """End the build with what is wrong and the commands that put it right."""
    raise SystemExit(f"\npsplus: {what} Run:\n{HOW_TO_INSTALL}")


def import_torch():
    """Import the torch that the extension will be tied to, or end the build with advice."""
    try:
        import torch
    except ImportError as error:
        fail(
            f"torch cannot be imported by {sys.executable} ({error}). psplus compiles against the "
            "torch that is already installed, so pip must not build it in an isolated environment."
        )
    minor = ".".join(torch.__version__.split(".")[:2])
    if minor not in TORCH_MINORS:
        fail(
            f"torch {torch.__version__} is installed, and psplus supports "
            f"{' and '.join(f'{m}.*' for m in TORCH_MINORS)}."
        )
    if not torch.compiled_with_cxx11_abi():
        fail(
            f"torch {torch.__version__} was built with the pre-C++11 ABI, which psplus cannot use."
        )
    return torch


def find_tool(name: str) -> str:
    """Find a build tool beside this interpreter first: its folder may not be on PATH."""
    search = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    path = shutil.which(name, path=search)
    if path is None:
        fail(f"{name} was not found on PATH.")
    return path


def version() -> str:
    """Read the version without importing the package."""
    text = (ROOT / "psplus" / "_version.py").read_text()
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


class CMakeBuild(build_ext):
    """Runs CMake in a build tree that is kept, so that building again compiles what changed."""

    def run(self) -> None:
        """Configure, build and install into the package's folder.

        That folder lies in the source tree for an editable install and in setuptools' staging tree
        for a wheel.
        """
        torch = import_torch()
        from torch.utils import cpp_extension

        package = Path(self.get_ext_fullpath("psplus._C")).resolve().parent
        torch_lib = Path(torch.__file__).parent / "lib"
        torch_version = torch.__version__.split("+")[0]
        tree = ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}-torch-{torch_version}"
        includes = [path for path in cpp_extension.include_paths() if Path(path).is_dir()]
        werror = os.environ.get("PSPLUS_WERROR", "0") not in ("", "0")
        cmake = find_tool("cmake")

        configure = [
            *(cmake, "-S", str(ROOT), "-B", str(tree), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            "-DPSPLUS_BUILD_PYTHON=ON",
            f"-DPSPLUS_WERROR={'ON' if werror else 'OFF'}",
            f"-DPSPLUS_PYTHON_RPATH={torch_lib if self.inplace else ''}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTORCH_INCLUDE_DIRS={';'.join(includes)}",
            f"-DTORCH_LIB_DIR={torch_lib}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        build = [cmake, "--build", str(tree), "--target", "_C", "psplus-server"]
        if jobs := os.environ.get("MAX_JOBS"):
            build += ["--parallel", jobs]
        install = [cmake, "--install", str(tree), "--component", "python"]
        install += ["--prefix", str(package.parent)]
        self.call("configure", configure)
        self.call("build", build)
        self.call("install", install)
        write_build_info(package / "_build_info.py", torch_version)

    def call(self, stage: str, command: list[str]) -> None:
        """Run one command; its output says what is wrong, so no traceback follows it."""
        self.announce(" ".join(command), level=2)
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"psplus: CMake's {stage} step failed with status {error.returncode}; "
                "the reason is printed above"
            ) from error


def write_build_info(path: Path, torch_version: str) -> None:
    """Record what the extension was built against, so that importing psplus can compare."""
    text = (
        '"""Written by setup.py: what psplus._C was built against."""\n\n'
        f'TORCH_VERSION = "{torch_version}"\n'
    )
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def requirements() -> list[str]:
    """Run-time requirements; the extension works with the minor version it was built against."""
    minor = ".".join(import_torch().__version__.split(".")[:2])
    return [
        f"torch=={minor}.*",
        "numpy>=1.24",
        "safetensors>=0.4",
        "rich>=13",
        "click>=8.1",
        "cloudpickle>=3",
    ]


if int(setuptools.__version__.split(".")[0]) < 77:
    fail(f"setuptools {setuptools.__version__} is installed, and 77 or newer is needed.")

setup(
    version=version(),
    ext_modules=[Extension("psplus._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=requirements(),
)
