"""Tests that steps of trainers on batches of a run equal steps on the output of transformers' processors.

Packed batches contain several samples in a row, and the processor's batches one sample in a row.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from mindie_mm.batch import Dataset
from mindie_mm.errors import InputError
from tests.batch.conftest import run_in_process, settings, written
from tests.media_samples import encoded
from tests.models import test_gemma3, test_llava, test_molmo2, test_qwen2_vl
from tests.models.contract import FamilyContract, noise
from tests.models.references import Reference

FAMILIES = (
    test_qwen2_vl.TestQwen2VL,
    test_llava.TestLlava,
    test_molmo2.TestMolmo2,
    test_gemma3.TestGemma3,
)
PACKED_FAMILIES = tuple(family for family in FAMILIES if family is not test_molmo2.TestMolmo2)
TEXTS = ("What is in the image? A square, perhaps.", "Where?", "Is there a circle in it?")

pytestmark = pytest.mark.slow


def families(*families: type[FamilyContract]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


class Rows:
    """A run over three rows with images, and the reference of its checkpoint."""

    def __init__(self, family: type[FamilyContract], folder: Path) -> None:
        (folder / "checkpoint").mkdir()
        family.write_checkpoint(folder / "checkpoint")
        self.reference: Reference = family.make_reference(folder / "checkpoint")
        self.items = [[{"image": noise(40, 60 + row)}, {"text": text}] for row, text in enumerate(TEXTS)]
        rows = []
        for row, (image, text) in enumerate(self.items):
            (folder / f"{row}.png").write_bytes(encoded(Image.fromarray(image["image"]), "PNG"))
            rows.append({"inputs": [{"image": f"{row}.png"}, text]})
        source = written(folder / "rows.jsonl", rows)
        own = msgspec.structs.replace(settings(source, chat=False), model=str(folder / "checkpoint"))
        run_in_process(own, folder / "run")
        self.dataset = Dataset(folder / "run")

    def from_processor(self, rows: list[int]) -> dict[str, torch.Tensor]:
        """Return the processor's batch, with labels for the tokens that are neither padding nor of an image."""
        processor = self.reference.processor
        processor.tokenizer.padding_side = "right"
        batch = processor(
            text=[self.reference.text(self.items[row]) for row in rows],
            images=[[Image.fromarray(self.items[row][0]["image"])] for row in rows],
            padding=True,
            return_tensors="pt",
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for index, row in enumerate(rows):
            for span in self.dataset[row].spans:
                labels[index, span.start - span.lead : span.stop + span.tail] = -100
        return {**batch, "labels": labels}

    def from_run(self, rows: list[int]) -> dict[str, torch.Tensor]:
        return self.dataset.collate([self.dataset[row] for row in rows], labels="all")

    def packed(self, rows: list[int]) -> dict[str, torch.Tensor]:
        """Return a batch of two rows. The first row has two samples, and the second row has a sample and padding."""
        samples = [self.dataset[row] for row in rows]
        size = len(samples[0].ids) + samples[0].model.processor().traits.packs_apart + len(samples[1].ids)
        batch = self.dataset.collate(samples, labels="all", packing=size)
        assert batch["input_ids"].shape == (2, size)
        return batch


@pytest.fixture
def rows(family: type[FamilyContract], tmp_path: Path) -> Rows:
    return Rows(family, tmp_path)


def stepped(rows: Rows, collate: Any, make: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step of gradient descent, and the weights after the step."""
    model = copy.deepcopy(rows.reference.model)
    trainer = make(rows, model=model, data_collator=collate)
    loss = trainer.train().training_loss
    return loss, model.state_dict()


OPTIONS = {
    "max_steps": 1,
    "per_device_train_batch_size": len(TEXTS),
    "optim": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "remove_unused_columns": False,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


def of_transformers(folder: Path, rows: Rows, **given: Any) -> Any:
    from transformers import Trainer, TrainingArguments  # a third of a second

    pytest.importorskip("accelerate")
    examples = [{"row": row} for row in range(len(rows.dataset))]
    return Trainer(args=TrainingArguments(str(folder), **OPTIONS), train_dataset=examples, **given)


def of_trl(folder: Path, rows: Rows, **given: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    options = {**OPTIONS, "bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    return trl.SFTTrainer(
        args=trl.SFTConfig(str(folder), **options),
        train_dataset=datasets.Dataset.from_dict({"row": list(range(len(rows.dataset)))}),
        processing_class=rows.reference.processor,
        **given,
    )


def assert_same_steps(rows: Rows, collate: Any, make: Any) -> None:
    """Compare with a step on the processor's output, whose samples are not packed."""
    loss, weights = stepped(rows, lambda batch: collate(sorted(one["row"] for one in batch)), make)
    expected, theirs = stepped(rows, lambda batch: rows.from_processor(sorted(one["row"] for one in batch)), make)
    assert loss == pytest.approx(expected, rel=1e-6)
    before, changed = rows.reference.model.state_dict(), 0
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6, msg=name)
        changed += not torch.equal(weight, before[name])
    assert changed > 10


TRAINERS = pytest.mark.parametrize("trainer", [of_transformers, of_trl], ids=["transformers", "TRL"])


@families(*FAMILIES)
@TRAINERS
def test_steps_on_batches_of_a_run_equal_those_on_the_processors_output(
    rows: Rows, trainer: Any, tmp_path: Path
) -> None:
    assert_same_steps(rows, rows.from_run, partial(trainer, tmp_path / "out"))


@families(*PACKED_FAMILIES)
@TRAINERS
def test_steps_on_packed_batches_equal_those_on_the_processors_output(rows: Rows, trainer: Any, tmp_path: Path) -> None:
    assert_same_steps(rows, rows.packed, partial(trainer, tmp_path / "out"))


@families(*FAMILIES)
def test_packed_samples_have_their_own_logits_or_packing_is_refused(rows: Rows) -> None:
    samples = rows.dataset[:2]
    model, size = rows.reference.model, sum(len(sample.ids) for sample in samples) + 3
    if why := samples[0].model.processor().traits.not_packed:
        with pytest.raises(InputError, match=why):
            rows.dataset.collate(samples, packing=size)
        return
    packed = rows.dataset.collate(samples, labels="all", packing=size)
    assert packed["input_ids"].shape == (1, size)
    starts = [0, len(samples[0].ids) + samples[0].model.processor().traits.packs_apart]
    with torch.inference_mode():
        logits = model(**packed).logits[0]
        for sample, start in zip(samples, starts, strict=True):
            expected = model(**sample.model_inputs()).logits[0]
            assert (logits[start : start + len(sample.ids)] - expected).abs().max() <= 1e-4
    with pytest.raises(InputError, match=r"a sample has \d+ tokens, but packing is 9"):
        rows.dataset.collate(samples, packing=9)
