"""Tests for .jsonl files that are in another format, and pipes as inputs."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mindie_mm.batch.input.gather import drop_gathered, gather, gathered_path, input_named
from mindie_mm.batch.input.row import parse
from mindie_mm.cli import main
from mindie_mm.errors import InputError
from mindie_mm.inputs import Text
from tests.batch.conftest import run, settings, written

LINE = b'{"text": "a"}'
MISTAKES = {
    "gzip": (gzip.compress(LINE), "compressed with gzip. Unpack it with zcat"),
    "zstd": (b"\x28\xb5\x2f\xfd" + LINE, "compressed with zstd"),
    "parquet": (b"PAR1" + LINE, "a Parquet file"),
    "tar": (LINE.ljust(257, b"\0") + b"ustar\0", "a tar"),
    "PowerShell": ("\n".join(['{"text": "a"}'] * 2).encode("utf-16"), "text in UTF-16, as PowerShell's > writes it"),
    "big-endian": (b"\xfe\xff" + LINE.decode().encode("utf-16-be"), "text in UTF-16"),
    "no mark": (LINE.decode().encode("utf-16-le"), "text in UTF-16"),
    "CR": (b"\r".join([LINE] * 3), "text with CR line endings"),
    "CR at the end": (b"\r".join([LINE] * 2) + b"\r", "text with CR line endings"),
    "CR, and LF at the end": (b"\r".join([LINE] * 2) + b"\n", "text with CR line endings"),
    "array": (json.dumps([{"text": "a"}], indent=1).encode(), "JSON that spans several lines"),
    "object": (b"\xef\xbb\xbf\r\n" + json.dumps({"text": "a"}, indent=1).encode(), "JSON that spans several lines"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_file_in_another_format_is_refused_and_the_format_named(mistake: str, tmp_path: Path) -> None:
    data, why = MISTAKES[mistake]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"rows\.jsonl is not JSON lines: it is {why}"):
        run(settings(path), tmp_path / "run")
    done = CliRunner().invoke(main, ["tokenize", "-", "--output", str(tmp_path / "run")], input=data)
    assert (done.exit_code, f"standard input is not JSON lines: it is {why}" in done.stderr) == (2, True), done
    assert done.stderr.startswith("Error: "), "a refused run prints no progress"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "a", "score": NaN}', "the row is not JSON: it has NaN, which JSON does not allow. Write null"),
        (b'{"text": "a", "score": -Infinity}', "the row is not JSON: it has -Infinity"),
        (b'{"text": "caf\xe9", "id": 1}', "the row is not JSON: byte 13 is not UTF-8"),
        (LINE + b"\r" + LINE, "the row is not JSON: it is text with CR line endings"),
        (b"\0{", "the row is not JSON: it is text in UTF-16"),
        (b'{\n "text": "a",\n}', "the row is not JSON: byte 16 is not valid JSON"),
        (b'{"text": "NaN"', "the row is not JSON: the JSON is incomplete"),
    ],
)
def test_the_error_for_a_line_explains_why_it_is_not_json(line: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse(line, Path(), "")


def test_a_carriage_return_is_white_space_within_a_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text":\r"a"}\r')
    (source,) = settings(tmp_path / "rows.jsonl").sources(tmp_path)
    source.check()
    ((rows, start, stop),) = source.cut(9)
    assert (rows, parse(next(iter(source.records(start, stop))), tmp_path, "").items is not None) == (1, True)


def test_concatenated_files_of_lines_are_read_to_the_end(tmp_path: Path) -> None:
    """Each file may begin with a byte order mark, which programs on Windows write."""
    (tmp_path / "rows.jsonl").write_bytes((b"\xef\xbb\xbf" + LINE + b"\n") * 2 + b"\xef\xbb\xbf\n" + LINE)
    (source,) = settings(tmp_path / "rows.jsonl").sources(tmp_path)
    source.check()
    assert [rows for rows, *_ in source.cut(2)] == [2, 1]
    for rows, start, stop in source.cut(2):
        assert [parse(record, tmp_path, "").items for record in source.records(start, stop)] == [(Text("a"),)] * rows


@pytest.mark.parametrize("num_rows", [1, 3, 5000])
def test_concatenated_tables_are_refused(num_rows: int, tmp_path: Path) -> None:
    """A Parquet reader would silently read only one of two concatenated tables of equal size."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": [f"row {row}" for row in range(num_rows)]}), path, row_group_size=1000)
    (source,) = settings(path).sources(tmp_path)
    source.check()
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(InputError, match=r"rows\.parquet contains several concatenated Parquet files"):
        run(settings(path), tmp_path / "run")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    (source,) = settings(path).sources(tmp_path)
    source.check()


def test_a_pipe_is_read_like_standard_input(tmp_path: Path) -> None:
    """Unnamed pipes, for example from a shell's `<(zcat rows.jsonl.gz)`, and named pipes are accepted.

    Relative paths in their rows start from the caller's folder.
    """
    os.mkfifo(tmp_path / "named")
    both = os.open(tmp_path / "named", os.O_RDWR)  # opening only one end would block until the other end is opened
    read, write = os.pipe()
    for given, end in ((f"/dev/fd/{read}", write), (str(tmp_path / "named"), both)):
        os.write(end, (LINE + b"\n") * 3)
        given_settings = settings(Path(input_named(given)), stdin_folder="/somewhere", limit=2)
        gather(given_settings.inputs, tmp_path, "", io.BytesIO(), given_settings.limit)
        assert gathered_path(tmp_path, 0).read_bytes() == (LINE + b"\n") * 2
        os.close(end)
        (source,) = given_settings.sources(tmp_path)
        source.check()
        assert [rows for rows, *_ in source.cut(1)] == [1, 1]
        assert given_settings.media_folder(0) == Path("/somewhere")
        drop_gathered(given_settings.inputs, tmp_path)
    os.close(read)


def test_standard_input_can_be_named_only_once(tmp_path: Path) -> None:
    assert {*map(input_named, ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"))} == {"-"}
    for twice in (("-", "-"), ("/dev/fd/63", "/dev/fd/63")):
        with pytest.raises(InputError, match="is given 2 times; it can be read only once"):
            settings(*map(Path, twice))
    with pytest.raises(InputError, match="an input is an empty string"):
        input_named("")


def test_the_error_for_a_folder_of_tables_says_how_to_name_them(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/0.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        InputError, match=r"1 file \(\.parquet 1\)\. If these files contain rows, give their names: .*/\*\.parquet"
    ):
        run(settings(tmp_path / "tables"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_has_not_begun_leaves_nothing(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", [{"text": "a"}])
    gone = settings(tmp_path / "gone.jsonl")
    with pytest.raises(InputError, match="there is no file"):
        run(gone, tmp_path / "deep/run")
    with pytest.raises(InputError, match="template applies only to folders"):
        run(settings(rows, template="What?"), tmp_path / "deep/run")
    assert [*tmp_path.iterdir()] == [rows]
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match="there is no file"):
        run(gone, tmp_path / "run")
    assert [*(tmp_path / "run").iterdir()] == [], "an existing folder is kept"
