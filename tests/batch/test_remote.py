"""Tests for inputs and media in object stores, in fsspec's memory file system and on a real S3 server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

from mindie_mm.batch import Dataset
from mindie_mm.batch.input import remote
from mindie_mm.batch.input.gather import input_named
from mindie_mm.batch.input.remote import RemoteFile, fetched, file_at, matching
from mindie_mm.batch.input.source import open_source
from mindie_mm.batch.output.store import output_at
from mindie_mm.batch.settings import Settings
from mindie_mm.batch.tokenizing import tokenize_dataset
from mindie_mm.cli import main
from mindie_mm.errors import InputError, MediaError, StorageError
from mindie_mm.inputs import Media
from mindie_mm.settings.paths import local
from tests.batch.conftest import content, run_in_process, tokenize, written
from tests.batch.test_forms import packed, tabled
from tests.media_samples import encoded, photograph

IMAGE = encoded(photograph(size=(60, 40)))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return fsspec's memory file system with the folder /data. It is empty after the test."""
    monkeypatch.setattr(remote, "STORES", {"memory"})  # workers are copies of this process
    system = fsspec.filesystem("memory")
    system.makedirs("/data", exist_ok=True)
    yield system
    system.rm("/data", recursive=True)


def settings(*inputs: object, **others: Any) -> Settings:
    return Settings(model="", inputs=tuple(map(input_named, map(str, inputs))), **{"shard_rows": 7} | others)


def rows(folder: str) -> list[dict[str, Any]]:
    """Return rows whose media are given by relative paths and by URLs."""
    return [
        {"image": "0.png", "text": "What?"},
        {"images": [f"{folder}/0.png", "./0.png"], "text": "What?"},
        {"image": "gone.png", "text": "What?"},
        {"text": "Just words."},
    ]


def files(tmp_path: Path, folder: str) -> list[Path]:
    """Write rows in each format to a local folder, for media in the remote `folder`. Return the files."""
    (tmp_path / "0.png").write_bytes(IMAGE)
    lines = written(tmp_path / "rows.jsonl", rows(folder))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "rows.json").write_text(json.dumps(rows(folder)))
    table = tabled(tmp_path / "rows.parquet", rows(folder), row_group_size=2)
    tar = packed(tmp_path / "rows.tar", [("a.png", IMAGE), ("a.txt", b"What?"), ("b.png", IMAGE)])
    return [lines, tmp_path / "rows.jsonl.gz", tmp_path / "rows.json", table, tar]


def require_equal(remote: Path, local: Path) -> None:
    found, expected = Dataset(remote), Dataset(local)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert (one.error is None, len(one.spans)) == (other.error is None, len(other.spans))
        assert one.ids is None or one.ids.tolist() == other.ids.tolist()


def test_remote_inputs_of_each_format_have_the_rows_of_local_files(store: Any, tmp_path: Path) -> None:
    given = files(tmp_path, "memory://data")
    for path in (*given, tmp_path / "0.png"):
        store.pipe(f"/data/{path.name}", path.read_bytes())
    lines, *_, tar = given
    for path in (lines, tar):
        run_in_process(settings(path), tmp_path / f"local {path.name}")
    for path in given:
        run_in_process(settings(f"memory://data/{path.name}"), tmp_path / f"remote {path.name}")
        require_equal(tmp_path / f"remote {path.name}", tmp_path / f"local {(tar if path == tar else lines).name}")
    samples = Dataset(tmp_path / "remote rows.jsonl")
    assert [len(sample.spans) for sample in samples] == [1, 2, 0, 0]
    assert samples[2].error == "MediaError: there is no file memory://data/gone.png"


def test_a_replaced_object_is_noticed_by_its_version(store: Any, tmp_path: Path) -> None:
    store.pipe("/data/rows.jsonl", b'{"text": "a"}\n')
    source = open_source(RemoteFile("memory://data/rows.jsonl"), ())
    assert [*source.records(0, source.size)] == [b'{"text": "a"}\n']
    run_in_process(settings("memory://data/rows.jsonl"), tmp_path / "run")
    store.pipe("/data/rows.jsonl", b'{"text": "b"}\n')
    with pytest.raises(StorageError, match=r"rows\.jsonl changed while the run was reading it: its version was .* now"):
        source.require_unchanged()
    with pytest.raises(InputError, match=r"contains another run: input_digests\[0\] was"):
        run_in_process(settings("memory://data/rows.jsonl"), tmp_path / "run")
    store.rm("/data/rows.jsonl")
    with pytest.raises(StorageError, match=r"rows\.jsonl was removed while the run was reading it"):
        source.require_unchanged()


@pytest.mark.parametrize("url", ["webhdfs://127.0.0.1:1/a.png", "ftp://127.0.0.1:1/a.png", "local:///etc/hosts"])
@pytest.mark.parametrize("frames", [False, True])
def test_rows_reach_no_other_hosts_or_files(url: str, frames: bool) -> None:
    """Http and https are checked elsewhere."""
    with pytest.raises(MediaError, match=r"is not in an object store; media of rows may be in .*, s3"):
        fetched(Media("video", (url,)) if frames else Media("image", url))


def test_a_url_is_never_taken_for_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files exist at the paths that look like the URLs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory:/gone").mkdir(parents=True)
    written(tmp_path / "memory:/gone/rows.jsonl", [{"text": "a"}])
    (tmp_path / "memory:/gone/0.png").write_bytes(IMAGE)
    for url, why in (
        ("memory://gone/rows.jsonl", "there is no file memory://gone/rows.jsonl"),
        ("memory://gone/*.jsonl", "no file matches memory://gone/*.jsonl"),
        ("nothing://gone/rows.jsonl", "nothing://gone/rows.jsonl cannot be read: ValueError: Protocol not known"),
    ):
        refused = CliRunner().invoke(main, ["tokenize", url, "--output", "run"])
        assert (refused.exit_code, why in refused.stderr) == (2, True), refused.stderr
    refused = CliRunner().invoke(main, ["tokenize", "rows.jsonl", "--output", "memory://gone/run"])
    assert (refused.exit_code, "a run cannot be written to memory://" in refused.stderr) == (2, True)
    monkeypatch.setattr(remote, "STORES", {"memory"})
    urls = ("memory://gone/0.png", "memory://a::http://localhost/0.png")
    lines = written(tmp_path / "rows.jsonl", [{"image": url, "text": "What?"} for url in urls])
    run_in_process(settings(lines), tmp_path / "run")
    gone, chain = Dataset(tmp_path / "run")
    assert gone.error == "MediaError: there is no file memory://gone/0.png"
    assert str(chain.error).endswith("is a chain of URLs, which rows cannot have as media")


def test_urls_with_a_star_are_expanded_in_order(store: Any) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        store.pipe(f"/data/{name}", b"")
    assert matching("MEMORY://data/*.jsonl") == ["memory://data/a.jsonl", "memory://data/b.jsonl"]
    assert matching("a*.jsonl") == ["a*.jsonl"]


def test_schemes_may_be_in_upper_case(store: Any, tmp_path: Path) -> None:
    store.pipe("/data/0.png", IMAGE)
    store.pipe("/data/rows.jsonl", b'{"image": "MEMORY://data/0.png", "text": "What?"}\n')
    run_in_process(settings("Memory://data/rows.jsonl"), tmp_path / "run")
    samples = Dataset(tmp_path / "run")
    assert samples.manifest.run.settings.inputs == ("memory://data/rows.jsonl",)
    assert samples[0].error is None
    assert output_at("S3://Bucket/Run/") == "s3://Bucket/Run"
    assert file_at("S3://Bucket/Run/") == RemoteFile("s3://Bucket/Run/")


def test_urls_of_local_files_are_refused_with_the_path_to_give(tmp_path: Path) -> None:
    lines = written(tmp_path / "rows.jsonl", [{"text": "a"}])
    out = ["--output", str(tmp_path / "run")]
    for command in (
        ["tokenize", f"file://{lines}", *out],
        ["tokenize", str(lines), "--output", f"FILE://{tmp_path}/run"],
        ["tokenize", str(lines), *out, "--model", f"file://{tmp_path}"],
        ["inspect", f"file://{tmp_path}/run"],
        ["verify", f"file://{tmp_path}/run"],
        ["generate", "--tokenized", f"file://{tmp_path}/run", *out],
        ["merge", f"file://{tmp_path}/run", *out],
    ):
        refused = CliRunner().invoke(main, command)
        assert (refused.exit_code, "ive the path without file://" in refused.stderr) == (2, True), refused.output
    for call in (partial(tokenize_dataset, output=tmp_path / "run"), Dataset):
        with pytest.raises(InputError, match="Give the path without file://"):
            call(f"file://{lines}")
    assert [*tmp_path.iterdir()] == [lines]


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:secret@host/rows.jsonl",
        "ftp://user:secret@host/*.jsonl",
        "https://user:secret@host/rows.jsonl",
        "https://secret@host/rows.jsonl",
        "HTTPS://host/rows.jsonl?token=secret",
        "https://host/*.jsonl?X-Amz-Signature=secret",
        "zip://rows.jsonl::https://user:secret@host/rows.zip",
    ],
)
def test_urls_with_secrets_are_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    lines = written(tmp_path / "rows.jsonl", [{"text": "a"}])
    out = ["--output", str(tmp_path / "run")]
    for command in (
        ["tokenize", url, *out],
        ["tokenize", str(lines), "--output", url],
        ["inspect", url],
        ["verify", url],
        ["generate", "--tokenized", url, *out],
        ["merge", url, *out],
    ):
        refused = CliRunner().invoke(main, command)
        assert (refused.exit_code, "is a URL with a password" in refused.stderr) == (2, True), refused.output
        assert "secret" not in refused.output
    for command in (
        ["generate", "--tokenized", str(tmp_path), "--output", url],
        ["inspect", str(lines), "--model", url],
    ):
        refused = CliRunner().invoke(main, command)
        assert (refused.exit_code, "a URL; give the path of a local" in refused.stderr) == (2, True), refused.output
        assert "secret" not in refused.output
    with pytest.raises(InputError, match="must be the path of a local file or folder") as failure:
        local("output", url)
    assert "secret" not in str(failure.value)
    assert [*tmp_path.iterdir()] == [lines]
    with pytest.raises(MediaError) as failed:
        fetched(Media("image", "ftp://user:secret@host/a.png"))
    assert "secret" not in str(failed.value)


@pytest.mark.slow
@pytest.mark.usefixtures("s3_server")
def test_the_command_reads_from_a_real_s3_server(tmp_path: Path) -> None:
    """A second call to the run continues it. After an object was replaced, a call is refused."""
    store = fsspec.filesystem("s3")
    given = files(tmp_path, "s3://bucket/data")
    for path in (*given, tmp_path / "0.png"):
        store.pipe(f"bucket/data/{path.name}", path.read_bytes())
    urls = [f"s3://bucket/data/{path.name}" for path in given]
    for arguments in (urls, ["s3://bucket/data/rows.js*"]):
        out = tmp_path / f"run {len(arguments)}"
        done = tokenize(*arguments, "--output", out, "--workers", 1)
        assert done.returncode == 1, done.stderr
    run_in_process(settings(*given), tmp_path / "local")
    require_equal(tmp_path / "run 5", tmp_path / "local")
    before = content(tmp_path / "run 5")
    assert tokenize(*urls, "--output", tmp_path / "run 5").returncode == 1
    assert content(tmp_path / "run 5") == before
    store.pipe("bucket/data/rows.jsonl", b'{"text": "b"}\n')
    refused = tokenize(*urls, "--output", tmp_path / "run 5")
    assert (refused.returncode, "because the content of s3://bucket/data/rows.jsonl" in refused.stderr) == (2, True)
