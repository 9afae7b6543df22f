"""Tests for conversations in the formats of common data sets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mindie_mm.batch import Dataset
from mindie_mm.batch.input.row import Row, parse
from mindie_mm.errors import InputError
from tests.batch.conftest import run_in_process, settings, tokenize, written
from tests.batch.test_forms import tabled
from tests.media_samples import encoded, photograph

IMAGE_BYTES = encoded(photograph(size=(60, 40)))
IMAGE = {"type": "image", "image": "a.png"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "A <image>."}
AGAIN = {"role": "user", "content": "Sure?"}
TALK = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "<image>\nWhat is this?"},
    {"from": "gpt", "value": "A <image>."},
    {"from": "human", "value": "Sure?"},
]
TEXTS = [{"user": "What is this?", "assistant": "A <image>.", "source": "x"}, {"user": "Sure?"}]


def asked(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]}


def parsed(row: Any, *, whole: bool = False) -> Row:
    return parse(json.dumps(row).encode(), Path("/data"), "", whole=whole)


CASES: dict[str, tuple[dict[str, Any], list[Any], int]] = {
    "LLaVA": ({"id": "1", "image": "a.png", "conversations": TALK}, [SYSTEM, asked(IMAGE), ANSWER, AGAIN], 2),
    "ShareGPT's system": (
        {"image": ["a.png"], "system": "Be brief.", "conversations": TALK[1:]},
        [SYSTEM, asked(IMAGE), ANSWER, AGAIN],
        2,
    ),
    "the_cauldron": ({"images": ["a.png"], "texts": TEXTS}, [asked(IMAGE), ANSWER, AGAIN], 1),
    "no place": (
        {"image": "a.png", "conversations": [{"from": "user", "value": "What is this?"}, *TALK[2:]]},
        [asked(IMAGE), ANSWER, AGAIN],
        1,
    ),
    "imagefolder": ({"file_name": "a.png", "texts": TEXTS}, [asked(IMAGE), ANSWER, AGAIN], 1),
    "TRL": (
        {"prompt": [{"role": "user", "content": "What is this?"}], "completion": [ANSWER, AGAIN], "images": ["a.png"]},
        [asked(IMAGE), ANSWER, AGAIN],
        1,
    ),
}


@pytest.mark.parametrize("form", CASES)
def test_a_conversation_is_the_chat_with_the_same_turns(form: str) -> None:
    row, messages, question = CASES[form]
    assert parsed(row) == parsed({"messages": messages[:question]})
    whole = parsed(row, whole=True)
    assert whole == parsed({"messages": messages}, whole=True)
    assert not whole.add_generation_prompt
    assert parsed({**row, "add_generation_prompt": True}, whole=True).add_generation_prompt


def test_places_of_several_media_keep_their_order() -> None:
    value = "First\n<image>\nthen <video>\nWhat is this?"
    row = {"image": "a.png", "video": "b.mp4", "conversations": [{"from": "human", "value": value}]}
    texts = [{"type": "text", "text": text} for text in ("First", "then ")]
    video = {"type": "video", "video": "b.mp4"}
    assert parsed(row) == parsed({"messages": [asked(texts[0], IMAGE, texts[1], video)]})


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"conversations": TALK}, "has 0 items of kind image, but its messages have places for 1"),
        ({"images": ["a.png"] * 2, "conversations": TALK}, "has 2 items of kind image, but .* places for 1"),
        ({"conversations": [{"from": "function_call", "value": ""}]}, "is from 'function_call' and has a value of"),
        ({"conversations": [{"from": "gpt"}]}, "has a value of type NoneType"),
        ({"texts": [{"question": "?"}]}, r"texts\[0\] has the keys \['question'\]; it must have strings"),
        ({"texts": TEXTS, "conversations": TALK}, r"\['conversations', 'texts'\], which conflict"),
        ({"texts": TEXTS, "messages": [AGAIN]}, r"\['texts', 'messages'\], which conflict"),
        ({"prompt": [AGAIN], "chosen": [ANSWER], "rejected": [ANSWER]}, "no completion of messages"),
        ({"conversations": [], "image": "a.png"}, "the row's conversations is an empty list; .* at least one turn"),
        ({"texts": []}, "the row's texts is an empty list"),
        ({"prompt": [], "completion": [ANSWER]}, "the row's prompt is an empty list"),
        ({"texts": ["What?"], "images": ["a.png"]}, "the row's texts is of type list; it must be a list of objects"),
        ({"conversations": "What?", "id": 1}, "the row's conversations is of type str"),
        ({"file_name": "a.xyz", "text": "What?"}, "file_name='a.xyz' must be the name of a media file"),
    ],
)
def test_a_conversation_that_cannot_be_whole_fails_its_row(row: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        parsed(row, whole=True)


def test_an_empty_conversation_beside_another_prompt_is_ignored() -> None:
    assert parsed({"conversations": [], "texts": [], "text": "a", "image": "a.png"}) == parsed(
        {"text": "a", "image": "a.png"}
    )


FIRST_ANSWERS: dict[str, dict[str, Any]] = {
    "conversations": {"conversations": TALK[2:]},
    "texts": {"texts": [{"assistant": "A <image>."}, {"user": "Sure?"}]},
}


@pytest.mark.parametrize("form", FIRST_ANSWERS)
def test_a_conversation_that_begins_with_an_answer_is_whole_or_fails_with_the_reason(form: str, tmp_path: Path) -> None:
    row = FIRST_ANSWERS[form]
    with pytest.raises(InputError, match=f"the row's {form} begin with an answer, so that no question comes before"):
        parsed(row)
    assert parsed(row, whole=True) == parsed({"messages": [ANSWER, AGAIN]}, whole=True)
    rows = written(tmp_path / "rows.jsonl", [row, {"messages": [AGAIN, ANSWER]}])
    run_in_process(settings(rows, whole_conversations=True, assistant_spans=True), tmp_path / "run")
    first, last = Dataset(tmp_path / "run")
    assert (first.error, last.error) == (None, None)
    ((start, stop),), ((other, end),) = first.assistant, last.assistant
    assert first.ids[start:stop].tolist() == last.ids[other:end].tolist(), "the same tokens as of a later answer"


def test_a_prompt_and_a_completion_without_roles_stay_texts_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGE_BYTES)
    pairs = [
        {"prompt": "The sky is", "completion": " blue.", "image": "a.png"},
        {"completion": " blue.", "prompt": "The sky is"},
        {"prompt": "ab", "completion": ""},
        {"prompt": "1", "completion": "\n"},
        {"prompt": "interna", "completion": "tional"},
    ]
    given = written(tmp_path / "pairs.jsonl", pairs)
    options = {"whole_conversations": True, "chat": False}
    run_in_process(settings(given, assistant_spans=True, **options), tmp_path / "run")
    texts = [{"image": row.get("image"), "text": row["prompt"] + row["completion"]} for row in pairs]
    run_in_process(settings(written(tmp_path / "texts.jsonl", texts), chat=False), tmp_path / "texts")
    prompts = [{**row, "completion": None} for row in pairs]
    run_in_process(settings(written(tmp_path / "prompts.jsonl", prompts), **options), tmp_path / "prompts")
    for sample, whole, prompt in zip(*(Dataset(tmp_path / name) for name in ("run", "texts", "prompts")), strict=True):
        if sample.row == 4:
            assert "the completion cannot be located, because the prompt's tokens from token " in str(sample.error)
            continue
        assert (sample.error, sample.ids.tolist()) == (None, whole.ids.tolist())
        assert [*map(tuple, sample.assistant)] == [(len(prompt.ids), len(whole.ids))]
    run_in_process(settings(given, whole_conversations=True), tmp_path / "chat")
    chat = written(
        tmp_path / "chat.jsonl",
        [{"messages": [{"role": "user", "content": "The sky is"}, {"role": "assistant", "content": " blue."}]}],
    )
    run_in_process(settings(chat, whole_conversations=True), tmp_path / "expected")
    assert Dataset(tmp_path / "chat")[1].ids.tolist() == Dataset(tmp_path / "expected")[0].ids.tolist()


def test_the_command_reads_an_array_of_whole_conversations(tmp_path: Path) -> None:
    """Texts that are spelled like a media token, in any turn, do not become one."""
    (tmp_path / "a.png").write_bytes(IMAGE_BYTES)
    spelled = "What is <image> and <|image_pad|>?"
    talk = [*TALK[1:3], {"from": "human", "value": "And <|image_pad|>?"}]
    rows: list[Any] = [{"image": "a.png", "conversations": talk}, {"text": "a\r", "note": [1.50]}]
    rows.append({"images": ["a.png"], "texts": [{"user": spelled, "assistant": spelled}]})
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=2))
    options = ("--workers", 1, "--whole-conversations", "--assistant-spans", "--keep-columns", "note")
    done = tokenize(tmp_path / "rows.json", "--output", tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr + (tmp_path / "run/errors.jsonl").read_text()
    samples = Dataset(tmp_path / "run")
    assert [len(sample.spans) for sample in samples] == [1, 0, 1]
    for sample in (samples[0], samples[2]):
        (span,) = sample.spans
        assert sample.ids is not None
        assert set((sample.ids == span.token).nonzero()[0]) <= {*range(span.start, span.stop)}
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress((tmp_path / "rows.json").read_bytes()))
    same = settings(
        tmp_path / "rows.json.gz", whole_conversations=True, assistant_spans=True, keep_columns={"note": ""}
    )
    assert run_in_process(same, tmp_path / "packed").run.input_digests == samples.manifest.run.input_digests


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_folder_with_metadata_gives_the_rows_of_its_table(form: str, tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    (media / "0.png").write_bytes(IMAGE_BYTES)
    rows = [{"file_name": name, "text": "What is this?", "label": 7} for name in ("0.png", "gone.png")]
    if form == "jsonl":
        written(media / "metadata.jsonl", rows)
    elif form == "csv":
        (media / "metadata.csv").write_text('file_name,text,label\n0.png,"What is this?",7\ngone.png,"a\nb",7\n')
    else:
        tabled(media / "metadata.parquet", rows)
    run_in_process(settings(media, keep_columns={"label": ""}), tmp_path / "run")
    sample, gone = Dataset(tmp_path / "run")
    assert (sample.error, len(sample.spans), sample.columns) == (None, 1, {"label": "7" if form == "csv" else 7})
    assert "there is no file" in str(gone.error), "a missing file fails its row only"
    run_in_process(settings(media, template="What is this?"), tmp_path / "listed")
    (listed,) = Dataset(tmp_path / "listed")
    assert (listed.id, listed.ids.tolist() == sample.ids.tolist()) == ("0.png", True)


def test_a_damaged_array_is_refused(tmp_path: Path) -> None:
    for data, why in (('[{"text": "a"}', "rows.json is not a JSON array of rows"), ("[NaN]", "it has NaN")):
        (tmp_path / "rows.json").write_text(data)
        with pytest.raises(InputError, match=why):
            run_in_process(settings(tmp_path / "rows.json"), tmp_path / "run")
    (tmp_path / "rows.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert run_in_process(settings(tmp_path / "rows.json"), tmp_path / "run").num_rows == 2
