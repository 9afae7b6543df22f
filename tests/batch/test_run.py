"""Tests for runs.

A run produces the same ids and arrays as online requests. Its files do not depend on the number of workers or restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time

import msgspec
import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from PIL import Image

from mindie_mm.batch import Dataset
from mindie_mm.batch import batch_process as process
from mindie_mm.batch.cursor import RowCursor
from mindie_mm.batch.output.run_folder import Address
from mindie_mm.batch.settings import Run
from mindie_mm.cli import main
from mindie_mm.cli.resuming import resuming
from mindie_mm.errors import InputError, ProcessDied, StorageError
from mindie_mm.nn.splice import read_media
from mindie_mm.processes import ipc
from mindie_mm.shm import release
from mindie_mm.shm.format.item import ITEM, MediaShape
from mindie_mm.tokenize import Tokenizer
from tests import warm
from tests.batch.conftest import CLI, content, run, run_in_process, settings, tokenize, written
from tests.batch.deadly import Deadly
from tests.media_samples import encoded, photograph
from tests.namespaces import UNSHARE, require
from tests.watching import wait_until

BAD = {"gone": "MediaError", "broken": "MediaError", "odd": "InputError"}

pytestmark = pytest.mark.usefixtures("copied_workers")


def test_ids_and_arrays_equal_those_of_the_online_path(lines, rows, media, tmp_path, monkeypatch):
    manifest = run_in_process(settings(lines), tmp_path / "run")
    assert (manifest.num_rows, manifest.num_errors) == (len(rows), len(BAD))
    dataset = Dataset(tmp_path / "run")
    monkeypatch.chdir(media)
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained() as tokenizer:
        for sample, row in zip(dataset, rows, strict=True):
            if sample.error is not None:
                continue
            if "messages" in row:
                messages = row["messages"]
            else:
                flat = [{"image": name} for name in row.get("images", ())] + [{"text": row.get("text")}]
                messages = [{"role": "user", "content": row.get("inputs", flat)}]
            ids = tokenizer.tokenize_chat(messages, path_file).numpy()
            items = read_media(ids, MediaShape.of)
            plain = ids.copy()
            for item in items:
                plain[item.slots] = item.shape.token
            assert sample.ids.tolist() == plain.tolist()
            assert len(sample.arrays) == len(items)
            for found, item in zip(sample.arrays, items, strict=True):
                assert list(found) == list(item.view)
                assert all(np.array_equal(found[name], item.view[name]) for name in found)
                assert not found[ITEM].flags.writeable
            release(path_file)


def test_the_number_of_workers_does_not_change_the_bytes(lines, tmp_path):
    run_in_process(settings(lines), tmp_path / "1")
    run(settings(lines), tmp_path / "3", num_workers=3)
    first = content(tmp_path / "1")
    assert len(first) == 2 * 5 + 4, "there are five shards, the settings, the manifest, the page and the list of errors"
    assert content(tmp_path / "3") == first


def test_a_shard_ends_with_the_row_that_reaches_its_size(lines, tmp_path):
    manifest = run_in_process(settings(lines, shard_bytes=100_000), tmp_path / "run")
    for shard in manifest.shards:
        assert shard.info.num_rows <= 7
    small = [
        shard.info
        for shard in manifest.shards
        if shard.info.stop_row % 7 and shard.info.stop_row != len(manifest.shards)
    ]
    assert any(info.num_bytes >= 100_000 for info in small)
    assert [sample.row for sample in Dataset(tmp_path / "run")] == list(range(manifest.num_rows))


def test_bad_rows_report_the_reason_and_do_not_affect_other_rows(lines, tmp_path, media):
    done = tokenize(lines, "--output", tmp_path / "run", "--workers", 1)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith(f"3 rows failed, see {tmp_path / 'run/errors.jsonl'}")
    errors = [json.loads(line) for line in (tmp_path / "run/errors.jsonl").read_text().splitlines()]
    assert {error["id"]: error["error"].split(":")[0] for error in errors} == BAD
    assert f"there is no file {media / 'gone.jpg'}" in errors[0]["error"]
    assert [Dataset(tmp_path / "run")[error["row"]].error for error in errors] == [error["error"] for error in errors]


@pytest.mark.parametrize(("given", "row"), [("stop", 4), ("fail-after=2", 9)])
def test_a_run_stops_at_too_many_failed_rows_and_continues_with_a_higher_limit(lines, rows, tmp_path, given, row):
    done = tokenize(
        lines, "--output", tmp_path / "run", "--shard-rows", 7, "--workers", 1, "--on-error", given, "--json-progress"
    )
    assert (done.returncode, done.stdout) == (3, "")
    *_, progress, error = done.stderr.splitlines()
    count = 1 if given == "stop" else 2
    reason = rf"Number of failed rows: {count}; the limit is {count - 1}\. Fix that, then .* again to continue"
    assert re.fullmatch(rf"Error: row {row}: MediaError: .*\. {reason}", error)
    shown = json.loads(progress)
    assert (shown["rows"], shown["errors"], shown["resumed_rows"]) == (row + 1, count, 0)
    assert not list((tmp_path / "run").glob("*.partial"))
    assert run_in_process(settings(lines), tmp_path / "run").num_rows == len(rows)


@pytest.mark.parametrize("given", ["never", "fail-after=0", "fail-after", "fail-after=x"])
def test_an_invalid_value_of_on_error_is_refused(given, tmp_path):
    shown = CliRunner().invoke(main, ["tokenize", "-", "--output", str(tmp_path / "run"), "--on-error", given])
    assert (shown.exit_code, "is not valid; use skip, stop or fail-after=N" in shown.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def test_media_caps_are_part_of_a_runs_identity(media, tmp_path):
    """A row above a limit fails. The run cannot be continued with a different limit."""
    rows = written(media / "capped.jsonl", [{"images": ["0.jpg"], "text": "What?"}, {"text": "Just words."}])
    (tmp_path / "settings.toml").write_text("max_image_pixels = 1000")
    done = tokenize(rows, "--output", tmp_path / "run", "--workers", 1, "--config", tmp_path / "settings.toml")
    assert done.returncode == 1, done.stderr
    (error,) = [json.loads(line) for line in (tmp_path / "run/errors.jsonl").read_text().splitlines()]
    assert error["row"] == 0
    assert "the limit is 1000" in error["error"]
    other = tokenize(rows, "--output", tmp_path / "run", "--max-image-pixels", 2000)
    assert other.returncode == 2
    assert "media was " in other.stderr


def test_limits_apply_to_each_row(media, tmp_path):
    with Image.open(media / "0.jpg") as image:
        pixels = image.width * image.height
    rows = written(media / "summed.jsonl", [{"images": ["0.jpg"] * count, "text": "What?"} for count in (2, 2, 3, 4)])
    limits = ("--max-request-pixels", 2 * pixels, "--limit-mm-per-prompt", "image=3")
    done = tokenize(rows, "--output", tmp_path / "run", "--workers", 1, *limits)
    assert done.returncode == 1, done.stderr
    error, other = [json.loads(line) for line in (tmp_path / "run/errors.jsonl").read_text().splitlines()]
    assert error["row"] == 2
    assert f"the request's images and frames have at least {3 * pixels} pixels" in error["error"]
    assert error["error"].endswith(f"the limit is {2 * pixels} (--max-request-pixels)")
    assert other["error"].endswith("has 4 media items of kind image; the limit is 3 (limit_mm_per_prompt)")


def test_no_resume_needs_an_empty_folder(lines, tmp_path):
    run_in_process(settings(lines, limit=1), tmp_path / "run")
    before = content(tmp_path / "run")
    command = ["tokenize", str(lines), "--output", str(tmp_path / "run"), "--limit", "1", "--no-resume"]
    shown = CliRunner().invoke(main, command)
    assert (shown.exit_code, "is not empty; --no-resume needs an empty folder" in shown.stderr) == (2, True)
    assert content(tmp_path / "run") == before


def test_another_run_is_refused_with_the_differences(lines, tmp_path):
    run_in_process(settings(lines), tmp_path / "run")
    before = content(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"contains another run: limit was None and is now 3; shard_rows was 7 and is now 8\. Choose"
    ):
        run(settings(lines, shard_rows=8, limit=3), tmp_path / "run")
    with lines.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(InputError, match=r"contains another run: input_digests\[0\] was"):
        run(settings(lines), tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_a_finished_run_is_not_repeated(lines, tmp_path):
    first = run_in_process(settings(lines), tmp_path / "run")
    assert run(settings(lines), tmp_path / "run") == first
    assert not (tmp_path / "run/timings.jsonl").exists(), "no worker processed a chunk"


@pytest.mark.parametrize("limit", [None, 14, 100_000])
def test_the_progress_share_counts_only_rows_within_the_limit(lines, rows, tmp_path, limit):
    run_in_process(settings(lines, limit=limit), tmp_path / "run")
    shown = []
    run(settings(lines, limit=limit), tmp_path / "run", show=lambda done, _: shown.append(done))
    begin, *steps, end = shown
    assert (begin.rows, begin.share, end.share) == (0, 0, 1), "a bar is drawn before the first row is done"
    assert steps[-1].share == pytest.approx(1)
    if limit == 14:
        assert [(done.rows, done.share) for done in steps] == [(7, 0.5), (14, 1)]
        return
    for done in steps:
        assert done.share == pytest.approx(done.rows / len(rows), abs=0.25)


def test_timings_that_cannot_be_written_end_the_run_with_a_storage_error(tmp_path):
    given_settings = settings(written(tmp_path / "rows.jsonl", [{"text": "a"}]))
    (tmp_path / "run").mkdir()
    Run.of(given_settings, tmp_path / "run").begin(tmp_path / "run")
    (tmp_path / "run/timings.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"timings\.jsonl cannot be written: No space left on device"):
        run(given_settings, tmp_path / "run")


def test_a_second_run_in_the_same_folder_is_refused(lines, tmp_path):
    refused = []

    def show(*_):
        if not refused:
            done = tokenize(lines, "--output", tmp_path / "run", "--shard-rows", 7)
            refused.append(done)

    run(settings(lines), tmp_path / "run", show=show)
    assert refused[0].returncode == 2
    assert f"another run is using {tmp_path / 'run'}" in refused[0].stderr


def test_a_run_that_is_killed_and_resumed_writes_the_same_bytes(lines, tmp_path):
    run_in_process(settings(lines), tmp_path / "whole")
    command = [
        CLI,
        "tokenize",
        lines,
        "--output",
        tmp_path / "run",
        "--shard-rows",
        7,
        "--workers",
        2,
        "--json-progress",
    ]
    with (tmp_path / "said").open("w") as output:
        process = warm.Popen(list(map(str, command)), stdout=output, stderr=output)
    arrays = tmp_path / "run/shard-000000014.safetensors"
    workers: list[psutil.Process] = []
    while process.poll() is None and not arrays.exists():
        time.sleep(0.001)
    workers = psutil.Process(process.pid).children() if process.poll() is None else []
    process.kill()
    process.wait()
    psutil.wait_procs(workers, timeout=300)
    assert not any(worker.is_running() for worker in workers), "workers end with their parent"
    assert not (tmp_path / "run/manifest.json").exists()
    run_in_process(settings(lines), tmp_path / "run")
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_ends_with_a_message_on_a_full_disk_and_can_be_continued(lines, tmp_path):
    disk, out = tmp_path / "disk", tmp_path / "disk/run"
    disk.mkdir()
    steps = (
        'mount -t tmpfs -o size=20m tmpfs "$1" && head -c 20365312 /dev/zero > "$1/filler" || exit 99',
        '"$2" tokenize "$3" --output "$4" --shard-rows 7 --workers 1; [ $? = 3 ] || exit 98',
        'rm "$1/filler"',
        '"$2" tokenize "$3" --output "$4" --shard-rows 7 --workers 1; [ $? = 1 ] || exit 97',
        'mkdir "$5" && cp "$4"/* "$5"',
    )
    script = ("sh", "-c", "\n".join(steps), "sh", *map(str, (disk, CLI, lines, out, tmp_path / "copy")))
    own_mounts = (*UNSHARE, "--mount")
    require(own_mounts)
    done = subprocess.run([*own_mounts, *script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert done.stderr.count("Fix that, then run the same command again to continue") == 1
    run_in_process(settings(lines), tmp_path / "whole")
    assert content(tmp_path / "copy") == content(tmp_path / "whole")


def runs(process):
    """Return whether the process still runs. A zombie does not count as running."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_to_the_process_group_ends_a_starting_worker(sent, status, tmp_path):
    rows = written(tmp_path / "rows.jsonl", [{"text": "a"}])
    command = [CLI, "tokenize", rows, "--output", tmp_path / "run", "--workers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not (workers := psutil.Process(process.pid).children()):
            assert process.poll() is None
            time.sleep(0.001)
        os.killpg(process.pid, sent)
        assert process.wait(300) == status
        wait_until(lambda: not any(map(runs, workers)))
    finally:
        process.kill()
        process.wait()
    assert run_in_process(settings(rows, shard_rows=128), tmp_path / "run").num_rows == 1


def test_an_interrupt_while_waiting_for_standard_input_leaves_no_folder(tmp_path):
    command = [CLI, "tokenize", "-", "--output", tmp_path / "run"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "run/input-000.jsonl.partial").exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)[1]
        assert b"Interrupted: run the same command again to continue. It keeps the finished rows, and repeats" in said
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "run").exists(), "the run has not begun"


def test_an_interrupt_ends_a_run_whose_worker_waits_for_a_file(tmp_path):
    fifo = tmp_path / "never.jpg"
    os.mkfifo(fifo)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"inputs": [{"image": "never.jpg"}]}\n')
    with (tmp_path / "said").open("w") as output:
        command = [CLI, "tokenize", str(rows), "--output", str(tmp_path / "run")]
        process = warm.Popen(command, stdout=output, stderr=output)
    try:
        with fifo.open("wb"):  # returns as soon as the worker opens the pipe
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
    finally:
        process.kill()
        process.wait()
    fifo.unlink()
    fifo.write_bytes(encoded(photograph(size=(80, 60))))
    assert run_in_process(settings(rows, shard_rows=128), tmp_path / "run").num_errors == 0


def test_a_worker_ends_quietly_when_the_run_closes_its_channel(tmp_path):
    given_settings = settings(written(tmp_path / "rows.jsonl", [{"text": "a"}]))
    Run.of(given_settings, tmp_path).begin(tmp_path)
    ours, theirs = socket.socketpair()
    ours.close()
    with RowCursor.create() as cursor, ipc.ChildChannel(theirs.detach()) as channel:
        process.main(channel, None, msgspec.json.encode(Address(str(tmp_path))).decode(), cursor.path)


def test_an_internal_error_exits_with_status_3_and_a_traceback(capsys):
    with pytest.raises(SystemExit) as ended, resuming():
        raise ZeroDivisionError
    assert (ended.value.code, "ZeroDivisionError" in capsys.readouterr().err) == (3, True)


class KilledStarts(threading.Thread):
    """A thread that kills `deaths` workers while they start. A start takes seconds."""

    def __init__(self, deaths):
        super().__init__()
        self._deaths = deaths
        self.start()

    def run(self):
        killed = set()
        while len(killed) < self._deaths:
            for worker in {*psutil.Process().children()} - killed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "mindie_mm.batch.batch_process" in worker.cmdline():
                        worker.kill()
                        killed.add(worker)
            time.sleep(0.001)


@pytest.mark.slow
def test_rows_of_workers_killed_during_their_start_go_to_other_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(ipc, "subprocess", subprocess)  # workers that are copies would be ready before they are killed
    path = written(tmp_path / "rows.jsonl", [{"text": f"row {i}"} for i in range(22)])
    killed_starts = KilledStarts(2)
    manifest = run(settings(path), tmp_path / "run", num_workers=2)
    assert (manifest.num_rows, manifest.num_errors) == (22, 0)
    killed_starts.join(300)
    killed_starts = KilledStarts(2)
    with pytest.raises(ProcessDied, match="a worker exited with signal 9 before it was ready"):
        run(settings(path), tmp_path / "again", num_workers=1)
    killed_starts.join(300)


def test_killed_workers_lose_only_the_rows_they_worked_on(media, rows, tmp_path, monkeypatch):
    spawned, spawn = [], ipc.spawn

    def noted(module, *arguments, **options):
        process, ours = spawn(module, *arguments, **options)
        spawned.append(process.pid)
        return process, ours

    monkeypatch.setattr(ipc, "spawn", noted)
    fifos = {deaths: media / f"deadly-{deaths}.jpg" for deaths in (1, 2)}
    for row, deaths in ((2, 1), (12, 2)):
        rows.insert(row, {"id": f"killed {deaths}", "inputs": [{"image": fifos[deaths].name}]})
    path = written(media / "deadly.jsonl", rows)
    deadly = {deaths: Deadly(fifo, deaths, spawned) for deaths, fifo in fifos.items()}
    manifest = run(settings(path), tmp_path / "run", num_workers=2)
    for deaths, fifo in fifos.items():
        deadly[deaths].join()
        fifo.unlink()
    errors = {sample.id: sample.error for sample in Dataset(tmp_path / "run")}
    assert errors["killed 1"] is None
    how = (
        "the worker exited twice with signal 9 at this row. When the worker exited the second time, it was "
        "processing only this row"
    )
    assert errors["killed 2"] == f"ProcessDied: {how}"
    assert manifest.num_errors == len(BAD) + 1
    assert deadly[2].alone[1:] == [True]
