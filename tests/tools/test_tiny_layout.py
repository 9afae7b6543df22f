"""The embedded checkpoint's files: the ones that the code makes, and prompts as its template writes them."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import mindie_mm
from tools.samples import TASKS, sample
from tools.scenes import HELD_OUT, TRAIN, Scene, Thing
from tools.tiny_inputs import encode, patches
from tools.tiny_layout import IMAGE_PIXELS, MERGE, write_layout
from tools.tiny_truth import truth

TINY = Path(mindie_mm.__file__).parent / "assets" / "tiny"


def test_the_shipped_layout_is_what_the_code_writes(tmp_path: Path) -> None:
    write_layout(tmp_path)
    for made in tmp_path.iterdir():
        assert (TINY / made.name).read_bytes() == made.read_bytes(), made.name


def test_the_directory_stays_small() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 8 << 20


@pytest.mark.parametrize("task", TASKS)
def test_training_prompts_are_the_templates(task: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(TINY)
    for number in range(6):
        one = sample(random.Random(number), TRAIN, task)
        messages: list[dict[str, object]] = []
        if one.system is not None:
            messages.append({"role": "system", "content": one.system})
        media = [{"type": "image"} for _ in one.images] + [{"type": "video"}] * bool(one.frames)
        for question, answer in one.turns:
            text = [{"type": "text", "text": question}]
            messages.append({"role": "user", "content": text + media if one.text_first else media + text})
            messages.append({"role": "assistant", "content": answer})
            media = []
        encoded = encode(tokenizer, one)
        rendered = theirs.apply_chat_template(messages, tokenize=False)
        for pad, grids in (("<|image_pad|>", encoded.image_grids), ("<|video_pad|>", encoded.video_grids)):
            first, *rest = rendered.split(pad)
            assert len(rest) == len(grids)
            for (t, h, w), piece in zip(grids, rest, strict=True):
                first += pad * (t * h * w // MERGE**2) + piece
            rendered = first
        assert theirs.encode(rendered) == encoded.ids


def test_answers_alone_are_learned() -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    one = sample(random.Random(2), HELD_OUT, "name")
    encoded = encode(tokenizer, one)
    learned = tokenizer.decode([i for i in encoded.labels if i >= 0], skip_special_tokens=False)
    assert learned == f"{one.turns[0][1]}<|im_end|>"


def test_a_thing_is_marked_at_its_centre() -> None:
    thing = Thing("red", "star", (255, 0, 0), x=0.9, y=0.1, size=0.2, turn=0.0)
    found = truth([Scene(112, 112, (0, 0, 0), (thing,), None)], (1, 8, 8), MERGE)
    assert found.shape == (16, 6)
    assert found[:, 3].nonzero().tolist() == [[3]]
    assert found[3, :2].tolist() == [1.0, 4.0]


def test_patches_of_a_picture_fill_both_moments_of_time() -> None:
    one = sample(random.Random(3), HELD_OUT, "name")
    raw, (t, h, w) = patches(one.images, IMAGE_PIXELS)
    assert t == 1
    assert raw.shape == (h * w, 1176)
    moments = raw.view(len(raw), 3, 2, 196)
    assert torch.equal(moments[:, :, 0], moments[:, :, 1])
