"""Tests for the tower budget, which limits the features and bytes of one tower call."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindie_mm.engine import sent_features
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add, Encode
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.scheduler import TowerBudget, TowerLimits
from mindie_mm.models import load_model
from mindie_mm.nn.splice import MediaItem
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import noise, run


def item(digest, ref="", num_bytes=100, num_features=4):
    view = SimpleNamespace(nbytes=num_bytes, digest=digest, ref=ref)
    return MediaItem(np.arange(num_features), view, MediaShape("image", 5, num_features))


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        (TowerLimits(8, 10**6, 25), [True, True, False]),
        (TowerLimits(100, 400, 25), [True, True, False]),
        (TowerLimits(1, 1, 25), [True, False, False]),
        (TowerLimits(100, 600, 25), [True, True, True]),
    ],
    ids=["features", "bytes", "one alone", "all"],
)
def test_items_fit_up_to_either_limit_and_one_item_always_fits(limits, fits):
    budget = TowerBudget(limits)
    for number, expected in enumerate(fits):
        one = item(bytes([number]))
        assert budget.can_take(one) == expected
        if expected:
            budget.take(one)
    assert budget.can_take(item(b"\0")), "an item that is already in the call uses no budget"


def test_items_without_a_digest_are_told_apart_by_reference():
    budget = TowerBudget(TowerLimits(4, 1000, 1))
    budget.take(item(None, "one"))
    assert budget.can_take(item(None, "one"))
    assert not budget.can_take(item(None, "two"))


def test_counting_the_items_that_fit_uses_no_budget():
    budget = TowerBudget(TowerLimits(8, 10**6, 25))
    items = [item(bytes([number])) for number in (0, 0, 1, 2, 3)]
    assert [budget.num_fitting(items) for _ in range(2)] == [3, 3]
    assert budget.num_fitting([]) == 0
    assert budget.num_fitting([item(b"large", num_features=100), *items]) == 1, "the first item always fits"
    budget.take(items[-1])
    assert budget.num_fitting(items) == 2


def call_sizes(engine):
    """Return a list to which each later call to the engine's tower appends its number of items."""
    model, sizes = engine._model, []

    class Counted(type(model)):
        def tower(self, items):
            sizes.append(len(items))
            return super().tower(items)

    counted = object.__new__(Counted)
    counted.__dict__ = model.__dict__
    engine._model = engine._towers._model = counted
    return sizes


def calls(engine, prompts):
    """Answer all prompts. Return the number of items in each tower call, and the outputs."""
    sizes = call_sizes(engine)
    outputs, errors = run(engine, prompts, max_tokens=2, ignore_eos=True)
    assert not errors
    return sizes, outputs


def test_a_burst_of_large_images_takes_several_calls_of_the_tower(random_checkpoint, device, tmp_path):
    model = load_model(random_checkpoint, device=device)
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        prompts = [tokenizer.tokenize([{"image": noise(112, 112, i)}], path_file) for i in range(12)]
        (one,) = model.read(prompts[0].numpy())
        cost = sum(one.view[name].nbytes for name in one.view) + one.shape.num_features * model.spec.feature_bytes
        sizes, expected = calls(Engine(model, EngineConfig()), prompts)
        assert sizes == [12], "several requests share a call"
        sizes, outputs = calls(Engine(model, EngineConfig(max_tower_bytes=5 * cost)), prompts)
        assert sizes == [5, 5, 2]
        assert outputs == expected
        together = tokenizer.tokenize([{"image": noise(112, 112, i)} for i in range(12)], path_file)
        sizes, _ = calls(Engine(model, EngineConfig(max_tower_bytes=5 * cost)), [together])
        assert sizes == [5, 5, 2], "the items of one prompt are also split into several calls"
        params = SamplingParams(temperature=0, max_tokens=1)
        engine = Engine(model, EngineConfig(max_tower_bytes=1))
        engine.add(Add("r", together.numpy().tobytes(), params))
        while engine.has_work():
            assert all(progress.error is None for progress in engine.step().progress)
    release(path_file)


@pytest.mark.usefixtures("unmapped")
def test_repeated_images_are_encoded_once_and_sent_in_messages_of_limited_size(
    random_checkpoint, device, tmp_path, monkeypatch
):
    engine = Engine(load_model(random_checkpoint, device=device), EngineConfig())
    path_file = tmp_path / "shm_name.txt"
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        ids = tokenizer.tokenize([{"image": noise(56, 84)}] * 6, path_file).numpy().tobytes()
        sizes = call_sizes(engine)
        whole = engine.encode(Encode("r", ids))
        assert (sizes, len(whole.features), whole.finish_reason) == ([1], 6, "stop")
        assert all(features == whole.features[0] for features in whole.features)
        num_bytes = len(whole.features[0].data) * 4 // np.dtype(whole.features[0].dtype).itemsize
        monkeypatch.setattr(sent_features, "MAX_FEATURES_BYTES", 2 * num_bytes)
        first = engine.encode(Encode("r", ids))
        assert (first.features, first.finish_reason) == (whole.features[:2], None)
        assert engine.encode(Encode("r", ids, 4)).finish_reason == "stop"
        monkeypatch.setattr(sent_features, "MAX_FEATURES_BYTES", num_bytes - 1)
        assert engine.encode(Encode("r", ids)).error.name == "LimitExceeded"
    release(path_file)
