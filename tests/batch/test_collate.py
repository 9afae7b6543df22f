"""Tests for batches for trainers, made from a finished run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mindie_mm.batch import Dataset
from mindie_mm.errors import InputError
from tests.batch.conftest import run_in_process, settings, written
from tests.media_samples import encoded, photograph


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return a run with a conversation about an image, another without media, and a text."""
    here = tmp_path_factory.mktemp("conversations")
    (here / "a.png").write_bytes(encoded(photograph(size=(90, 120)), "PNG"))
    question = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]
    turns = [("user", question), ("assistant", "A red square."), ("user", "And?"), ("assistant", "Blue.")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in own], "add_generation_prompt": False}
        for own in (turns, [("user", "Hello"), ("assistant", "Hi!")])
    ]
    rows.append({"text": "Words.", "chat": False})
    run_in_process(settings(written(here / "rows.jsonl", rows), assistant_spans=True, chat=False), here / "run")
    return Dataset(here / "run")


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_batch_has_the_samples_inputs_and_labels(dataset: Dataset, padding: str) -> None:
    samples = dataset[:2]
    batch = dataset.collate(samples, padding=padding, labels="assistant")
    for index, sample in enumerate(samples):
        own = batch["attention_mask"][index].bool()
        assert batch["input_ids"][index][own].tolist() == sample.ids.tolist()
        labels = torch.full((len(sample.ids),), -100)
        for start, stop in sample.assistant:
            labels[start:stop] = torch.from_numpy(sample.ids[start:stop])
        assert batch["labels"][index][own].tolist() == labels.tolist()
        assert (batch["labels"][index][~own] == -100).all()
        assert own[-1 if padding == "left" else 0]
    assert torch.equal(batch["pixel_values"], samples[0].model_inputs()["pixel_values"])
    everything = dataset.collate(samples, labels="all")["labels"]
    of_media = sum(span.stop + span.tail - span.start + span.lead for sample in samples for span in sample.spans)
    counted = sum(len(sample.ids) for sample in samples) - of_media - len(samples)
    assert (everything != -100).sum() == counted, "nothing precedes the first token of a sample"


def test_samples_are_packed_with_the_positions_of_their_own_rows(dataset: Dataset) -> None:
    """The first axis counts the tokens of each sample. The others are those of the model for unpacked samples."""
    samples = [dataset[1], dataset[0], dataset[2]]
    lengths = [len(sample.ids) for sample in samples]
    size = lengths[0] + lengths[1] + 1
    batch = dataset.collate(samples, labels="all", packing=size)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, size)
    assert batch["position_ids"].shape == (4, 2, size)
    assert (batch["use_cache"], "attention_mask" in batch) == (False, False)
    assert torch.equal(batch["pixel_values"], samples[1].model_inputs()["pixel_values"])
    unpacked = dataset.collate(samples, labels="all")
    start = 0
    for index, (row, length) in enumerate(zip((0, 0, 1), lengths, strict=True)):
        own = slice(start, start + length)
        for name in ("input_ids", "labels"):
            assert batch[name][row, own].tolist() == unpacked[name][index, :length].tolist()
        assert batch["position_ids"][0, row, own].tolist() == [*range(length)]
        start = 0 if index == 1 else start + length
    image = batch["position_ids"][1:, 0, lengths[0] : -1]
    assert not torch.equal(image[0], image[1]), "an image has positions on two axes"


def test_wrong_batches_are_refused(dataset: Dataset) -> None:
    with pytest.raises(InputError, match=r"turns of row 2 are not known.* --assistant-spans"):
        dataset.collate(dataset[:], labels="assistant")
    with pytest.raises(InputError, match=r"a sample has \d+ tokens, but packing is 9, the number of tokens of a row"):
        dataset.collate(dataset[:], packing=9)
    with pytest.raises(InputError, match="packing=-1 must be a number of tokens, or 0"):
        dataset.collate(dataset[:], packing=-1)
    with pytest.raises(InputError, match="padding='top' must be left or right"):
        dataset.collate(dataset[:], padding="top")
    with pytest.raises(InputError, match="samples is empty; it must have at least one"):
        dataset.collate([])
    with pytest.raises(InputError, match="labels='none' must be assistant, all or None"):
        dataset.collate(dataset[:], labels="none")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"samples": [1, 2]}, r"samples\[0\] is of type int; it must be a sample of a Dataset"),
        ({"samples": "ab"}, r"samples\[0\] is of type str"),
        ({"samples": 7}, "samples is of type int; it must be a list of samples"),
        ({"samples": []}, "samples is empty"),
        ({"packing": 64.0}, "packing=64.0 must be a number of tokens"),
        ({"packing": "64"}, "packing='64' must be a number of tokens"),
        ({"packing": None}, "packing=None must be a number of tokens"),
        ({"packing": True}, "packing=True must be a number of tokens"),
        ({"padding": np.zeros(2)}, "padding=.* must be left or right"),
        ({"padding": 1}, "padding=1 must be left or right"),
        ({"labels": ["all"]}, r"labels=\['all'\] must be assistant, all or None"),
        ({"labels": np.zeros(2)}, "labels=.* must be assistant, all or None"),
    ],
)
def test_arguments_of_another_type_are_refused(dataset: Dataset, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        dataset.collate(**{"samples": dataset[:2], **wrong})
    assert dataset.collate(iter(dataset[:2]), packing=np.int64(64))["input_ids"].shape == (1, 64)
