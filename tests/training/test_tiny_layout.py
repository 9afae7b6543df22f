"""Tests for the embedded checkpoint's files, and that training prompts follow its chat template."""

import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import mindie_mm
from mindie_mm.media.audio.mel import MelSettings, write_log_mel
from training.samples import TASKS, Sample, sample
from training.scenes import HELD_OUT, TRAIN, Scene, Thing, draw_all, moving, single
from training.sounds import beeps, make, tone
from training.tiny_inputs import TOKENS, audio_tokens, encode, mels, patches
from training.tiny_layout import HEARING, IMAGE_PIXELS, MERGE, write_layout
from training.tiny_model import build_model
from training.tiny_truth import heard, truth

TINY = Path(mindie_mm.__file__).parent / "assets" / "tiny"


def test_the_shipped_layout_is_what_the_code_writes(tmp_path: Path) -> None:
    write_layout(tmp_path)
    for file in tmp_path.iterdir():
        assert (TINY / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_directory_stays_small() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 10 * 10**6


@pytest.mark.parametrize("task", TASKS)
def test_training_prompts_equal_those_of_the_template(task: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(TINY)
    for number in range(6):
        one = sample(random.Random(number), TRAIN, task)
        if any(sound.speaker for sound in one.sounds) and shutil.which("espeak-ng") is None:
            continue
        messages: list[dict[str, object]] = []
        if one.system is not None:
            messages.append({"role": "system", "content": one.system})
        counts = {"image": len(one.images), "video": int(bool(one.frames)), "audio": len(one.sounds)}
        media = [{"type": kind} for kind in one.order for _ in range(counts[kind])]
        for question, answer in one.turns:
            text = [{"type": "text", "text": question}]
            messages.append({"role": "user", "content": text + media if one.text_first else media + text})
            messages.append({"role": "assistant", "content": answer})
            media = []
        encoded = encode(tokenizer, one)
        rendered = theirs.apply_chat_template(messages, tokenize=False)
        first, *rest = re.split("|".join(map(re.escape, TOKENS.values())), rendered)
        assert len(rest) == len(encoded.media)
        for medium, piece in zip(encoded.media, rest, strict=True):
            first += TOKENS[medium.kind] * medium.tokens + piece
        assert theirs.encode(first) == encoded.ids


@pytest.mark.parametrize("seconds_per_grid", [1.0, 0.5])
def test_positions_equal_those_of_the_reference(seconds_per_grid: float) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    model = build_model(TINY)
    sound = tone(random.Random(1), TRAIN)
    scenes = moving(random.Random(2), TRAIN, "left", 6)
    still = single(random.Random(3), TRAIN)
    for order in (("image", "audio", "video"), ("video", "image", "audio")):
        one = Sample(
            "mixed", draw_all([still]), draw_all(scenes), (("What?", "red"),), scenes=(still, *scenes),
            sounds=(sound,), order=order,
        )  # fmt: skip
        encoded = encode(tokenizer, one, second_per_grid=seconds_per_grid)
        ids = torch.tensor([encoded.ids])
        grids = {medium.kind: torch.tensor([medium.grid]) for medium in encoded.media}
        frames = [medium.array.shape[1] for medium in encoded.media if medium.kind == "audio"]
        expected, _ = model.model.get_rope_index(
            ids, grids["image"], grids["video"], torch.ones_like(ids), audio_seqlens=torch.tensor(frames),
            second_per_grids=torch.tensor([seconds_per_grid]),
        )  # fmt: skip
        assert expected[:, 0].tolist() == encoded.positions.tolist()


def test_the_features_of_a_sound_equal_those_of_the_server() -> None:
    samples, _ = make(beeps(random.Random(4), HELD_OUT))
    settings = MelSettings.read(HEARING, "here")
    served = np.empty((settings.num_bins, settings.num_frames(len(samples))), np.float32)
    write_log_mel(samples, settings, served)
    assert np.abs(served - mels(samples).numpy()).max() < 1e-5


def test_only_answers_are_learned() -> None:
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


def test_beeps_are_counted_where_they_begin() -> None:
    sound = beeps(random.Random(3), TRAIN)
    samples, spans = make(sound)
    tokens = audio_tokens(mels(samples).shape[1])
    counted = heard(sound, spans, tokens)[:, 2]
    assert counted[-1] == int(sound.answer)
    assert (counted.diff() >= 0).all()


def test_patches_of_an_image_fill_both_moments_of_time() -> None:
    one = sample(random.Random(3), HELD_OUT, "name")
    raw, (t, h, w) = patches(one.images, IMAGE_PIXELS)
    assert t == 1
    assert raw.shape == (h * w, 1176)
    moments = raw.view(len(raw), 3, 2, 196)
    assert torch.equal(moments[:, :, 0], moments[:, :, 1])
