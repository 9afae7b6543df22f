"""Tests for options of the commands: each case shows an effect of its option on the output."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mindie_mm.batch import Dataset, tokenizing
from mindie_mm.batch.output.sample import Sample
from mindie_mm.batch.run import run_batch
from mindie_mm.batch.settings import Settings
from mindie_mm.cli import main
from mindie_mm.errors import InputError
from tests.batch.conftest import write_shards, written
from tests.media_samples import encoded, photograph

FILMS = Path(__file__).parents[1] / "cases/films"
IMAGE = base64.b64encode(encoded(photograph(size=(60, 40)), "PNG")).decode()
LONG, SPECIAL, IMAGE_IN_TEXT, HDR, TRANSPARENT = range(5)
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": role, "content": "Words, many words. " * 9} for role in ("user", "assistant", "user")]},
    {"text": "<|im_start|>"},
    {"text": f'What is <img src="data:image/png;base64,{IMAGE}">?'},
    {"video": str(FILMS / "hlg_orange.mp4"), "text": "What moves?"},
    {"video": str(FILMS / "transparent.mov"), "text": "What moves?"},
]


def invoked(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.fixture
def tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """Return a function that runs `tokenize` with options over the rows. This process does the work of the workers."""

    def in_this_process(settings: Settings, output: Path, **others: Any) -> Any:
        write_shards(settings, output)
        return run_batch(settings, output, **others)

    monkeypatch.setattr(tokenizing, "run_batch", in_this_process)
    rows = written(tmp_path / "rows.jsonl", ROWS)

    def run(*options: object) -> Dataset:
        folder = tmp_path / f"run-{len(options)}"
        done = invoked("tokenize", rows, "--output", folder, "--no-chat-template", *options)
        assert done.exit_code in (0, 1), done.output
        return Dataset(folder)

    return run


def changed(now: Dataset, was: Dataset) -> list[int]:
    """Return the films whose pixels differ."""
    pixels = [[run[row].arrays[0]["pixel_values_videos"].tolist() for run in (now, was)] for row in (HDR, TRANSPARENT)]
    return [row for row, (one, other) in zip((HDR, TRANSPARENT), pixels, strict=True) if one != other]


def counted(run: Dataset) -> list[object]:
    """Return what a plan has of each row: ids, places and digests."""
    records = [run.record(row) for row in range(len(run))]
    return [(None if row.input_ids is None else row.input_ids.tolist(), row.spans, row.digests) for row in records]


def has_arrays(sample: Sample) -> bool:
    return any(map(bool, sample.arrays))


EFFECTS: dict[str, tuple[tuple[object, ...], Callable[[Dataset, Dataset], bool]]] = {
    "shard-bytes": (("--shard-bytes", 1), lambda now, was: len(now.manifest.shards) > len(was.manifest.shards)),
    "max-tokens": (("--max-tokens", 100), lambda now, was: "100" in str(now[LONG].error) and was[LONG].error is None),
    "truncate": (
        ("--max-tokens", 100, "--truncate"),
        lambda now, was: now[LONG].error is None and len(now[LONG].ids) <= 100 < len(was[LONG].ids),
    ),
    "parse-special": (
        ("--parse-special", "off"),
        lambda now, was: len(now[SPECIAL].ids) > 1 == len(was[SPECIAL].ids),
    ),
    "webui-images": (
        ("--webui-images",),
        lambda now, was: (len(now[IMAGE_IN_TEXT].spans), len(was[IMAGE_IN_TEXT].spans)) == (1, 0),
    ),
    "family": (("--family", "qwen2_5_omni"), lambda now, was: now.manifest.run.settings.family == "qwen2_5_omni"),
    "hdr-to-sdr": (("--no-hdr-to-sdr",), lambda now, was: changed(now, was) == [HDR]),
    "rgba-background-color": (
        ("--rgba-background-color", 0, 128, 0),
        lambda now, was: changed(now, was) == [TRANSPARENT],
    ),
    "max-video-frames": (
        ("--max-video-frames", 2),
        lambda now, was: "the limit is 2" in str(now[HDR].error) and was[HDR].error is None,
    ),
    "limit-mm-per-prompt": (
        ("--limit-mm-per-prompt", "video=0"),
        lambda now, was: "video" in str(now[HDR].error) and now[LONG].error is None,
    ),
    "plan": (("--plan",), lambda now, was: counted(now) == counted(was) and not any(map(has_arrays, now))),
    "limit": (("--limit", 2), lambda now, was: (len(now), len(was)) == (2, len(ROWS))),
}


@pytest.mark.parametrize("option", EFFECTS)
def test_an_option_of_tokenize_has_its_effect(option: str, tokenized: Callable[..., Dataset]) -> None:
    given, has_effect = EFFECTS[option]
    was = tokenized()
    assert has_effect(tokenized(*given), was)
    assert not has_effect(was, was)


def test_a_model_does_not_run_on_a_plan(tokenized: Callable[..., Dataset], tmp_path: Path) -> None:
    planned = tokenized("--plan")
    done = invoked("generate", "--tokenized", planned.folder, "--output", tmp_path / "answers.jsonl")
    assert (done.exit_code, "has no media, because it was tokenized with --plan" in done.output) == (2, True), (
        done.output
    )
    shown = invoked("inspect", planned.folder, HDR)
    assert (shown.exit_code, "planned, without arrays" in shown.output) == (0, True), shown.output
    with pytest.raises(InputError, match="has no arrays, because its run was tokenized with --plan"):
        planned[HDR].model_inputs()


def test_an_unknown_family_and_a_folder_that_is_not_empty_are_refused(
    tokenized: Callable[..., Dataset], tmp_path: Path
) -> None:
    tokenized()
    common = ("tokenize", tmp_path / "rows.jsonl", "--output", tmp_path / "run-0", "--no-chat-template")
    again = invoked(*common, "--no-resume")
    assert (again.exit_code, "is not empty; --no-resume needs an empty folder" in again.output) == (2, True)
    assert invoked(*common, "--resume").exit_code == 0
    wrong = invoked(*common[:3], tmp_path / "other", "--family", "no_such_family")
    assert (wrong.exit_code != 0, "no_such_family" in wrong.output) == (True, True)


@pytest.mark.slow
def test_the_source_of_sampling_parameters_and_the_limit_of_generate(
    tokenized: Callable[..., Dataset], tmp_path: Path
) -> None:
    folder, stated, output = tokenized("--limit", 3).folder, tmp_path / "stated", tmp_path / "answers.jsonl"
    stated.mkdir()
    (stated / "generation_config.json").write_text(json.dumps({"top_k": 7, "top_p": 0.25}))
    command = ("generate", "--tokenized", folder, "--output", output, "--max-tokens", 1, "--limit", 2)
    done = invoked(*command, "--generation-config", stated)
    assert (done.exit_code, len(output.read_bytes().splitlines())) == (0, 2), done.output
    other = invoked(*command, "--generation-config", "vllm")
    differences = "top_p was 0.25 and is now 1.0; top_k was 7 and is now 0."
    assert (other.exit_code, differences in other.output) == (2, True), other.output


def test_answers_cannot_be_written_to_a_store(tmp_path: Path) -> None:
    refused = invoked("generate", "--tokenized", tmp_path, "--output", "s3://bucket/answers.jsonl")
    assert (refused.exit_code, "is a URL; give the path of a local file or folder" in refused.output) == (2, True)
