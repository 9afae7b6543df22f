"""Build a simulator of CANN's shared libraries, so that PyPI's torch_npu runs without an Ascend device.

libhccl.so contains the simulator, which consists of the C files in this folder. For every other symbol of CANN that
torch_npu links or looks up by name, libhccl.so has a function that fails, because success without an effect would hide
that something is not simulated. Only the functions in `_IGNORED` succeed. The other libraries are empty and depend on
libhccl.so.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.arguments import parser

_HERE = Path(__file__).parent
_CACHE = _HERE.parents[2] / "build" / "ascend"
_EMPTY_LIBRARIES = ("ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")
_SYSTEM_LIBRARIES = tuple(
    f"lib{name}" for name in ("c.so.6", "m.so.6", "stdc++.so.6", "gcc_s.so.1", "pthread.so.0", "dl.so.2", "rt.so.1")
)
_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread")
_IGNORED = frozenset(
    (
        *("aclAppLog", "aclFinalize", "aclrtPeekAtLastError", "aclGetCannAttribute", "aclrtGetSysParamOpt"),
        # Settings of limits, of overflow and of what happens after an error, which nothing here depends on.
        *("aclrtSetSysParamOpt", "aclrtCtxSetSysParamOpt", "aclrtSetDeviceSatMode", "aclrtSetStreamOverflowSwitch"),
        *(
            "aclrtSetStreamFailureMode",
            "aclrtSetOpWaitTimeout",
            "aclrtSetOpExecuteTimeOutV2",
            "aclrtSetStreamAttribute",
        ),
    )
)
"""Functions of CANN that do nothing and return 0."""
_MAKERS = ("aclCreate", "aclopCreate", "aclProfilingCreate")
"""Beginnings of the names of functions that return a pointer."""
_NAMED = re.compile(rb"acl(?:rt)?[A-Z][A-Za-z0-9]+")


def build(without: str = "") -> Path:
    """Build the libraries, unless they have been built before, and return their folder.

    Args:
        without: Comma-separated functions of CANN that the libraries hide.

    Raises:
        FileNotFoundError: torch_npu is not installed.
        CalledProcessError: gcc fails.
    """
    sources = sorted(_HERE.glob("*.[ch]"))
    digest = hashlib.sha256(f"{importlib.metadata.version('torch_npu')} {without}".encode())
    for source in (*sources, Path(__file__)):
        digest.update(source.read_bytes())
    folder = _CACHE / digest.hexdigest()[:16]
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            scratch = Path(tempfile.mkdtemp(dir=_CACHE))
            try:
                _compile([source for source in sources if source.suffix == ".c"], scratch, without)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _compile(sources: list[Path], folder: Path, without: str) -> None:
    package = _package("torch_npu")
    headers = package / "include"
    includes = (f"-I{headers / 'third_party' / 'acl' / 'inc'}", f"-I{_HERE}")
    objects = []
    for source in sources:
        target = folder / f"{source.stem}.o"
        _gcc(*_FLAGS, *includes, "-c", str(source), "-o", str(target))
        objects.append(target)
    written = {name for target in objects for name in _symbols(target, "--defined-only")}
    (folder / "symbols.c").write_text(_stubs(sorted(_wanted(package) - written)))
    _gcc(*_FLAGS, *includes, "-c", str(folder / "symbols.c"), "-o", str(folder / "symbols.o"))
    objects.append(folder / "symbols.o")
    script = folder / "hidden.map"
    script.write_text(
        "{ local: " + "".join(f"{name}; " for name in (*without.split(","), "sim_nothing") if name) + "};\n"
    )
    linked = ("-Wl,-soname,libhccl.so", f"-Wl,--version-script={script}")
    _gcc("-shared", "-pthread", "-o", str(folder / "libhccl.so"), *map(str, objects), *linked)
    empty = folder / "empty.c"
    empty.write_text("int sim_empty;\n")
    for name in _EMPTY_LIBRARIES:
        library = f"lib{name}.so"
        needs = (f"-L{folder}", "-Wl,--no-as-needed", "-lhccl", f"-Wl,-soname,{library}")
        _gcc("-shared", "-fPIC", "-o", str(folder / library), str(empty), *needs)
    for name in ("opp", "runtime", "compiler"):  # torch_npu checks that these folders of CANN exist
        (folder / name).mkdir()


def _wanted(package: Path) -> set[str]:
    """Return the symbols that the simulator must define.

    These are the symbols of CANN that torch_npu looks up by name, and the symbols that torch_npu links and no other
    library defines.
    """
    modules = [*package.glob("_C*.so"), *(package / "lib").glob("*.so")]
    linked = {name for module in modules for name in _symbols(module, "--undefined-only", kind="U")}
    system = [Path(_gcc(f"-print-file-name={name}").strip()) for name in _SYSTEM_LIBRARIES]
    loaders = [*Path("/lib64").glob("ld-linux-*.so*"), *Path("/lib").glob("ld-linux-*.so*")]
    others = (*modules, *(_package("torch") / "lib").glob("*.so*"), *system, *loaders)
    linked -= {name for library in others for name in _symbols(library, "--defined-only")}
    named = {
        text.decode()
        for text in (package / "lib" / "libtorch_npu.so").read_bytes().split(b"\0")
        if _NAMED.fullmatch(text)
    }
    return {name for name in linked if not name.lstrip("_").startswith("Py")} | named


def _stubs(names: list[str]) -> str:
    # Assembler labels set the symbols' names, because CANN's headers declare many of these functions with arguments.
    # A function that returns a pointer fails by returning NULL.
    stub = (
        "#define STUB(number, symbol, result) long stub_##number(void) __asm__(#symbol); long stub_##number(void) { "
        'static struct sim_function function = {.name = #symbol}; long code = sim_enter(&function, "%s", ""); '
        "return code ? code : result; }"
    )
    lines = ['#include "sim.h"', stub]
    for number, name in enumerate(names):
        code = "0" if name.startswith(_MAKERS) else "ACL_ERROR_RT_DRV_INTERNAL_ERROR"
        result = "0" if name in _IGNORED else f'sim_error({code}, "{name} is not simulated")'
        lines.append(f"STUB({number}, {name}, {result})")
    return "\n".join(lines) + "\n"


def _symbols(path: Path, flag: str, kind: str | None = None) -> Iterator[str]:
    dynamic = () if path.suffix == ".o" else ("-D",)
    listing = subprocess.run(["nm", *dynamic, flag, str(path)], capture_output=True, text=True, check=False).stdout
    for row in map(str.split, listing.splitlines()):
        if len(row) > 1 and kind in (None, row[-2]):
            yield row[-1].split("@")[0]


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{name} is not installed")
    return Path(spec.origin).parent


def _gcc(*arguments: str) -> str:
    return subprocess.run(["gcc", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    parser(__doc__).parse_args()
    print(build())
