"""Writes, lists and removes the files of a folder in an object store. fsspec does the work, including its retries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mindie_mm.batch.input.remote import STORES, as_os_errors, system_of
from mindie_mm.errors import InputError, StorageError, os_errors_as
from mindie_mm.settings.paths import is_url, local, require_url

_RENAMING = frozenset({"local", "sftp", "ssh"})
"""Protocols of file systems in which a new name replaces another file at once. In others, a rename fails if the name is
taken (SMB, WebHDFS), or copies the file, which is then visible in part."""
_WHAT_TO_DO: list[tuple[type[OSError], str]] = [
    (PermissionError, "Check the credentials, and that they may list, read, write and delete there"),
    (FileNotFoundError, "Check that the bucket exists"),
    (OSError, "Check that the store can be reached and accepts more data"),
]


def output_at(given: Any) -> Path | str:
    """Return the output `given` as a URL of a folder in a store, without a slash at its end, or as an absolute path.

    Raises:
        InputError: It is not a path, or no run can be written there.

    """
    if isinstance(given, str) and is_url(given):
        url = require_url("output", given)
        if "::" in url:
            raise InputError(f"output is {url}, a chain of URLs. Give the URL of one folder")
        if (protocol := url.partition(":")[0]) not in STORES | _RENAMING:
            raise InputError(
                f"output is {url}, but a run cannot be written to {protocol}://, where a file cannot be replaced as a "
                f"whole. Give a folder, for example of a mounted file system, or a URL with one of the protocols "
                f"{', '.join(sorted(STORES | _RENAMING))}"
            )
        return url.rstrip("/")
    return local("output", given)


@contextmanager
def access_is_needed() -> Iterator[None]:
    """Turn a StorageError because of missing access or a missing bucket into InputError, for the start of a run."""
    try:
        yield
    except StorageError as error:
        if isinstance(error.__cause__, PermissionError | FileNotFoundError):
            raise InputError(str(error)) from error
        raise


class Store:
    """A folder in an object store. Threads and processes may use the same folder.

    Files become visible only when they are complete. Object stores guarantee this, and in other file systems, a
    finished file is renamed.
    """

    def __init__(self, url: str) -> None:
        """Find the package for the store. `url` has no slash at its end. Nothing is read.

        Raises:
            InputError: There is no such kind of store, or its package is not installed.

        """
        self.url = url
        with os_errors_as(InputError, f"{url} cannot be written"), as_os_errors(url):
            system_of(url)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the names and sizes of the files, or of those in a subfolder, with one listing."""
        with self._using("listed"):
            system, root = self._system
            system.invalidate_cache()
            try:
                found = system.ls(f"{root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:  # stores have no empty folders
                return {}
            named = {one["name"].rpartition("/")[2]: one for one in found if one["type"] == "file"}
        return {name: int(one["size"] or 0) for name, one in named.items() if name}

    def get(self, names: Sequence[str], folder: Path) -> None:
        """Download files to a local folder."""
        with self._using("copied to " + str(folder)):
            system, root = self._system
            if names:
                system.get([f"{root}/{name}" for name in names], [str(folder / name) for name in names])

    def read(self, name: str) -> bytes:
        """Return the content of a file, or nothing if there is no such file."""
        with self._using("read", name):
            system, root = self._system
            with suppress(FileNotFoundError):
                return bytes(system.cat_file(f"{root}/{name}"))
            return b""

    def put(self, path: Path, name: str) -> None:
        """Upload a local file, which replaces an earlier file of this name."""
        with self._replacing(name) as (system, target):
            system.put_file(str(path), target)

    def write(self, name: str, content: bytes) -> None:
        """Write a file, which replaces an earlier file of this name."""
        with self._replacing(name) as (system, target):
            system.pipe_file(target, content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists. Return whether this call has created it.

        Some stores, such as hf, cannot do this atomically. There, two calls at the same time may both return True.
        """
        with self._using("written", name):
            system, root = self._system
            if not self._is_atomic:
                system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            try:
                with system.open(f"{root}/{name}", "xb") as file:
                    file.write(content)
            except OSError:  # some servers of S3 report an existing file otherwise than by FileExistsError
                if not system.exists(f"{root}/{name}"):
                    raise
                return False
            return True

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self._using("removed", name), suppress(FileNotFoundError):
            system, root = self._system
            system.rm_file(f"{root}/{name}")

    @property
    def _system(self) -> tuple[Any, str]:
        system, root = system_of(self.url)  # fsspec keeps one connection per thread
        return system, root.rstrip("/")

    @cached_property
    def _is_atomic(self) -> bool:
        """True if a file is not visible before it is complete."""
        return self.url.partition(":")[0].lower() in STORES

    @contextmanager
    def _replacing(self, name: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path to write to."""
        with self._using("written", name):
            system, root = self._system
            if self._is_atomic:
                yield system, f"{root}/{name}"
                return
            system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            yield system, f"{root}/{name}.partial"
            system.mv(f"{root}/{name}.partial", f"{root}/{name}")

    @contextmanager
    def _using(self, doing: str, name: str = "") -> Iterator[None]:
        """Turn the errors of the store into StorageError with what to do."""
        url = f"{self.url}/{name}" if name else self.url
        try:
            with as_os_errors(url):
                yield
        except OSError as error:
            advice = next(advice for kind, advice in _WHAT_TO_DO if isinstance(error, kind))
            raise StorageError(f"{url} cannot be {doing}: {error.strerror or error}. {advice}") from error
