"""Environment variables of this package's settings and of other programs. No other module reads the environment."""

from __future__ import annotations

import codecs
import locale
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mindie_mm.errors import InputError

_PREFIX = "MINDIE_MM_"
_NO_SETTINGS = frozenset({"MINDIE_MM_CONFIG", "MINDIE_MM_FAULTS", "MINDIE_MM_KERNELS"})
"""Variables that this package reads, but that do not set a field."""
_SERVICE_LINK = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)", re.ASCII
)
"""Names of variables that Kubernetes sets in every pod for a Service named mindie-mm or mindie-mm-*."""
_LINKED_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://")
"""Beginning of the value of such a variable if its name ends in PORT."""

_WAIT_POLICIES = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
"""Variables that set how long OpenMP threads spin. The OpenMP libraries of Intel and LLVM use KMP_* variables."""
SPIN_COUNT = 3000
"""Number of iterations that an OpenMP thread spins at a barrier before it sleeps."""


def variable(name: str) -> str:
    """Return the name of the variable that sets the field `name`."""
    return f"{_PREFIX}{name.upper()}"


def given(name: str) -> str | None:
    """Return the value of the variable for the field `name`, or None if it is not set."""
    return os.environ.get(variable(name))


def fault_folder() -> Path | None:
    """Return the folder of trigger files for `faults`, which only tests use. This is not a setting for users."""
    folder = os.environ.get("MINDIE_MM_FAULTS")
    return Path(folder) if folder else None


def hccl_expansion_mode() -> str:
    """Return where HCCL runs collective operations on an NPU, such as AIV, or an empty text for HCCL's default."""
    return os.environ.get("HCCL_OP_EXPANSION_MODE", "")


def kernels() -> str:
    """Return the choices between kernels that tests force (`device/choices.py`). This is not a setting for users."""
    return os.environ.get("MINDIE_MM_KERNELS", "")


def keep_collectives_local() -> None:
    """Let gloo and NCCL listen only on the loopback interface, unless their variables specify another interface."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def set_local_rank(number: int) -> None:
    """Set the variable from which torch, transformers and accelerate read the local rank, as torchrun does."""
    os.environ["LOCAL_RANK"] = str(number)


def unknown_variables(settings: Collection[str]) -> list[str]:
    """Return the names of variables that have this package's prefix but do not set any of the fields `settings`.

    Such a variable is misspelled, or belongs to another version.
    """
    known = _NO_SETTINGS | set(map(variable, settings))
    return sorted(
        name
        for name, value in os.environ.items()
        if name.startswith(_PREFIX)
        and name not in known
        and not _SERVICE_LINK.fullmatch(name.removeprefix(_PREFIX))
        and not _LINKED_ADDRESS.match(value)
    )


def foreign(names: Iterable[str]) -> dict[str, str]:
    """Return the values of the variables in `names` that are set, by name. `doctor` checks these variables."""
    return {name: os.environ[name] for name in names if name in os.environ}


def keep_backends_out() -> None:
    """Prevent `import torch` in this process and its children from importing accelerator libraries such as torch_npu.

    If such a library is installed but cannot be loaded, for example because the environment of CANN is not set,
    importing torch would fail, whatever the device. This package imports the library itself if its device is used.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def limit_spinning() -> None:
    """Let OpenMP threads of this process and its children sleep soon at a barrier, unless the user has set this.

    GNU OpenMP reads GOMP_SPINCOUNT when torch loads the library. By default, a waiting thread spins for milliseconds.
    If other programs share the CPUs, a spinning thread takes CPU time from the thread that it waits for.
    """
    if not any(name in _WAIT_POLICIES or name.startswith("KMP_") for name in os.environ):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def limit_jpeg_scans_in_tiffs(number: int) -> None:
    """Limit the number of scans of each JPEG in a TIFF, for this process and its children. The default is 100.

    libtiff reads this variable when it decodes a JPEG.
    """
    os.environ["LIBTIFF_JPEG_MAX_ALLOWED_SCAN_NUMBER"] = str(number)


def single_threaded() -> dict[str, str]:
    """Return an environment for a child process in which numeric libraries start no threads."""
    return os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def expand_segments(variable: str) -> None:
    """Let an allocator extend its segments, which lose less memory to fragments, unless the user has configured it.

    Args:
        variable: Variable that configures the allocator of one kind of device, such as PYTORCH_NPU_ALLOC_CONF.

    """
    if not {variable, "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ[variable] = "expandable_segments:True"


def in_c_locale() -> dict[str, str]:
    """Return an environment for a child process whose output does not depend on the user's language."""
    return os.environ | {"LC_ALL": "C"}


def environment_now() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def changed_since(before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that differ from the environment `before`, for example because an import has set them."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def replace_environment(variables: Mapping[bytes, bytes], kept: Mapping[str, str]) -> None:
    """Replace the environment of this process, which was forked from a process with another environment.

    Args:
        variables: New environment.
        kept: Variables that are set in addition, because imported modules need them.

    """
    os.environ.clear()
    os.environb.update(variables)
    os.environ.update(kept)


def without_blas_threads() -> dict[str, str]:
    """Return an environment for a child process in which the import of numpy starts no threads."""
    return os.environ | {"OPENBLAS_NUM_THREADS": "1"}


def has_thread_count() -> bool:
    """Return whether a variable sets the number of OpenMP or MKL threads."""
    return any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def keep_python_path() -> None:
    """Make the entries of PYTHONPATH absolute, so that child processes import the same modules as this one.

    A script may change its working directory before it starts or restarts a child.
    """
    given = os.environ.get("PYTHONPATH")
    if given and not all(map(os.path.isabs, given.split(os.pathsep))):
        with suppress(FileNotFoundError):  # a removed working directory contains no modules
            os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, given.split(os.pathsep)))


def restart_in_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if the locale has another encoding. Its children inherit the mode.

    Rust and C++ libraries expect file names in UTF-8. Python libraries that open text files use the locale's encoding.
    """
    name = codecs.lookup(locale.getencoding()).name
    is_python = sys.executable and not getattr(sys, "frozen", False)  # a frozen application ignores the variable
    if sys.flags.utf8_mode or name == "utf-8" or not is_python or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same program


def text_of(name: str, text: str) -> str:
    """Decode a string from the command line or a variable. The string contains surrogates if it was not UTF-8.

    Raise InputError if the text was neither in UTF-8 nor in the locale's encoding. The message states `name`, but
    not the text, which may be a secret.
    """
    if _is_utf8(text):
        return text
    try:
        return os.fsencode(text).decode(locale.getencoding())
    except UnicodeError:
        raise InputError(f"{name} is encoded neither in UTF-8 nor in the locale's encoding") from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def default_spool() -> Path:
    """Return the folder of the spool: MINDIE_MM_SPOOL, or this user's folder in the temporary directory."""
    if folder := os.environ.get("MINDIE_MM_SPOOL"):
        return Path(folder)
    return Path(tempfile.gettempdir()) / f"mindie_mm-{os.getuid()}"


def ray_address() -> str:
    """Return the address of the Ray cluster in RAY_ADDRESS, or an empty string if the variable is not set."""
    return os.environ.get("RAY_ADDRESS", "")


def ray_uses_tls() -> bool:
    """Return whether RAY_USE_TLS makes the processes of Ray talk over TLS. Ray reads the variable in the same way."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def limit_ray_connect() -> None:
    """Let Ray give up after some seconds if no head node answers, unless the user has set these variables.

    Ray reads the variables when it is imported. By default, it tries to connect for more than 8 minutes. The time limit
    for reconnecting is not changed, because after that limit Ray exits the process without an exception.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "3")
    os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", "1")
