"""Tests for selecting video frames."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mindie_mm.media.video.frames import evenly, stepped


@pytest.mark.parametrize("first_of_step", [0, 0.5])
def test_stepped_returns_exactly_the_requested_number_of_frames(first_of_step):
    """For some lengths, rounding adds an index after the last frame. This index is dropped."""
    num_longer = 0
    for total in range(1, 401):
        for count in {*range(1, total + 1, 1 + total // 40), total}:
            first = first_of_step * total / count
            found = stepped(total, count, first)
            whole = torch.arange(first, total, total / count).int().tolist()
            assert len(found) == count
            assert found == sorted(found) == whole[:count]
            assert found[-1] < total
            assert whole[count:] in ([], [total])
            num_longer += len(whole) > count
    assert (num_longer > 0) == (first_of_step == 0)


@pytest.mark.parametrize(("total", "count"), [(230, 14), (17, 14), (262_144, 768), (262_143, 767), (1, 1)])
def test_steps_are_even(total, count):
    for found in (stepped(total, count), evenly(total, count)):
        assert len({*found}) == count
        assert (found[0], found[-1] < total) == (0, True)
        gaps = {late - early for early, late in pairwise(found)}
        assert gaps <= {total // count, total // count + 1}


def test_a_first_index_above_the_step_returns_fewer_frames():
    assert stepped(10, 5, 3) == [3, 5, 7, 9]
