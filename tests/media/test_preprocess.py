"""Tests for the steps of transformers' image processors, and the settings that are supported."""

from __future__ import annotations

import numpy as np
import pytest

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.image.encoded_image import RESAMPLES
from mindie_mm.media.image.preprocess import Preprocess, Size, check_output_size, check_settings

BICUBIC = RESAMPLES[3]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (Preprocess(Size(20, 30), BICUBIC), (20, 30)),
        (Preprocess(Size(shortest_edge=20), BICUBIC), None),
        (Preprocess(Size(shortest_edge=20), BICUBIC, crop=(12, 14)), (12, 14)),
        (Preprocess(Size(shortest_edge=20), BICUBIC, background=(0, 0, 0)), (20, 20)),
        (Preprocess(None, BICUBIC), None),
    ],
    ids=["fixed", "by an edge", "cropped", "padded", "not resized"],
)
def test_output_size_is_known_if_all_images_become_one_size(steps, expected):
    sizes = {steps.apply(np.zeros((height, width, 3), np.uint8)).shape[:2] for height, width in ((40, 50), (60, 33))}
    assert steps.output_size == expected
    assert sizes == {expected} if expected else len(sizes) == 2


@pytest.mark.parametrize(
    ("size", "named"), [(None, "several sizes"), ((20, 30), r"\(20, 30\), but the tower takes images of 20x20")]
)
def test_an_output_size_other_than_the_towers_is_refused(size, named):
    check_output_size((20, 20), 20, "here")
    with pytest.raises(UnsupportedCheckpoint, match=rf"here: images are resized to {named}"):
        check_output_size(size, 20, "here")


def test_a_setting_with_an_unsupported_value_is_refused():
    check_settings({"stated": 1, "null": None}, {"stated": 1, "null": 2, "left out": 3, "none": None}, "here")
    with pytest.raises(UnsupportedCheckpoint, match="here: stated is 0; only 1 is supported"):
        check_settings({"stated": 0}, {"stated": 1}, "here")
