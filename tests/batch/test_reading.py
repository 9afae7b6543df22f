"""Tests that read a finished run: as a dataset, as Parquet and safetensors files, with `generate` and `inspect`."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import pickle
import random
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.utils.data import DataLoader

from mindie_mm.batch import Dataset
from mindie_mm.batch.output.shard import read_table
from mindie_mm.cli import main
from mindie_mm.errors import InputError
from mindie_mm.models import family_named, load_model
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from tests import warm
from tests.batch.conftest import CLI, run_in_process, settings, written
from tests.media_samples import encoded, photograph


@pytest.fixture
def folder(eight_rows: Path) -> Path:
    return eight_rows


@pytest.fixture
def linked(folder: Path, tmp_path: Path) -> Path:
    """Return a folder that contains a link to each file of the run."""
    (tmp_path / "linked").mkdir()
    for file in folder.iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    return tmp_path / "linked"


def test_a_dataset_is_a_sequence(folder: Path) -> None:
    dataset = Dataset(folder)
    assert [sample.id for sample in dataset] == ["r0", "r1", "r2", "r3", "4", "5", "6", "7"]
    assert dataset[-1].row == 7
    assert [sample.row for sample in dataset[1:4]] == [1, 2, 3]
    assert "gone.png" in dataset[2].error
    with pytest.raises(IndexError, match="there is no row 8; the data set has 8 rows"):
        dataset[8]
    with pytest.raises(InputError, match=r"does not contain a finished run: there is no manifest\.json"):
        Dataset(folder.parent)


def test_a_dataset_survives_a_change_of_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    dataset = Dataset(folder.name)
    monkeypatch.chdir("/")
    assert dataset[0].ids is not None


def test_a_run_can_be_read_through_links(folder: Path, linked: Path) -> None:
    for found, own in zip(Dataset(linked), Dataset(folder), strict=True):
        for arrays, expected in zip(found.arrays, own.arrays, strict=True):
            assert all(np.array_equal(arrays[name], expected[name]) for name in expected)


def test_tables_are_read_once_in_any_order(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = written(tmp_path / "rows.jsonl", [{"text": f"Row {row}"} for row in range(20)])
    run_in_process(settings(rows, shard_rows=1), tmp_path / "run")
    read: list[Path] = []

    def counted(path: Path, num_rows: int) -> pa.Table:
        read.append(path)
        return read_table(path, num_rows)

    monkeypatch.setattr("mindie_mm.batch.output.dataset.read_table", counted)
    dataset = Dataset(tmp_path / "run")
    for row in (*range(20), *range(0, 20, 3), *range(19, -1, -1)):
        assert dataset[row].row == row
    assert len(read) == 20
    monkeypatch.setattr("mindie_mm.batch.output.dataset._TABLE_BYTES", 1)
    few = Dataset(tmp_path / "run")
    assert [few[row].row for row in (3, 3, 4, 3)] == [3, 3, 4, 3]
    assert len(read) == 23, "only one table stays in memory"


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on a machine with one core
def test_data_loader_workers_can_read_a_dataset(folder: Path) -> None:
    dataset = Dataset(folder)
    dataset[0]
    assert pickle.loads(pickle.dumps(dataset))[0].ids.tolist() == dataset[0].ids.tolist()
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list, multiprocessing_context="forkserver")
    samples = [sample for batch in loader for sample in batch]
    for found, own in zip(samples, dataset, strict=True):
        assert found.id == own.id
        for arrays, expected in zip(found.arrays, own.arrays, strict=True):
            assert all(np.array_equal(arrays[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def many(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with 20 shards of one row each."""
    folder = tmp_path_factory.mktemp("many")
    rows = [{"inputs": [{"image": str(media / f"{row % 10}.jpg")}]} for row in range(20)]
    run_in_process(settings(written(folder / "rows.jsonl", rows), shard_rows=1), folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_threads_can_share_a_dataset(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads open the same shards while the dataset evicts other shards."""
    whole = list(Dataset(many))
    monkeypatch.setattr(
        "mindie_mm.batch.output.dataset._TABLE_BYTES", 3 * read_table(next(many.glob("*.parquet")), 1).nbytes
    )
    dataset = Dataset(many)
    chosen = random.Random(0).choices(range(len(dataset)), k=1500)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            for row, sample in zip(chosen, threads.map(dataset.__getitem__, chosen), strict=True):
                assert (sample.row, sample.ids.tolist()) == (row, whole[row].ids.tolist())
                assert np.array_equal(sample.arrays[0]["pixel_values"], whole[row].arrays[0]["pixel_values"])
    finally:
        sys.setswitchinterval(before)


def test_a_forked_child_can_read_while_a_thread_of_the_parent_holds_the_lock(many: Path) -> None:
    """A DataLoader may fork while another thread of the trainer reads and therefore holds the lock."""
    dataset = Dataset(many)
    with dataset._lock:  # as a thread of the parent does while it reads
        child = multiprocessing.get_context("fork").Process(target=dataset.__getitem__, args=(3,))
        child.start()
        child.join(60)
        hangs = child.is_alive()
        child.kill()
    assert (hangs, child.exitcode) == (False, 0)
    assert copy.copy(dataset)[3].row == 3, "a copy has its own lock"


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_samples_hold_no_file_descriptors(many: Path) -> None:
    """A shuffle buffer may contain thousands of samples, but a process may often have only 1,024 descriptors."""
    gc.collect()  # errors of other tests keep files open
    dataset = Dataset(many)
    gc.collect()  # other tests may have left objects that hold descriptors
    before = descriptors()
    kept = list(dataset)
    assert descriptors() - before <= 8
    del dataset
    gc.collect()
    assert descriptors() <= before
    assert [sample.arrays[0]["pixel_values"].any() for sample in kept] == [True] * 20
    assert not any(sample.arrays[0]["pixel_values"].flags.writeable for sample in kept)
    run = str(many).encode()
    assert Path("/proc/self/maps").read_bytes().count(run) >= 20
    del kept
    gc.collect()
    assert Path("/proc/self/maps").read_bytes().count(run) == 0


def test_the_data_loader_example_of_the_documentation_works(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/batch.md").read_text()
    (example,) = [code for code in re.findall(r"(?ms)^```python\n(.*?)^```$", page) if "DataLoader" in code]
    names: dict[str, Any] = {"dataset": Dataset(folder)}
    exec(example.replace("num_workers=2", "num_workers=0"), names)
    (batch,) = names["loader"]
    assert batch["input_ids"].tolist()[3][:2] == Dataset(folder)[4].ids.tolist()[:2], "row 2 has failed"
    assert len(batch["labels"]) == 7


@pytest.mark.usefixtures("copied_workers")
def test_generate_answers_every_row_in_order_and_continues(folder: Path, linked: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    arguments = ["generate", "--tokenized", str(folder), "--output", str(output), "--max-tokens", "8"]
    done = warm.run([CLI, *arguments], timeout=300)
    assert (done.returncode, done.stdout) == (1, f"8 rows in {output}; 1 row failed\n"), done.stderr
    assert re.search(r"^8 rows, 1 failed, [\d.]+ rows/s, 100%", done.stderr, re.MULTILINE)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == ["r0", "r1", "r2", "r3", "4", "5", "6", "7"]
    assert [answer["row"] for answer in answers if "error" in answer] == [2]
    assert all(answer["text"] for answer in answers if "error" not in answer)
    whole = output.read_bytes()
    finished = CliRunner().invoke(main, [*arguments, "--device", "none"])
    assert (finished.exit_code, finished.stdout) == (1, done.stdout), "no engine is started if all rows have answers"
    failed = b'{"row":1,"id":"r1","error":"ProcessDied: the engine died"}\n'
    output.write_bytes(whole[: whole.index(b'{"row":1')] + failed + whole[whole.index(b'{"row":2') : -40])
    before = output.read_bytes()
    refused = CliRunner().invoke(main, [*arguments, "--limit", "3", "--retry-errors"])
    assert (refused.exit_code, "has 7 rows, but only 3 were requested" in refused.stderr) == (2, True), refused.stderr
    assert output.read_bytes() == before[: before.rindex(b"\n") + 1]
    by_links = ["generate", "--tokenized", str(linked), *arguments[3:]]
    gone_on = CliRunner().invoke(main, [*by_links, "--retry-errors"])
    assert gone_on.exit_code == 1, gone_on.output
    assert not output.with_name("out.jsonl.earlier").exists()
    assert output.read_bytes() == whole
    output.write_text("something else\n")
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert "line 1 is not the answer to row 0" in refused.stderr
    output.write_bytes(whole[: whole.index(b'{"row":4')].replace(b'"id":"r3"', b'"id":"s3"'))
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert "its row 3 has the id 's3', but the id in this run is 'r3'" in refused.stderr


def test_generate_refuses_to_append_to_answers_of_another_call(folder: Path, tmp_path: Path) -> None:
    """A file without an origin file is refused, too, and stays unchanged."""
    output, copy = tmp_path / "out.jsonl", tmp_path / "copy.jsonl"
    arguments = ["--output", str(output), "--max-tokens", "4", "--limit", "1"]
    assert CliRunner().invoke(main, ["generate", "--tokenized", str(folder), *arguments]).exit_code == 0
    before, origin = output.read_bytes(), json.loads(Path(f"{output}.origin.json").read_bytes())
    assert (origin["device"], origin["dtype"], origin["settings"]["weights"]) == ("cpu", "float32", "auto")
    same = CliRunner().invoke(main, ["generate", "--tokenized", str(folder), *arguments, "--dtype", "float32"])
    assert same.exit_code == 0, "auto has selected this data type"
    run_in_process(settings(folder.parent / "rows.jsonl", shard_rows=5), tmp_path / "run")
    copy.write_text("a line without an end")
    for other, differing in (
        (["--tokenized", str(tmp_path / "run"), *arguments], "out.jsonl has answers of another run: run was "),
        (
            ["--tokenized", str(folder), *arguments, "--max-tokens", "5"],
            "another run: max_tokens was 4 and is now 5. Choose",
        ),
        (
            ["--tokenized", str(folder), *arguments, "--dtype", "bfloat16"],
            "another run: dtype was float32 and is now bfloat16. Choose",
        ),
        (
            ["--tokenized", str(folder), *arguments, "--weights", "int8"],
            "was weights auto and is now weights int8. Choose",
        ),
        (["--tokenized", str(folder), *arguments, "--output", str(copy)], f"there is no {copy}.origin.json"),
        (["--tokenized", str(folder), *arguments, "--output", "-"], "is not supported, because an interrupted run"),
        (["--tokenized", str(folder), *arguments, "--temperature", "-1"], "temperature=-1.0 must be in"),
    ):
        refused = CliRunner().invoke(main, ["generate", *other])
        assert (refused.exit_code, differing in refused.stderr) == (2, True), refused.stderr
    assert output.read_bytes() == before
    assert copy.read_text() == "a line without an end"


@pytest.mark.slow
def test_answers_of_changed_rows_need_another_file(tmp_path: Path) -> None:
    """If a shard is rebuilt but its rows stay the same, `generate` continues the file."""
    rows = written(tmp_path / "rows.jsonl", [{"text": "Hello!"}, {"image": "late.png", "text": "What?"}])
    failed, well = run_in_process(settings(rows, shard_rows=1), tmp_path / "run").shards[::-1]
    arguments = ["generate", "--tokenized", str(tmp_path / "run"), "--max-tokens", "4", "--output"]
    first = CliRunner().invoke(main, [*arguments, str(tmp_path / "out.jsonl"), "--limit", "1"])
    assert first.exit_code == 0, first.output
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "run" / well.table).unlink()
    run_in_process(settings(rows, shard_rows=1), tmp_path / "run")
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "out.jsonl"), "--limit", "1"]).exit_code == 0
    (tmp_path / "late.png").write_bytes(encoded(photograph(size=(60, 40)), "PNG"))
    (tmp_path / "run" / failed.table).unlink()
    run_in_process(settings(rows, shard_rows=1), tmp_path / "run")
    refused = CliRunner().invoke(main, [*arguments, str(tmp_path / "out.jsonl")])
    assert (refused.exit_code, "out.jsonl has answers of another run: run was " in refused.stderr) == (2, True), (
        refused.output
    )
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_changed_checkpoint_is_refused(tmp_path: Path) -> None:
    """Checkpoints are compared by content and not by path."""
    checkpoint, moved, run = (tmp_path / name for name in ("checkpoint", "moved", "run"))
    shutil.copytree(EMBEDDED, checkpoint)
    rows = written(tmp_path / "rows.jsonl", [{"text": "Hello!"}])
    run_in_process(msgspec.structs.replace(settings(rows), model=str(checkpoint)), run)
    shutil.copytree(checkpoint, moved)
    config = checkpoint / "config.json"
    config.write_text(config.read_text() + "\n")

    generate = ["generate", "--tokenized", str(run), "--max-tokens", "4", "--output"]
    inspect = ["inspect", str(run), "0"]
    for command in (inspect, [*generate, str(tmp_path / "out.jsonl")]):
        refused = CliRunner().invoke(main, command)
        message = f"{checkpoint} is not the checkpoint that tokenized the rows: the digest"
        assert (refused.exit_code, message in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert CliRunner().invoke(main, ["inspect", str(run)]).exit_code == 0
    for option in (["--model", str(moved)], ["--other-model"]):
        shown = CliRunner().invoke(main, [*inspect, *option])
        assert (shown.exit_code, "Hello!" in shown.stdout) == (0, True), shown.output
    answers = []
    for name, *option in (("moved.jsonl", "--model", str(moved)), ("changed.jsonl", "--other-model")):
        done = CliRunner().invoke(main, [*generate, str(tmp_path / name), *option])
        assert done.exit_code == 0, done.stderr
        answers.append((tmp_path / name).read_text())
    assert answers[0] == answers[1]


def test_generate_uses_the_rows_own_checkpoint_despite_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(settings(written(tmp_path / "rows.jsonl", [{"text": "Hello!"}])), tmp_path / "run")
    monkeypatch.setenv("MINDIE_MM_MODEL", str(tmp_path / "none"))
    monkeypatch.setenv("MINDIE_MM_FAMILY", "llava")
    arguments = ["generate", "--tokenized", str(tmp_path / "run"), "--output", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(main, [*arguments, "--max-tokens", "2"])
    assert done.exit_code == 0, done.stderr


def test_inspect_shows_the_run_and_the_images_of_a_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inspect(*arguments: object) -> str:
        shown = CliRunner().invoke(main, ["inspect", str(folder), *map(str, arguments)])
        assert shown.exit_code == 0, shown.output
        return shown.stdout

    monkeypatch.chdir(tmp_path)
    assert inspect().startswith("8 rows, 1 failed, ")
    shown = inspect(5)
    assert "2 images; to write a PNG file of them, use --png FILE" in shown
    assert "Both?" in shown
    before = sorted(tmp_path.rglob("*"))
    assert "wrote 2 images to two.png" in inspect(5, "--png", "two.png")
    with Image.open(tmp_path / "two.png") as sheet:
        assert sheet.size == (2 * 256 + 3 * 8, 256 + 2 * 8)
    inspect(0, "--png", "one.png")
    with Image.open(tmp_path / "one.png") as sheet:
        assert len(sheet.getcolors(65536)) > 1000
    assert "failed: MediaError" in inspect(2)
    assert "video at tokens" in inspect(6, "--png", "six.png")
    with Image.open(tmp_path / "six.png") as sheet:
        assert sheet.size == (2 * 256 + 3 * 8, 2 * 256 + 3 * 8), "the page shows four frames"
    assert "audio at tokens" in inspect(7)
    assert "the row has no images" in inspect(7, "--png", "seven.png")
    written = {tmp_path / name for name in ("one.png", "two.png", "six.png")}
    assert {*tmp_path.rglob("*")} - {*before} == written, "no other file is written"


@pytest.mark.filterwarnings("error")
def test_samples_give_the_inputs_of_transformers_model(folder: Path, tmp_path: Path) -> None:
    """The inputs are arrays of their own, so that a trainer may change them. The model's logits are the engine's."""
    dataset, model = Dataset(folder), load_model(None, device="cpu", dtype="float32")
    reference = family_named("qwen2_5_omni").module_class().from_pretrained(EMBEDDED, dtype=torch.float32)
    with Tokenizer.from_pretrained() as tokenizer:
        for row, items in (
            (1, [{"type": "image", "image": str(folder.parent / "1.png")}, {"type": "text", "text": "What?"}]),
            (7, [{"type": "audio", "audio": str(folder.parent / "tone.wav")}, {"type": "text", "text": "What is it?"}]),
        ):
            sample = pickle.loads(pickle.dumps(dataset[row]))
            inputs = sample.model_inputs()
            ids = tokenizer.tokenize_chat([{"role": "user", "content": items}], tmp_path / "shm_name.txt")
            assert inputs["input_ids"].tolist() == [sample.ids.tolist()]
            with torch.inference_mode():
                logits = reference(**{name: array.clone() for name, array in inputs.items()}).logits[0]
            assert (logits - model.logits(ids)).abs().max() <= 1e-3
            for array in inputs.values():
                array.zero_()
            assert all(array.any() for array in sample.arrays[0].values())
        release(tmp_path / "shm_name.txt")
    with pytest.raises(InputError, match=r"row 2 has no ids, because it failed: .*gone\.png"):
        dataset[2].model_inputs()
