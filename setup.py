"""Builds the native core where there is a C compiler, and nothing where links in ``kvstore/`` are none any more.

Without a compiler everything is done in Python: the wheel has no binary then, and says so by its name.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.errors import CCompilerError, ExecError, PlatformError

ROOT = Path(__file__).parent
# From here on Python keeps what the core uses: one binary serves them all.
LIMITED_API = "cp311"
COMPILED = ["-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"]

for name in ("connector", "gpu", "docs", "deploy", "proto"):
    if not (ROOT / "kvstore" / name).is_dir():
        raise SystemExit(
            f"kvstore/{name} does not lead to {name}/: it is a link, which zip archives lose. Take a checkout of git,"
            " or a tar archive"
        )


def why_not() -> str:
    """Why nothing can be compiled here; empty: it can."""
    from distutils.ccompiler import new_compiler  # setuptools' own
    from distutils.sysconfig import customize_compiler

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text("#define Py_LIMITED_API 0x030B0000\n#include <Python.h>\n")
        try:
            compiler = new_compiler()
            customize_compiler(compiler)
            include = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
            compiler.compile([str(source)], output_dir=folder, include_dirs=include)
        except (CCompilerError, ExecError, PlatformError) as error:
            return str(error)
    return ""


def extensions() -> list[Extension]:
    """The native core, if it can be built."""
    if reason := why_not():
        sys.stderr.write(
            f"kvstore._core is not built, and Python does its work: no C compiler that finds Python.h ({reason})\n"
        )
        return []
    folder = Path("kvstore/core")
    core = Extension(
        "kvstore._core",
        sorted(map(str, folder.glob("*.c"))),
        depends=sorted(map(str, folder.glob("*.h"))),
        extra_compile_args=COMPILED,
        py_limited_api=True,
        optional=True,
    )
    return [core]


built = extensions()
setup(
    ext_modules=built,
    options={"bdist_wheel": {"py_limited_api": LIMITED_API}} if built else {},
)
