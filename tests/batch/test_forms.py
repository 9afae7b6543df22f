"""Tests for the formats of rows.

A prompt has the same ids and arrays in every format. An invalid row does not affect other rows.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mindie_mm.batch import Dataset, Sample
from mindie_mm.batch.input.gather import gather, gathered_path, is_gathered
from mindie_mm.batch.input.media_folder import left_out_summary
from mindie_mm.batch.input.source import chunks, open_source
from mindie_mm.batch.settings import Run
from mindie_mm.batch.stage import Stage
from mindie_mm.cli import main
from mindie_mm.errors import InputError, StorageError
from tests.audio_samples import encode_audio, tone
from tests.batch.conftest import content, run_in_process, settings, tokenize, written
from tests.media_samples import encode_video, encoded, moving_frames, photograph

NAMES = ("0.jpg", "1.png", "2.wav", "3.mp4")
TEXT = "What is this?"
TEMPLATE = "{media}What is this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a JPEG, a PNG, an audio clip and a video."""
    folder = tmp_path_factory.mktemp("forms") / "media"
    folder.mkdir()
    (folder / "0.jpg").write_bytes(encoded(photograph(size=(90, 70))))
    (folder / "1.png").write_bytes(encoded(photograph(size=(60, 120)), "PNG"))
    (folder / "2.wav").write_bytes(encode_audio(tone(0.5), 16_000))
    (folder / "3.mp4").write_bytes(encode_video(moving_frames(6)))
    return folder


def kind(name: str) -> str:
    return {".wav": "audio", ".mp4": "video"}.get(Path(name).suffix, "image")


def listed(folder: Path) -> Sequence[Mapping[str, Any]]:
    return [{"inputs": [{kind(name): name}, {"text": TEXT}]} for name in NAMES]


def packed(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    """Write an uncompressed tar, and return its path."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def tabled(path: Path, rows: Sequence[Mapping[str, Any]], **options: Any) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path, **options)
    return path


def lines(folder: Path, out: Path) -> Path:
    return written(folder / "rows.jsonl", listed(folder))


def windows_lines(folder: Path, out: Path) -> Path:
    rows = [json.dumps(row).encode() for row in listed(folder)]
    path = folder / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + b"\r\n \r\n".join(rows))
    return path


def bare_lists(folder: Path, out: Path) -> Path:
    return written(folder / "lists.jsonl", [row["inputs"] for row in listed(folder)])


def flat(folder: Path, out: Path) -> Path:
    return written(folder / "flat.ndjson", [{"text": TEXT, kind(name): name} for name in NAMES])


def openai(folder: Path, out: Path) -> Path:
    parts = [
        [{"type": f"{kind(name)}_url", f"{kind(name)}_url": {"url": name}}, {"type": "text", "text": TEXT}]
        for name in NAMES
    ]
    return written(folder / "openai.jsonl", [{"messages": [{"role": "user", "content": own}]} for own in parts])


def table_of_cells(folder: Path, out: Path) -> Path:
    rows = [{kind(name): {"bytes": (folder / name).read_bytes(), "path": None}, "text": TEXT} for name in NAMES]
    return tabled(out / "cells.parquet", rows, row_group_size=3, use_dictionary=True)


def table_of_paths(folder: Path, out: Path) -> Path:
    return tabled(folder / "paths.pq", [{kind(name): {"bytes": None, "path": name}, "prompt": TEXT} for name in NAMES])


def table_of_lists(folder: Path, out: Path) -> Path:
    return tabled(folder / "lists.parquet", listed(folder))


def table_of_nested_cells(folder: Path, out: Path) -> Path:
    rows = [
        [{kind(name): {"bytes": (folder / name).read_bytes(), "path": "gone"}, "text": None}, {"text": TEXT}]
        for name in NAMES
    ]
    return tabled(out / "nested.parquet", [{"inputs": items, "note": float("nan")} for items in rows])


def table_of_json(folder: Path, out: Path) -> Path:
    return tabled(folder / "json.parquet", [{"inputs": json.dumps(row["inputs"])} for row in listed(folder)])


def tar_with_texts(folder: Path, out: Path) -> Path:
    members = [(name, (folder / name).read_bytes()) for name in NAMES]
    return packed(
        out / "texts.tar", [one for member in members for one in (member, (f"{member[0][0]}.txt", TEXT.encode()))]
    )


def tar_with_prompts(folder: Path, out: Path) -> Path:
    described = {f"a/b/{name[0]}.json": row for name, row in zip(NAMES, listed(folder), strict=True)}
    return packed(
        out / "prompts.tar",
        [
            one
            for name, (path, row) in zip(NAMES, described.items(), strict=True)
            for one in ((path, json.dumps(row).encode()), (f"a/b/{name}", (folder / name).read_bytes()))
        ],
    )


def tar_with_json_texts(folder: Path, out: Path) -> Path:
    return packed(
        out / "json.tar",
        [
            one
            for name in NAMES
            for one in ((name, (folder / name).read_bytes()), (f"{name[0]}.json", json.dumps({"text": TEXT}).encode()))
        ],
    )


def flat_urls(folder: Path, out: Path) -> Path:
    return written(folder / "urls.jsonl", [{f"{kind(name)}_url": name, "text": TEXT} for name in NAMES])


def tar_with_lists(folder: Path, out: Path) -> Path:
    """Write a tar with additional files that must be ignored.

    The additional files are the `._*` files that macOS adds, and a second JSON file for each media file.
    """
    return packed(
        out / "lists.tar",
        [
            one
            for name, row in zip(NAMES, listed(folder), strict=True)
            for one in (
                (f"._{name}", b"\0\5\x16\7"),
                (name, (folder / name).read_bytes()),
                (f"{name[0]}.json", json.dumps(row["inputs"]).encode()),
                (f"{name[0]}.meta.json", b'{"text": "no", "video": "no.mp4"}'),
            )
        ],
    )


def require_equal(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    assert [sample.error for sample in found] == [None] * len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.spans == other.spans
        for arrays, others in zip(one.arrays, other.arrays, strict=True):
            assert all(np.array_equal(arrays[name], others[name]) for name in others)


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return the dataset of the rows in `lines`. test_run.py compares this format with online requests."""
    out = tmp_path_factory.mktemp("reference")
    run_in_process(settings(lines(folder, out)), out / "run")
    return Dataset(out / "run")


FORMS = (windows_lines, bare_lists, flat, flat_urls, openai, table_of_cells, table_of_paths, table_of_lists,
         table_of_nested_cells, table_of_json, tar_with_texts, tar_with_prompts, tar_with_json_texts,
         tar_with_lists)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_is_the_same_in_each_form(form: Any, folder: Path, reference: Dataset, tmp_path: Path) -> None:
    run_in_process(settings(form(folder, tmp_path)), tmp_path / "run")
    require_equal(Dataset(tmp_path / "run"), reference)


def test_a_folder_of_media_gives_the_same_prompts(folder: Path, reference: Dataset, tmp_path: Path) -> None:
    media = tmp_path / "media"
    (media / "below").mkdir(parents=True)
    for name in NAMES:
        (media / "below" / name).write_bytes((folder / name).read_bytes())
    (media / "notes.md").touch()
    run_in_process(settings(media, template=TEMPLATE), tmp_path / "run")
    dataset = Dataset(tmp_path / "run")
    require_equal(dataset, reference)
    assert [sample.id for sample in dataset] == [f"below/{name}" for name in NAMES]
    assert not list((tmp_path / "run").glob("input-*"))


@pytest.mark.slow
def test_the_command_accepts_standard_input_columns_limit_and_template(
    folder: Path, reference: Dataset, tmp_path: Path
) -> None:
    rows = lines(folder, tmp_path).read_text()
    done = tokenize("-", "--output", tmp_path / "stdin", "--limit", 3, "--workers", 1, given=rows, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f" media items in {tmp_path / 'stdin'}; no row failed\n")
    require_equal(Dataset(tmp_path / "stdin"), reference[:3])
    table = [{"image": (folder / name).read_bytes(), "text": "no", "id": 5} for name in NAMES[:2]]
    inputs = (
        tabled(tmp_path / "t.parquet", table),
        packed(tmp_path / "t.tar", [(NAMES[2], (folder / NAMES[2]).read_bytes())]),
    )
    options = ("--select-columns", " image,", "--template", TEMPLATE, "--no-chat-template", "--workers", 1)
    assert tokenize(*inputs, "--output", tmp_path / "columns", *options).returncode == 0
    image, _, audio = Dataset(tmp_path / "columns")
    assert (image.id, len(image.ids)) == ("0", len(image.ids[image.spans[0].start :]) + image.spans[0].lead)
    assert len(audio.ids) > audio.spans[0].stop + audio.spans[0].tail


ATTACKS: Sequence[tuple[bytes, str]] = (
    (b'{"id": "deep", "text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"id": "deep", "text": "a", "x": ' + b"[" * 700 + b"]" * 700 + b"}", "nested too deeply"),
    (b'{"text": "a", "x": NaN}', "not JSON"),
    (b'{"id": ' + b"9" * 5000 + b', "text": "a"}', "not JSON"),
    (b'{"id": "\\ud800", "text": "a"}', "not JSON"),
    (b'{"id": "\xff", "text": "a"}', "not JSON"),
    (b'{"text": "\xff"}', "not JSON"),
    (b"\xff", "not JSON"),
    (b"5", "must be an object or a list"),
    (b'{"id": [1], "text": "a"}', "id is list"),
    (b'{"id": 1.5, "text": "a"}', "id is float"),
    (b'{"messages": [{"role": ["user"], "content": "a"}]}', "role=["),
    (b'{"inputs": [{"type": {"a": 1}, "text": "a"}]}', "type is of type dict"),
    (b'{"inputs": [{"image": "a.jpg", "detail": ["low"]}]}', "detail=["),
    (b'{"inputs": [{"image": "a\\u0000.jpg"}]}', "not a valid path"),
    (b'{"inputs": [{"image": "."}]}', "Is a directory"),
    (b'{"inputs": [{"image": "http://127.0.0.1:9/a.jpg"}]}', "address is not public"),
    (b'{"inputs": "[{]"}', "not JSON"),
    (b'{"inputs": [], "text": "a"}', "which conflict; give inputs, or messages, or text"),
    (b'{"text": null}', "must have inputs, messages, or"),
    (b"{}", "must have inputs, messages, or"),
    (b"[null]", "must be a dict"),
)


def test_an_invalid_row_does_not_affect_other_rows(tmp_path: Path) -> None:
    good = [
        {"id": "same", "text": "a"},
        {"id": "same", "text": "a"},
        {"id": "\u65e5\n\x00", "text": "a", "image": None},
    ]
    rows = written(tmp_path / "rows.jsonl", [good[0], *(row for row, _ in ATTACKS), *good[1:]])
    rows.write_bytes(rows.read_bytes().removesuffix(b"\n"))
    run_in_process(settings(rows), tmp_path / "run")
    dataset = Dataset(tmp_path / "run")
    assert len(dataset) == len(ATTACKS) + len(good)
    for sample, (row, why) in zip(dataset[1:-2], ATTACKS, strict=True):
        assert sample.error.startswith(("InputError: ", "MediaError: ")), (row[:80], sample.error)
        assert why in sample.error, (row[:80], sample.error)
    assert [dataset[row].id for row in (0, -2, -1)] == ["same", "same", "\u65e5\n\x00"]
    assert [dataset[row].error for row in (0, -2, -1)] == [None] * 3
    assert len((tmp_path / "run/errors.jsonl").read_text().splitlines()) == len(ATTACKS)


def test_cells_without_a_python_value_fail_only_their_row(tmp_path: Path) -> None:
    text = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffb"))
    table = pa.table({"text": text.cast(pa.string()), "when": pa.array([0, 0, 2**50], pa.timestamp("ms"))})
    pq.write_table(table, tmp_path / "odd.parquet")
    run_in_process(settings(tmp_path / "odd.parquet"), tmp_path / "run")
    errors = [sample.error for sample in Dataset(tmp_path / "run")]
    assert errors == [None, "InputError: inputs[0].text is of type bytes; it must be a string", None]


def test_a_row_group_is_read_piece_by_piece(tmp_path: Path) -> None:
    rows = [{"text": "a", "bytes": os.urandom(1_000_000), "id": row} for row in range(12)]
    path = tabled(tmp_path / "large.parquet", rows, write_batch_size=1)
    before = pa.total_allocated_bytes()
    records = open_source(path, ()).records(0, 12)
    assert [next(records)["id"] for _ in range(6)] == [*range(6)]
    assert pa.total_allocated_bytes() - before < 8_000_000
    records.close()
    source = open_source(path, ("id",))
    assert [row["id"] for row in source.records(2, 5)] == [2, 3, 4]
    assert [row["id"] for row in source.records(5, 9)] == [5, 6, 7, 8]
    assert set(next(source.records(9, 12))) == {"id"}
    assert [row["id"] for row in source.records(1, 3)] == [1, 2]


def test_only_regular_files_of_a_tar_are_rows(folder: Path, tmp_path: Path) -> None:
    image = (folder / "0.jpg").read_bytes()
    with tarfile.open(tmp_path / "odd.tar", "w") as tar:
        for name in ("../../0.jpg", "/etc/1.jpg", "d\udcff/2.jpg", "x" * 200 + "/3.jpg"):
            member = tarfile.TarInfo(name)
            member.size = len(image)
            tar.addfile(member, io.BytesIO(image))
        for number, type_ in ((4, tarfile.SYMTYPE), (5, tarfile.LNKTYPE), (6, tarfile.FIFOTYPE), (7, tarfile.DIRTYPE)):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.type, member.linkname = type_, str(folder / "0.jpg")
            tar.addfile(member)
    run_in_process(settings(tmp_path / "odd.tar"), tmp_path / "run")
    dataset = Dataset(tmp_path / "run")
    assert [sample.id for sample in dataset] == ["../../0", "/etc/1", "d\\udcff/2", "x" * 200 + "/3"]
    assert [sample.error for sample in dataset] == [None] * 4


def test_a_sparse_file_in_a_tar_is_ignored(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "0.jpg").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "1.jpg").write_bytes((folder / "0.jpg").read_bytes())
    command = ["tar", "--sparse", "-C", str(tmp_path), "-cf", str(tmp_path / "s.tar"), "0.jpg", "1.jpg"]
    subprocess.run(command, check=True, timeout=300)
    run_in_process(settings(tmp_path / "s.tar"), tmp_path / "run")
    assert [(sample.id, sample.error) for sample in Dataset(tmp_path / "run")] == [("1", None)]


@pytest.mark.parametrize("damage", ["cut in a file", "cut in a header", "a header overwritten", "no tar"])
def test_a_damaged_tar_ends_the_run(damage: str, folder: Path, tmp_path: Path) -> None:
    path = packed(tmp_path / "t.tar", [(f"{i}.jpg", (folder / "0.jpg").read_bytes()) for i in range(3)])
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    data = bytearray(path.read_bytes())
    if damage == "cut in a file":
        del data[last.offset_data + 700 :]
    elif damage == "cut in a header":
        del data[last.offset + 100 :]
    elif damage == "a header overwritten":
        data[last.offset : last.offset + 512] = b"x" * 512
    else:
        data = bytearray(b"x" * 2000)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"t\.tar (is damaged|cannot be read as an uncompressed tar)"):
        run_in_process(settings(path), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.parquet", b"PAR1 no", "cannot be read as Parquet"),
        ("a.csv", b"a,b", r"is neither a folder of media nor a \.jsonl"),
        ("a.csv.gz", b"", r"is neither a folder of media nor a \.jsonl"),
    ],
)
def test_a_file_in_an_unsupported_format_is_refused(name: str, data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=why):
        run_in_process(settings(tmp_path / name), tmp_path / "run")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """One of the files is /proc/self/mem, whose first bytes cannot be read even by root."""
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")
    (tmp_path / "b.jsonl").symlink_to("b.jsonl")
    for given, why in (
        (tmp_path / "a.jsonl", r"a\.jsonl cannot be read: "),
        (tmp_path / "b.jsonl", "b.jsonl cannot be read: Too many levels of symbolic links"),
        (tmp_path / f"{'c' * 300}.jsonl", r"\.jsonl cannot be read: File name too long"),
        (tmp_path / "a.jsonl/d.jsonl", r"there is no file .*d\.jsonl"),
        (tmp_path / "gone.jsonl", r"there is no file .*gone\.jsonl"),
    ):
        with pytest.raises(InputError, match=why):
            run_in_process(settings(given), tmp_path / "run")
    (tmp_path / "e.jsonl").write_text('{"text": "a"}')
    source = open_source(tmp_path / "e.jsonl", ())
    (tmp_path / "e.jsonl").unlink()
    with pytest.raises(InputError, match=r"e\.jsonl cannot be read: No such file or directory"):
        list(chunks([source], 7, None))


def test_rows_removed_after_counting_end_the_run(tmp_path: Path) -> None:
    """The worker counts the file's rows again, as an actor on another machine would."""
    rows = written(tmp_path / "rows.jsonl", [{"text": "a", "id": row} for row in range(10)])
    given = settings(rows)
    counted = [*chunks(given.sources(tmp_path), 7, None)]
    rows.write_bytes(b"".join(rows.read_bytes().splitlines(keepends=True)[:3]))
    stage = Stage(Run.of(given, tmp_path), tmp_path)
    for chunk, whole in zip(counted, (3, 0), strict=True):
        steps = stage.run(chunk, {})
        assert [next(steps).error for _ in range(whole)] == [None] * whole
        with pytest.raises(StorageError, match=r"rows\.jsonl cannot be read to the end: it ended early"):
            next(steps)


def test_files_without_read_permission_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test drops root's permissions, because root may read any file."""
    (tmp_path / "hidden").mkdir()
    hidden = [tmp_path / name for name in ("hidden/a.jsonl", "a.jsonl", "a.tar", "hidden")]
    for path in hidden:
        if not path.is_dir():
            path.write_bytes(b'{"text": "a"}')
        path.chmod(0)
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        for path in hidden[:-1]:
            with pytest.raises(InputError, match=rf"{path.name} cannot be read: Permission denied"):
                open_source(path.relative_to(tmp_path), ()).fingerprint()
            assert not is_gathered(str(path.relative_to(tmp_path)))
        with pytest.raises(InputError, match="hidden cannot be listed: Permission denied"):
            gather(["hidden"], Path(), "", io.BytesIO())
    finally:
        os.seteuid(user)
        for path in reversed(hidden):
            path.chmod(0o700)


def test_a_broken_link_in_a_folder_is_ignored(folder: Path, tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    for name, target in (("0.jpg", folder / "0.jpg"), ("loop.jpg", "loop.jpg"), ("nowhere.jpg", "gone")):
        (media / name).symlink_to(target)
    run_in_process(settings(media), tmp_path / "run")
    assert [(sample.id, sample.error) for sample in Dataset(tmp_path / "run")] == [("0.jpg", None)]


def test_program_streams_caf_and_wave64_are_media_in_folders_and_tars(tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    stream = encode_video(moving_frames(6), fps=25, container="mpeg", codec="mpeg2video")
    clips = {name: encode_audio(tone(0.5), 16_000, kind) for name, kind in (("c.caf", "CAF"), ("w.w64", "W64"))}
    given = {"p.mpg": stream, "v.VOB": stream, "t.m2ts": encode_video(moving_frames(6), container="mpegts"), **clips}
    for name, data in given.items():
        (media / name).write_bytes(data)
    run_in_process(settings(media), tmp_path / "run")
    listed = Dataset(tmp_path / "run")
    assert [(sample.id, sample.error, len(sample.spans)) for sample in listed] == [(n, None, 1) for n in sorted(given)]
    run_in_process(settings(packed(tmp_path / "t.tar", [*given.items()])), tmp_path / "of-tar")
    require_equal(Dataset(tmp_path / "of-tar"), [listed[sorted(given).index(name)] for name in given])


def test_other_files_of_a_folder_are_counted_and_change_no_output(folder: Path, tmp_path: Path) -> None:
    media = tmp_path / "media"
    (media / "below").mkdir(parents=True)
    (media / "0.jpg").write_bytes((folder / "0.jpg").read_bytes())
    alone = tokenize(media, "--output", tmp_path / "alone", "--workers", 1)
    for name in ("a.txt", "below/B.TXT", "c.psd", "without", "esc.\x1b[31m", "long.ending of a name"):
        (media / name).touch()
    (media / "nowhere.jpg").symlink_to("gone")
    (media / "tree").symlink_to("below")
    beside = tokenize(media, "--output", tmp_path / "beside", "--workers", 1)
    left_out_summary = "; left out: 8 files (.txt 2, .psd 1, .jpg 1, others 4); no row failed"
    assert beside.stdout == alone.stdout.replace("; no row failed", left_out_summary).replace("alone", "beside")
    assert content(tmp_path / "beside") == content(tmp_path / "alone")
    again = tokenize(media, "--output", tmp_path / "beside")
    assert again.stdout == beside.stdout, "a continued run prints the same summary"


def test_extensions_beyond_the_eighth_are_summed_up() -> None:
    assert left_out_summary(Counter({".one": 1})) == "1 file (.one 1)"
    many = Counter({f".e{number}": 20 - number for number in range(10)})
    assert left_out_summary(many).endswith(".e6 14, .e7 13, others 23)")


def test_the_error_of_a_folder_without_media_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    for has in ("0 files$", r"1 file \(\.txt 1\)"):
        with pytest.raises(InputError, match=f"no file with a media extension; it has {has}"):
            run_in_process(settings(tmp_path / "media"), tmp_path / "run")
        (tmp_path / "media/a.txt").touch()


def test_standard_input_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="standard input cannot be read: Input/output error"),
        Path("/proc/self/mem").open("rb") as stdin,
    ):
        gather(["-"], tmp_path, "", stdin)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "limit", "taken"),
    [
        (b"1\n\n2\n3\n", 2, b"1\n\n2\n"),
        (b"\xef\xbb\xbf\r\n1\n2\n", 1, b"\xef\xbb\xbf\r\n1\n"),
        (b"12345678\n2\n", 1, b"12345678\n"),
        (b" " * 9 + b"1\n2\n", 1, b" " * 9 + b"1\n"),
        (b"1\n2", 2, b"1\n2"),
        (b"1\n2", None, b"1\n2"),
    ],
)
def test_standard_input_is_read_only_up_to_the_limit(
    given: bytes, limit: int | None, taken: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer keeps the pipe open, because standard input may never end."""
    monkeypatch.setattr("mindie_mm.batch.input.gather._PIECE_BYTES", 4)
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as stdin, os.fdopen(theirs, "wb", buffering=0) as writer:
        writer.write(given)
        if limit is None or taken == given:
            writer.close()
        gather(["-"], tmp_path, "", stdin, limit)
    assert gathered_path(tmp_path, 0).read_bytes() == taken


def test_a_refused_call_leaves_no_copy_of_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = written(tmp_path / "rows.jsonl", [{"text": "a"}])
    run_in_process(settings(rows), tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    shown = CliRunner().invoke(main, ["tokenize", "-", "--output", str(tmp_path / "run")], input='{"text": "b"}\n')
    assert (shown.exit_code, "contains another run: " in shown.stderr) == (2, True), shown.output
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_template_that_no_input_uses_is_refused(folder: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", [{"text": "a"}])
    with pytest.raises(InputError, match="template applies only to folders of media and tar files"):
        Run.of(settings(rows, template="What?"), tmp_path)
    tar = packed(tmp_path / "t.tar", [(NAMES[0], b"")])
    Run.of(settings(rows, tar, template="What?"), tmp_path)
    with pytest.raises(InputError, match=r"template contains \{media\} 2 times; it may contain this mark only once"):
        settings(folder, template="Describe {media} now {media}.")


def test_standard_input_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match="standard input is given 2 times"):
        settings(Path("-"), Path("-"))


def test_a_table_is_open_only_while_it_is_read(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    tables = [open_source(tabled(tmp_path / f"{n}.parquet", [{"text": "a"}] * 3), ()) for n in range(3)]
    assert num_open() == before
    assert next(iter(tables[0].records(0, 1))) == {"text": "a"}
    assert num_open() == before + 1
    tables[0].close()
    assert num_open() == before
    assert list(tables[0].records(1, 3)) == [{"text": "a"}] * 2


def test_audio_that_is_too_long_or_the_audio_of_a_film_is_never_lost_in_silence(tmp_path: Path) -> None:
    cases = Path(__file__).parents[1] / "cases/films"
    film = {"video": str(cases / "moving_with_sound.mp4")}
    items = [{"audio": str(cases / "late_beep.flac")}, film, {**film, "use_audio_in_video": True}]
    rows = written(tmp_path / "rows.jsonl", [{"inputs": [item, {"text": TEXT}]} for item in items])
    run_in_process(settings(rows), tmp_path / "run")
    long, silent, heard = Dataset(tmp_path / "run")
    assert "the audio clip lasts 45.0 s; the limit of this model is 30 s" in str(long.error)
    assert (silent.error, heard.error) == (None, None)
    assert [*heard.arrays[0]] == ["pixel_values_videos", "input_features", "item"]
    (span,) = heard.spans
    assert (
        np.isin(heard.ids[span.start : span.stop], [span.token, span.second_token]).sum() == span.stop - span.start - 2
    )
    assert len(heard.ids) == len(silent.ids) + 51 + 2
