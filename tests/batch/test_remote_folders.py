"""Tests for folders of media in object stores, in fsspec's memory file system and on a real S3 server."""

from __future__ import annotations

import errno
import io
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mindie_mm.batch import Dataset
from mindie_mm.batch.input import remote
from mindie_mm.batch.input.gather import gather, input_named
from mindie_mm.batch.input.remote import fetched
from mindie_mm.batch.settings import Settings
from mindie_mm.errors import InputError, StorageError
from mindie_mm.inputs import Media
from tests.batch.conftest import content, run_in_process, tokenize, written
from tests.batch.test_changed_inputs import Begun
from tests.batch.test_forms import tabled
from tests.media_samples import encoded, photograph

IMAGE = encoded(photograph(size=(60, 40)))
URL = "memory://data/media/"
ODD = [
    "a b.png",
    "ü#1.png",
    "50%25.png",
    "q?.png",
    "[x]*.png",
    "http:x.png",
    "&=+.png",
    "'\".png",
    "\\xe9.png",
    "~.png",
]
NAMES = ["0.png", "below.png", "below/deep/1.png", "below/2.PNG", "z/0.png", *ODD]
OTHERS = ["notes.txt", "below/notes.txt", "rows.tar", "no-ending"]


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a local folder with images, of which some have odd names, and other files."""
    folder = tmp_path_factory.mktemp("remote") / "media"
    for name in (*NAMES, *OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(IMAGE if name in NAMES else b"x")
    return folder


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return fsspec's memory file system, in which rows may have media. It is empty after the test."""
    monkeypatch.setattr(remote, "STORES", {"memory"})
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/data", recursive=True)


def upload(folder: Path, system: Any, path: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            system.pipe(f"{path}/{file.relative_to(folder)}", file.read_bytes())


def settings(given: object, **others: Any) -> Settings:
    return Settings(model="", inputs=(input_named(str(given)),), **{"shard_rows": 7} | others)


def require_equal(found: Path, expected: Path) -> None:
    for one, own in zip(Dataset(found), Dataset(expected), strict=True):
        assert (one.id, one.error, one.columns) == (own.id, own.error, own.columns)
        assert one.ids is not None
        assert one.ids.tolist() == own.ids.tolist()
        assert one.arrays[0]["pixel_values"].tolist() == own.arrays[0]["pixel_values"].tolist()


def test_a_remote_folder_has_the_rows_of_a_local_folder(store: Any, media: Path, tmp_path: Path) -> None:
    upload(media, store, "/data/media")
    asked = {"template": "What is {media} this?"}
    for given, out in ((media, "local"), (URL.rstrip("/"), "remote")):
        run_in_process(settings(given, **asked), tmp_path / out)
    require_equal(tmp_path / "remote", tmp_path / "local")
    samples = Dataset(tmp_path / "remote")
    assert samples.manifest.run.settings.inputs == (URL,), "the URL of a folder gets a slash"
    assert (len(samples), samples.manifest.num_errors) == (len(NAMES), 0)
    left_out = gather((URL,), tmp_path, "What?", io.BytesIO())
    assert left_out == gather((str(media),), tmp_path, "What?", io.BytesIO()) == Counter({".txt": 2, ".tar": 1, "": 1})


def gathered(given: object, folder: Path) -> bytes:
    """Return the rows to which an input without a template is converted."""
    folder.mkdir(exist_ok=True)
    gather((str(given),), folder, "", io.BytesIO())
    return (folder / "input-000.jsonl").read_bytes()


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_remote_folder_with_metadata_gives_the_rows_of_its_table(form: str, store: Any, tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "0.png").write_bytes(IMAGE)
    if form == "csv":
        (folder / "metadata.csv").write_text('file_name,text,label\n0.png,"What\nis this?",7\n')
    else:
        table = written if form == "jsonl" else tabled
        table(folder / f"metadata.{form}", [{"file_name": "0.png", "text": "What is this?", "label": 7}])
    upload(folder, store, "/data/media")
    assert gathered(URL, tmp_path / "rows") == gathered(folder, tmp_path / "rows")
    run_in_process(settings(URL, keep_columns={"label": ""}), tmp_path / "run")
    (sample,) = Dataset(tmp_path / "run")
    assert (len(sample.spans), sample.columns) == (1, {"label": "7" if form == "csv" else 7})


def test_a_changed_remote_folder_is_noticed(store: Any, tmp_path: Path) -> None:
    for index in range(3):
        store.pipe(f"/data/media/{index}.png", IMAGE)
    given = settings(URL, shard_rows=1)
    run_in_process(given, tmp_path / "run")
    before = content(tmp_path / "run")
    run_in_process(given, tmp_path / "run")
    assert content(tmp_path / "run") == before
    lists = {gathered(URL, tmp_path / "rows")}
    store.pipe("/data/media/1.png", IMAGE)  # another object of the same size
    lists.add(gathered(URL, tmp_path / "rows"))
    with pytest.raises(InputError, match="because the content of memory://data/media/ differs"):
        run_in_process(given, tmp_path / "run")
    store.pipe("/data/media/3.png", IMAGE)
    lists.add(gathered(URL, tmp_path / "rows"))
    store.rm("/data/media/0.png")
    lists.add(gathered(URL, tmp_path / "rows"))
    assert len(lists) == 4


def test_a_removed_object_of_a_listed_folder_ends_the_run(store: Any, tmp_path: Path) -> None:
    """An object that is no image only fails its row, also if its name looks like a chain of URLs."""
    for name in ("0.png", "a::b.png", "broken.png", "last.png"):
        store.pipe(f"/data/media/{name}", b"x" if name == "broken.png" else IMAGE)
    begun = Begun(settings(URL), tmp_path / "run")
    store.rm("/data/media/last.png")
    steps = begun.stage.run(begun.chunks[0], {})
    chain, broken = [next(steps).error for _ in range(3)][1:]
    assert "a::b.png is a chain of URLs" in chain
    assert broken is not None
    with pytest.raises(StorageError, match=f"{URL}last.png was removed while the run was reading memory://data/media"):
        next(steps)


def fail(patch: pytest.MonkeyPatch, error: Exception, name: str = "") -> None:
    """Let the store fail for all objects, or for those with a name."""
    for method in ("cat_file", "info", "exists", "ls"):
        works = getattr(MemoryFileSystem, method)

        def failing(system: Any, path: str, *given: Any, works: Any = works, **options: Any) -> Any:
            if path.endswith(name):
                raise error
            return works(system, path, *given, **options)

        patch.setattr(MemoryFileSystem, method, failing)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("Forbidden"),
        OSError(errno.EINVAL, "Bad Request"),
        OSError(errno.EBUSY, "SlowDown"),
        TimeoutError("late"),
        RuntimeError("odd"),
    ],
)
def test_an_object_that_cannot_be_read_fails_only_its_row_but_an_outage_ends_the_run(
    error: Exception, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        store.pipe(f"/data/media/{index}.png", IMAGE)
    begun = Begun(settings(URL), tmp_path / "run")
    steps = begun.stage.run(begun.chunks[0], {})
    with monkeypatch.context() as patch:
        fail(patch, error, "/1.png")
        first, failed, third = (next(steps).error for _ in range(3))
    assert (first, third) == (None, None)
    assert failed is not None
    assert failed.startswith(f"MediaError: {URL}1.png cannot be read: ")
    with monkeypatch.context() as patch:
        fail(patch, error)
        with pytest.raises(StorageError, match="memory://data/media cannot be read: "):
            next(steps)


def test_folders_without_media_are_refused(store: Any, tmp_path: Path) -> None:
    store.pipe("/data/tables/a.parquet", b"")
    store.pipe("/data/tables/b.txt", b"")
    store.makedirs("/data/empty")
    for url, why in (
        ("memory://data/tables/", r"tables/ has no file with a media extension; it has 2 files .*/tables/\*\.parquet"),
        ("memory://data/empty/", "empty/ has no file with a media extension; it has 0 files"),
        ("memory://data/gone/", "there is no folder memory://data/gone/"),
        ("memory://data/tables/a.parquet/", "a.parquet/ is a file. Give its URL without a slash at the end"),
        ("local:///etc/", "local:///etc/ is not in an object store; media of rows may be in memory"),
        ("nothing://a/", "nothing://a/ is not in an object store"),
    ):
        with pytest.raises(InputError, match=why):
            gather((url,), tmp_path, "")
        assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.usefixtures("s3_server")
def test_the_command_reads_a_folder_of_a_real_s3_server(media: Path, tmp_path: Path) -> None:
    """Consoles create an object whose name is that of the folder. An object may have an empty name below a folder."""
    store = fsspec.filesystem("s3")
    upload(media, store, "bucket/media")
    store.pipe("bucket/media/below/", b"")
    store.pipe("bucket/empty.png", b"")
    assert fetched(Media("image", "s3://bucket/empty.png")).source == b"", "a server refuses a range of no bytes"
    local = shutil.copytree(media, tmp_path / "media")
    for given, out in ((local, "local"), ("s3://bucket/media", "remote")):
        done = tokenize(given, "--output", tmp_path / out, "--template", "What?", "--workers", 1)
        assert done.returncode == 0, done.stderr
        assert "left out: 4 files (.txt 2, .tar 1, others 1)" in done.stdout + done.stderr
    require_equal(tmp_path / "remote", tmp_path / "local")
    before = content(tmp_path / "remote")
    again = ("s3://bucket/media/", "--output", tmp_path / "remote", "--template", "What?")
    assert tokenize(*again).returncode == 0
    assert content(tmp_path / "remote") == before
    store.pipe("bucket/media/0.png", encoded(photograph(size=(61, 40))))
    refused = tokenize(*again)
    assert (refused.returncode, "the content of s3://bucket/media/ differs" in refused.stderr) == (2, True)
    store.pipe("bucket/media/below//0.png", IMAGE)
    refused = tokenize("s3://bucket/media/", "--output", tmp_path / "new")
    assert (refused.returncode, "below has a folder without a name" in refused.stderr) == (2, True), refused.stderr
