"""Tests that numbers of numpy and torch are accepted wherever a number is."""

import json
from dataclasses import fields, replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from mindie_mm import SamplingParams
from mindie_mm.batch.settings import Settings
from mindie_mm.errors import InputError
from mindie_mm.inputs import Embeddings, media_defaults, parse_inputs
from mindie_mm.settings.config import MediaCaps, WorkerConfig
from mindie_mm.settings.limits import python_number
from mindie_mm.worker.beam_search import BeamSearchParams


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(2), 2),
        (np.uint8(2), 2),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.array(2), 2),
        (np.array(0.5), 0.5),
        (torch.tensor(2), 2),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), True),
        (Fraction(1, 2), 0.5),
        (3, 3),
        (True, True),
        (None, None),
        ("3", "3"),
    ],
)
def test_a_number_becomes_a_number_of_python(value, expected):
    assert python_number(value) == expected
    assert type(python_number(value)) is type(expected)


@pytest.mark.parametrize("value", [np.array([2]), np.array("a"), np.str_("a"), [2], b"2", object()])
def test_other_values_are_unchanged(value):
    assert python_number(value) is value


def test_sampling_settings():
    given = SamplingParams(
        max_tokens=np.int64(2),
        temperature=np.float32(0.5),
        top_k=torch.tensor(5),
        seed=np.uint64(7),
        ignore_eos=np.bool_(True),
        stop_token_ids=[np.int64(3)],
        logit_bias={np.int64(1): np.float32(2)},
    )
    plain = SamplingParams(
        max_tokens=2, temperature=0.5, top_k=5, seed=7, ignore_eos=True, stop_token_ids=(3,), logit_bias={1: 2.0}
    )
    assert given.check(100) == plain.check(100)
    for ids in (np.array([3, 4]), np.array([3.0, 4.0]), torch.tensor([3, 4])):
        assert SamplingParams(stop_token_ids=ids).check(100).stop_token_ids == (3, 4)
    for bad in (SamplingParams(max_tokens=np.int64(-2)), SamplingParams(temperature=np.float32(101))):
        with pytest.raises(InputError, match="must be in"):
            bad.check(100)
    with pytest.raises(InputError, match="max_tokens"):
        SamplingParams(max_tokens=np.float64(2.5)).check(100)
    assert BeamSearchParams(np.int64(2), np.int32(3)) == BeamSearchParams(2, 3)
    assert (
        BeamSearchParams(np.int64(2), np.int32(3), length_penalty=np.float32(0.5)).sampling_params(100).max_tokens == 3
    )


def test_options_of_media():
    given = {"min_pixels": np.int64(100), "max_pixels": torch.tensor(200)}
    assert parse_inputs([{"image": "a.png", **given}]) == parse_inputs(
        [{"image": "a.png", "min_pixels": 100, "max_pixels": 200}]
    )
    for options in ({"fps": np.float32(0.5)}, {"num_frames": np.int16(4)}, {"min_frames": np.float64(2.0)}):
        plain = {name: value.item() for name, value in options.items()}
        assert parse_inputs([{"video": "a.mp4", **options}]) == parse_inputs([{"video": "a.mp4", **plain}])
    assert parse_inputs([{"audio": np.zeros(9, np.float32), "sampling_rate": np.int64(16_000)}])
    assert media_defaults({"fps": np.float32(2)}, {}) == media_defaults({"fps": 2.0}, {})
    with pytest.raises(InputError, match="fps="):
        parse_inputs([{"video": "a.mp4", "fps": np.array([1.0, 2.0])}])


def test_grids_of_embeddings():
    rows = np.zeros((4, 8), np.float32)
    for grid in ([np.int64(1), np.int64(4), np.int64(4)], np.array([1, 4, 4]), (1, 4, 4)):
        assert Embeddings(rows, grid).grid == (1, 4, 4)


def test_settings_hold_numbers_of_python():
    caps = MediaCaps(
        max_image_pixels=np.int64(100), max_decode_s=np.float32(3), rgba_background_color=(np.uint8(1), 2, 3)
    )
    assert caps == MediaCaps(max_image_pixels=100, max_decode_s=3.0, rgba_background_color=(1, 2, 3))
    config = WorkerConfig(limit_mm_per_prompt={"image": np.int64(4)}, decoders=np.int64(2))
    assert json.loads(msgspec.json.encode([caps, config.decoders, config.limit_mm_per_prompt]))[1:] == [2, {"image": 4}]
    for name in (field.name for field in fields(MediaCaps)):
        value = getattr(caps, name)
        as_numpy = np.asarray(value)[()] if isinstance(value, int | float) else value
        assert replace(caps, **{name: as_numpy}) == caps
    with pytest.raises(InputError, match="max_image_pixels=0"):
        MediaCaps(max_image_pixels=np.int64(0))
    settings = Settings(model="", inputs=("a.jsonl",), max_tokens=np.int64(5), shard_rows=np.int32(3))
    assert (type(settings.max_tokens), type(settings.shard_rows)) == (int, int)
