"""Tests that no row of an unsorted, concatenated, truncated or compressed tar is lost without an error."""

from __future__ import annotations

import gzip
import logging
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mindie_mm.batch.input.row import parse
from mindie_mm.batch.input.row_id import row_id
from mindie_mm.batch.input.source import Source, open_source
from mindie_mm.errors import InputError
from mindie_mm.inputs import Media, Text
from tests.batch.conftest import run, settings
from tests.batch.test_forms import packed
from tests.media_samples import encoded, photograph

IMAGE = encoded(photograph(size=(60, 40)))
JSON = b'{"text": "What?"}'


def pair(key: str) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", IMAGE), (f"{key}.json", JSON)]


def opened(path: Path) -> Source:
    source = open_source(path, ())
    source.check()
    return source


def ids(source: Source, num_rows: int) -> list[str | None]:
    """Read all rows in chunks of `num_rows`, check that each has its image and question, and return the ids."""
    found = []
    for rows, start, stop in source.cut(num_rows):
        records = [*source.records(start, stop)]
        assert len(records) == rows
        for record in records:
            assert parse(record, Path(), "").items == [Media("image", IMAGE), Text("What?")]
            found.append(row_id(record))
    return found


@pytest.mark.parametrize(
    ("names", "again"),
    [
        (("0.jpg", "1.jpg", "0.json", "1.json"), "0.json"),
        (("a/0.jpg", "b/0.jpg", "a/0.json"), "a/0.json"),
        (("./0.jpg", "0.json"), "0.json"),
        (("0.jpg", "0.json", "1.jpg", "1.json", "0.jpg", "0.json"), "0.jpg"),
    ],
)
def test_a_row_whose_files_are_not_contiguous_is_refused_before_the_run_begins(
    names: Sequence[str], again: str, tmp_path: Path
) -> None:
    path = packed(tmp_path / "apart.tar", [(name, JSON if name.endswith("n") else IMAGE) for name in names])
    for limit in (None, 1):
        with pytest.raises(InputError, match=rf"apart\.tar: the files of row '.*0' are .*'{again}' comes after files"):
            run(settings(path, limit=limit), tmp_path / "deep/run")
    assert [*tmp_path.iterdir()] == [path], "a run that has not begun leaves nothing"


def test_a_name_in_several_folders_and_tars_gives_several_rows(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        path = packed(tmp_path / name, [*pair("0"), *pair("x/0"), *pair("y/0"), *pair("1")])
        assert ids(opened(path), 3) == ["0", "x/0", "y/0", "1"]


@pytest.mark.parametrize("between", [b"", bytes(512), bytes(20_480)])
def test_concatenated_tars_are_read_to_the_end(between: bytes, tmp_path: Path) -> None:
    parts = [packed(tmp_path / f"{key}.tar", [*pair(key), *pair(f"{key}1")]).read_bytes() for key in "abc"]
    (tmp_path / "all.tar").write_bytes(between.join(parts))
    source = opened(tmp_path / "all.tar")
    for num_rows in (1, 2, 3, 100):
        assert ids(source, num_rows) == ["a", "a1", "b", "b1", "c", "c1"]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "text after the end": (lambda data: data + b"more", "is damaged: there is no tar header at byte 10240"),
    "a compressed tar after the end": (lambda data: data + gzip.compress(data), "there is no tar header at byte 10240"),
    "cut after a file": (lambda data: data[: data.rindex(JSON) + 512], "without the zero blocks that end a tar"),
    "cut in a file": (lambda data: data[: data.rindex(IMAGE) + 600], "cannot be read as an uncompressed tar"),
    "gzip": (gzip.compress, "compressed with gzip. Unpack it"),
    "zstd": (lambda _: b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
    "empty": (lambda _: b"", "cannot be read as an uncompressed tar"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tar_is_refused_before_the_run_begins(damage: str, tmp_path: Path) -> None:
    harm, why = DAMAGES[damage]
    path = packed(tmp_path / "t.tar", [*pair("0"), *pair("1")])
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(InputError, match=rf"t\.tar .*{why}"):
        run(settings(path, limit=1), tmp_path / "run")
    assert [*tmp_path.iterdir()] == [path]


def test_a_single_block_of_zeros_ends_a_tar(tmp_path: Path) -> None:
    path = packed(tmp_path / "t.tar", pair("0"))
    path.write_bytes(path.read_bytes().rstrip(b"\0") + bytes(1024 - len(JSON)))
    assert ids(opened(path), 9) == ["0"]
    with tarfile.open(path, "w"):  # a tar without files has no rows
        pass
    assert ids(opened(path), 9) == []


def test_a_compressed_file_fails_its_row(tmp_path: Path) -> None:
    for name in ("0.json.gz", "0.txt.zst", "0.PNG.GZ"):
        source = opened(packed(tmp_path / "t.tar", [("0.jpg", IMAGE), (name, b"\x1f\x8b")]))
        ((_, start, stop),) = source.cut(1)
        with pytest.raises(InputError, match=f"the row 0 has the compressed file {name}"):
            parse(next(iter(source.records(start, stop))), tmp_path, "")


@pytest.mark.parametrize(
    ("names", "warned"),
    [
        (("cat 1.5x.jpg", "cat 1.5x.json", "cat 1.7x.jpg", "cat 1.7x.json"), "'cat 1.5x.json' is ignored"),
        (("img_0.5.jpg", "img_0.5.json"), "'img_0.5.json' is ignored"),
        (("v1.2.jpg", "v1.3.jpg"), "'v1.2.jpg' shares a row with other media"),
        (("3.jpg", "3.json", "3.meta.json"), ""),
        (("3.left.jpg", "3.right.jpg", "3.json"), ""),
        (("3.1.jpg", "3.2.jpg", "3.txt"), ""),
    ],
)
def test_names_with_a_dot_before_their_extension_cause_a_warning(
    names: Sequence[str], warned: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        opened(packed(tmp_path / "t.tar", [(name, JSON) for name in names]))
    assert (warned in caplog.text) if warned else not caplog.text
