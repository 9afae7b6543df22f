"""Tests for compressed inputs. They have the same rows and ids as the files that were compressed."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from mindie_mm.batch.input.gather import gather
from mindie_mm.errors import InputError, StorageError
from tests.batch.conftest import content, run, run_in_process, settings, tokenize, written
from tests.batch.test_forms import packed
from tests.media_samples import encoded, photograph


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd}
ROWS = [{"text": f"row {row}"} for row in range(9)]


def shards(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if name not in ("run.json", "manifest.json")}


@pytest.mark.parametrize("ending", PACKERS)
def test_the_command_reads_compressed_lines_as_if_they_were_not(ending: str, tmp_path: Path) -> None:
    """A compressed file may consist of several parts, because `cat a.gz b.gz` is a valid file."""
    lines = written(tmp_path / "rows.jsonl", ROWS)
    first, second = lines.read_bytes()[:50], lines.read_bytes()[50:]
    (tmp_path / f"rows.jsonl{ending}").write_bytes(PACKERS[ending](first) + PACKERS[ending](second))
    done = tokenize(tmp_path / f"rows.jsonl{ending}", "--output", tmp_path / "run", "--workers", 1, "--limit", 8)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "run").glob("input-*")), "the copy is removed when the run is finished"
    run_in_process(settings(lines, shard_rows=128, limit=8), tmp_path / "plain")
    assert [*shards(tmp_path / "run")] == [*shards(tmp_path / "plain")]
    assert json.loads((tmp_path / "run/manifest.json").read_text())["num_rows"] == 8


@pytest.mark.parametrize("ending", PACKERS)
def test_a_compressed_tar_gives_the_same_bytes_as_the_tar(ending: str, tmp_path: Path) -> None:
    image = encoded(photograph(size=(60, 40)))
    tar = packed(tmp_path / "t.tar", [(f"{row}.jpg", image) for row in range(3)])
    (tmp_path / f"t.tar{ending}").write_bytes(PACKERS[ending](tar.read_bytes()))
    for name in ("t.tar", f"t.tar{ending}"):
        run_in_process(settings(tmp_path / name, template="What?"), tmp_path / f"run of {name}")
    assert shards(tmp_path / "run of t.tar") == shards(tmp_path / f"run of t.tar{ending}")


@pytest.mark.parametrize("ending", PACKERS)
def test_a_damaged_compressed_file_is_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{ending}"
    whole = PACKERS[ending](b'{"text": "a"}\n')
    for data in (whole[:-3], b"x" * 100):
        path.write_bytes(data)
        with pytest.raises(InputError, match=rf"rows\.jsonl{ending} cannot be read: "):
            run(settings(path), tmp_path / "run")
    path.unlink()
    with pytest.raises(InputError, match=rf"rows\.jsonl{ending} cannot be read: No such file"):
        run(settings(path), tmp_path / "run")


def test_a_full_disk_during_unpacking_is_not_a_mistake_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/input-000.tar.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"input-000\.tar cannot be written: No space left on device"):
        gather([str(tmp_path / "t.tar.gz")], tmp_path / "run", "", io.BytesIO())
