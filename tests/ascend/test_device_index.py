"""Tests for devices that are named with an index, such as npu:1."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ascend.processes import call


def opened() -> dict[str, Any]:
    import torch

    from mindie_mm.device import open_device
    from mindie_mm.engine.ranks import ALONE
    from mindie_mm.errors import DeviceError

    found: dict[str, Any] = {}
    try:
        open_device("npu:2")
    except DeviceError as error:
        found["error"] = str(error)
    first, second = open_device("npu"), open_device("npu:1")
    free = first.free_bytes(), second.free_bytes()
    kept = torch.empty(2**28, dtype=torch.uint8, device=second.torch_device)
    found["taken"] = free[0] - first.free_bytes() < 2**20, free[1] - second.free_bytes() >= 2**28
    found["peak"] = second.peak_bytes(kept.clone)() >= 2**28
    found["before"] = torch.npu.current_device()
    found["used"] = str(ALONE.open_device("npu:1").torch_device)
    found["after"] = torch.npu.current_device()
    return found


def test_an_npu_is_opened_by_its_index():
    found = call(opened, devices=2)
    assert found["error"] == "there is no device npu:2; the visible devices are npu:0, npu:1"
    assert found["taken"] == (True, True)
    assert found["peak"]
    assert (found["before"], found["used"], found["after"]) == (0, "npu:1", 1)


def answer(settings: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the device and the tokens of an answer about an image."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from mindie_mm.engine.process.engine_process import load_engine
    from mindie_mm.engine.ranks import ALONE
    from mindie_mm.engine.requests.engine_messages import Add, Start
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.settings.config import EngineConfig
    from mindie_mm.shm import release
    from mindie_mm.tokenize import Tokenizer

    pixels = np.random.default_rng(0).integers(0, 255, (112, 140, 3), dtype=np.uint8)
    config = EngineConfig(kv_cache_bytes=2**24, dtype="float32", **settings)
    engine, _ = load_engine(Start(None, config), ALONE)
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder, Tokenizer.from_pretrained() as tokenizer:
        ids = tokenizer.tokenize([{"image": pixels}, {"text": "What?"}], Path(folder, "shm_name.txt")).numpy()
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        assert engine.add(Add(request_id="0", input_ids=ids.tobytes(), params=params)) is None
        while engine.has_work():
            for progress in engine.step().progress:
                assert progress.error is None, progress.error
                tokens += progress.token_ids
        release(Path(folder, "shm_name.txt"))
    return engine.ready.device, tokens


@pytest.mark.slow
def test_the_model_and_its_tower_may_run_on_different_npus():
    device, expected = call(answer, {"device": "npu"}, devices=2)
    assert (device, len(expected)) == ("npu:0", 6)
    for settings in ({"device": "npu:1"}, {"device": "npu:1", "vision_device": "npu:0", "projector_device": "npu:1"}):
        assert call(answer, settings, devices=2) == ("npu:1", expected), settings


def divided() -> dict[str, Any]:
    from dataclasses import replace

    from mindie_mm.engine.process.placing import num_devices, placed
    from mindie_mm.engine.ranks import ALONE
    from mindie_mm.engine.requests.engine_messages import Replica
    from mindie_mm.errors import DeviceError
    from mindie_mm.settings.config import EngineConfig

    config = EngineConfig(device="auto")
    found: dict[str, Any] = {"counts": (num_devices(config), num_devices(EngineConfig(device="npu:1")))}
    found["devices"] = [placed(config, Replica(number, 4), ALONE).device for number in range(4)]
    for name, several, count in (("engines", config, 5), ("ranks", replace(config, tensor_parallel=2), 3)):
        try:
            placed(several, Replica(0, count), ALONE)
        except DeviceError as error:
            found[name] = str(error)
    return found


def test_each_engine_of_a_service_gets_an_npu():
    found = call(divided, devices=4)
    assert found["counts"] == (4, 1)
    assert found["devices"] == ["npu:0", "npu:1", "npu:2", "npu:3"]
    there_are = "but the number of visible npu devices is 4; lower replicas, or make more devices visible"
    assert found["engines"] == f"replicas is 5, {there_are}"
    assert found["ranks"] == f"replicas is 3, each on 2 devices, {there_are}"
