"""Tests that steps of trainers on batches of a run equal steps on the output of transformers' processors."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers import Trainer, TrainingArguments

from mindie_mm.batch import Dataset
from mindie_mm.errors import InputError
from tests.batch.conftest import run_in_process, settings, written
from tests.media_samples import encoded
from tests.models import test_gemma3, test_llava, test_molmo2, test_qwen2_vl
from tests.models.contract import FamilyContract, picture
from tests.models.references import Reference

FAMILIES = (
    test_qwen2_vl.TestQwen2VL,
    test_llava.TestLlava,
    test_molmo2.TestMolmo2,
    test_gemma3.TestGemma3,
)
TEXTS = ("What is in the image? A square, perhaps.", "Where?")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name),
]


class Rows:
    """A run over two rows with images, and the reference of its checkpoint."""

    def __init__(self, family: type[FamilyContract], folder: Path) -> None:
        (folder / "checkpoint").mkdir()
        family.write_checkpoint(folder / "checkpoint")
        self.reference: Reference = family.make_reference(folder / "checkpoint")
        self.items = [[{"image": picture(40, 60 + row)}, {"text": text}] for row, text in enumerate(TEXTS)]
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


@pytest.fixture
def rows(family: type[FamilyContract], tmp_path: Path) -> Rows:
    return Rows(family, tmp_path)


def stepped(rows: Rows, collate: Any, make: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step of gradient descent, and the weights after the step."""
    model = copy.deepcopy(rows.reference.model)
    trainer = make(model=model, train_dataset=[0, 1], data_collator=collate)
    loss = trainer.train().training_loss
    return loss, model.state_dict()


def assert_same_steps(rows: Rows, make: Any, unpacked: Any = list) -> None:
    loss, weights = stepped(rows, lambda batch: rows.from_run(unpacked(batch)), make)
    expected, theirs = stepped(rows, lambda batch: rows.from_processor(unpacked(batch)), make)
    assert loss == pytest.approx(expected, rel=1e-6)
    before, changed = rows.reference.model.state_dict(), 0
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6, msg=name)
        changed += not torch.equal(weight, before[name])
    assert changed > 10


OPTIONS = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "optim": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "remove_unused_columns": False,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


def test_steps_of_transformers_trainer_equal_those_on_the_processors_output(rows: Rows, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert_same_steps(rows, partial(Trainer, args=TrainingArguments(str(tmp_path / "out"), **OPTIONS)))


def test_steps_of_trls_trainer_equal_those_on_the_processors_output(rows: Rows, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    options = {**OPTIONS, "dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}

    def make(train_dataset: Any, **given: Any) -> Any:
        return trl.SFTTrainer(
            args=trl.SFTConfig(str(tmp_path / "out"), **options),
            train_dataset=datasets.Dataset.from_dict({"row": train_dataset}),
            processing_class=rows.reference.processor,
            **given,
        )

    assert_same_steps(rows, make, lambda batch: [one["row"] for one in batch])


def test_packed_samples_have_their_own_logits_or_packing_is_refused(rows: Rows) -> None:
    samples = [*rows.dataset]
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
