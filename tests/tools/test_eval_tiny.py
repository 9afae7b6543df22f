"""The embedded checkpoint is what the README says; the whole judgement is `python -m tools.eval_tiny`."""

import math

from safetensors import safe_open

from tools.eval_tiny import ROOT, SEED, held_out, judge

TINY = ROOT / "mindie_mm" / "assets" / "tiny"


def test_it_answers_scenes_it_has_not_seen():
    found = judge(TINY, held_out(SEED + 1, 90), verbose=True)
    right, asked = (sum(column) for column in zip(*found.values(), strict=True))
    assert asked == 90
    assert right / asked >= 0.9, found


def test_it_is_small():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 8 * 10**6
    with safe_open(TINY / "model.safetensors", "pt") as weights:
        count = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118 - no dict
    assert 2e6 <= count <= 4e6
