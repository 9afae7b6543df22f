"""The folder of a run, which may be in an object store.

While a run writes to an object store, its open shards are in a local staging folder. That folder also has the tables of
all finished shards, because the manifest needs their digests, ids and errors. A finished shard's file of arrays is
there only as a hole of the same size, which occupies no disk: its content is in the store alone.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

import msgspec
from blake3 import blake3

from mindie_mm.batch.input.files import creating
from mindie_mm.batch.output.lease import Lease
from mindie_mm.batch.output.store import Store, access_is_needed
from mindie_mm.errors import CorruptReference, InputError, StorageError, os_errors_as

SHARD_FILE = re.compile(r"shard-[0-9]{9,}\.(parquet|safetensors|journal)(\.[\w-]*partial)?")
"""Names of the files of shards. Users may have other files whose names begin with "shard-"."""
_ADVICE = "Give another folder with --staging"
_NAME_FILE = ".name"
_TABLES, _ARRAYS = "shard-*.parquet", ".safetensors"


class Address(msgspec.Struct, frozen=True):
    """Data that a process needs to write to the folder of a run."""

    path: str
    """Local folder of the run, or its staging folder."""
    url: str = ""
    lease: int = 0
    """Number of the lease on the folder at `url`."""
    token: str = ""
    """Token of the lease's holder."""


class RunFolder:
    """A local folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, address: Address) -> RunFolder:
        """Return the folder with an address."""
        if not address.url:
            return RunFolder(Path(address.path))
        return StagedFolder(Path(address.path), Lease(Store(address.url), address.lease, address.token))

    @property
    def address(self) -> Address:
        return Address(str(self.path))

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the names of the files in the folder. Raise OSError if the folder cannot be listed."""
        return [path.name for path in self.path.iterdir()]

    def fetch(self, *names: str) -> None:
        """Copy the given files and all tables from the store."""

    def put(self, *names: str) -> None:
        """Copy files to the store, in this order, if they exist. They are finished, and will not be changed."""

    def put_shard(self, arrays: Path, table: Path, name: str) -> None:
        """Copy the files of a finished shard to the store. `name` is the final name of the table.

        The table comes last, because a shard counts as complete if the store has its table.
        """

    def free(self, arrays: Path) -> None:
        """Free the disk space of a file of arrays that is in the store."""

    def on_node(self) -> RunFolder:
        """Return the folder for a process on another machine, which does not renew the lease."""
        return self

    def free_copies(self) -> None:
        """Remove the local copies of finished shards, if they are in the store."""

    def remove(self, name: str) -> None:
        """Remove a file. Raise OSError if this fails."""
        (self.path / name).unlink(missing_ok=True)

    def finish(self, *names: str, shards: Collection[str]) -> None:
        """Copy the last files to the store, and remove shards that are not in `shards` from the store."""


class StagedFolder(RunFolder):
    """The folder of a run in an object store. Methods raise StorageError if the store fails or the lease is lost."""

    def __init__(self, path: Path, lease: Lease) -> None:
        """Use the staging folder `path`. The caller, or the process that started it, renews the lease."""
        super().__init__(path)
        self._lease, self._store = lease, lease.store
        self._is_finished = False

    @classmethod
    @contextmanager
    def leased(cls, store: Store, path: Path) -> Iterator[Self]:
        """Take the lease on a folder, and keep it. The caller has locked the staging folder `path`.

        At the end, the staging folder is removed unless it has open shards. Messages about damaged files name the
        store, which the staging folder has copies of.

        Raises:
            InputError: Another run holds the lease, or the store refuses access.
            StorageError: The store fails.

        """
        is_finished = False
        try:
            name = path / _NAME_FILE
            with os_errors_as(StorageError, f"{name} cannot be written"):
                if not name.exists() or not name.read_text():
                    name.write_text(uuid4().hex)
                token = name.read_text()
            with access_is_needed():
                lease = Lease.take(store, token)
            folder = cls(path, lease)
            with lease.kept(), copies_of(store.url, path):
                folder.free_copies()  # another machine may have replaced a shard since an earlier call
                yield folder
            is_finished = folder._is_finished
        finally:
            with suppress(OSError):
                _free_copies(path)
            if is_finished or not any(path.rglob("shard-*")):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def address(self) -> Address:
        return Address(str(self.path), self._store.url, self._lease.number, self._lease.token)

    def __str__(self) -> str:
        return self._store.url

    def names(self) -> list[str]:
        return [*self._store.sizes()]

    def fetch(self, *names: str) -> None:
        with os_errors_as(StorageError, f"{self.path} cannot be changed"):
            tables = [*self.path.glob(_TABLES)]  # before the listing, so that it has every table that is here
            sizes = self._store.sizes()
            for path in (*tables, *map(self.path.joinpath, names)):
                if path.name in names or sizes.get(path.name) != path.stat().st_size:
                    path.unlink(missing_ok=True)
            wanted = [name for name in sizes if name in names or Path(name).match(_TABLES)]
            self._store.get([name for name in wanted if not (self.path / name).exists()], self.path)
            for table in self.path.glob(_TABLES):
                arrays = table.with_suffix(_ARRAYS)
                arrays.unlink(missing_ok=True)
                if arrays.name in sizes:
                    with arrays.open("wb") as file:
                        file.truncate(sizes[arrays.name])

    def put(self, *names: str) -> None:
        self._lease.require()
        for path in map(self.path.joinpath, names):
            if path.exists():
                self._store.put(path, path.name)

    def put_shard(self, arrays: Path, table: Path, name: str) -> None:
        self._lease.require()
        self._store.put(arrays, arrays.name)
        self._lease.require()  # the upload may have taken long
        self._store.put(table, name)

    def free(self, arrays: Path) -> None:
        # Another process of this node may already have forgotten the shard.
        with os_errors_as(StorageError, f"{arrays} cannot be changed"), suppress(FileNotFoundError):
            size = arrays.stat().st_size
            os.truncate(arrays, 0)
            os.truncate(arrays, size)

    def on_node(self) -> RunFolder:
        return StagedFolder(staging_path(self._store.url, self.path.parent) / "node", self._lease)

    def free_copies(self) -> None:
        with os_errors_as(StorageError, f"{self.path} cannot be changed"):
            _free_copies(self.path)

    def remove(self, name: str) -> None:
        self._lease.require()
        self._store.remove(name)
        super().remove(name)

    def finish(self, *names: str, shards: Collection[str]) -> None:
        self.put(*names)
        for name in self._store.sizes():
            if SHARD_FILE.fullmatch(name) and name not in shards:
                self._store.remove(name)
        self._is_finished = True


@contextmanager
def copies_of(url: str, folder: Path) -> Iterator[None]:
    """Inside this context, name `url` in errors about damaged files of `folder`, which has copies from this store."""
    try:
        yield
    except CorruptReference as error:
        raise CorruptReference(str(error).replace(f"{folder}/", f"{url}/")) from error


def _free_copies(folder: Path) -> None:
    """Remove the local copies of finished shards. Raise OSError if this fails."""
    for table in folder.glob(_TABLES):
        table.with_suffix(_ARRAYS).unlink(missing_ok=True)
        table.unlink(missing_ok=True)


def staging_path(url: str, folder: Path | None) -> Path:
    """Create the staging folder of a URL in `folder`, by default in the temporary directory, and return its path.

    Raises:
        InputError: The folder cannot be created, or belongs to another user.
        StorageError: The file system fails.

    """
    name = f"mindie_mm-staging-{os.getuid()}-{blake3(url.encode()).hexdigest(8)}"
    path = (folder or Path(tempfile.gettempdir())) / name
    with creating(path, _ADVICE):
        path.mkdir(0o700, parents=True, exist_ok=True)
        status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InputError(f"{path} is not a folder of this user. {_ADVICE}")
    return path
