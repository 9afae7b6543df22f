"""Tests for how much a decode step sends to the device, because each launch and each copy takes time on the host.

The layers have the parts of Qwen2.5-VL's or Qwen3-VL's, and heads of 128 dimensions.
"""

from __future__ import annotations

from typing import Any

from tests.ascend.counted import Counts, counted
from tests.ascend.processes import call

LAYERS, BLOCK = 3, 128
PER_LAYER, PER_STEP, SAMPLING_LAUNCHES = 12, 8, 25
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "penalty": [{"temperature": 0.0, "repetition_penalty": 1.05}],
    "defaults of Qwen2-VL": [{"temperature": 0.01, "top_k": 1, "top_p": 0.001, "seed": 1}],
    "temperature": [{"seed": 1}],
    "mixture": [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20, "seed": 1, "repetition_penalty": 1.1},
        {"top_p": 0.9, "seed": 2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
        {"min_p": 0.1, "seed": 3, "min_tokens": 3},
    ],
}


def wide_model(kind: str) -> Any:
    """Return a small model of a family, with heads of 128 dimensions."""
    import tempfile
    from pathlib import Path

    from mindie_mm.models import load_model
    from tests.models import test_qwen2_5_vl, test_qwen3_vl

    source, family, config = {
        "qwen2.5-vl": (test_qwen2_5_vl, test_qwen2_5_vl.TestQwen25VL, "Qwen2_5_VLConfig"),
        "qwen3-vl": (test_qwen3_vl, test_qwen3_vl.TestQwen3VL, "Qwen3VLConfig"),
    }[kind]
    own = getattr(source, config)
    text = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    text |= {"num_hidden_layers": LAYERS, "rope_parameters": rope}

    def widened(*, text_config: dict[str, Any], vision_config: dict[str, Any], **others: Any) -> Any:
        vision = {**vision_config, "out_hidden_size": 256}
        return own(text_config={**text_config, **text}, vision_config=vision, **others)

    setattr(source, config, widened)
    with tempfile.TemporaryDirectory() as folder:
        family.write_checkpoint(Path(folder))
        return load_model(folder, "npu", "bfloat16")


def steps(kind: str, names: list[str]) -> dict[tuple[str, bool], Counts]:
    """Return the counts of two decode steps of four requests for each kind of sampling.

    In the second step, all requests begin a KV block.
    """
    import numpy as np

    from mindie_mm.engine.core import Engine
    from mindie_mm.engine.requests.engine_messages import Add
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.settings.config import EngineConfig

    model = wide_model(kind)
    found = {}
    for name in names:
        engine = Engine(model, EngineConfig(enforce_eager=True), 2**26)
        for number in range(4):
            settings = SAMPLING[name][number % len(SAMPLING[name])]
            params = SamplingParams(max_tokens=12, ignore_eos=True, **settings)
            ids = np.full(BLOCK - 5, 10 + number)
            assert engine.add(Add(request_id=str(number), input_ids=ids.tobytes(), params=params)) is None
        for number in range(9):  # step 6 computes the first token of a block
            with counted() as counts:
                engine.step()
            if number in (4, 6):
                found[name, number == 6] = counts
        while engine.has_work():
            engine.step()
    return found


def test_a_decode_step_of_qwen2_5_vl_launches_few_operators():
    found = call(steps, "qwen2.5-vl", [*SAMPLING])
    greedy = found["greedy", False]
    assert greedy.launches <= PER_LAYER * LAYERS + PER_STEP, greedy.names
    for (name, begins), counts in found.items():
        more = counts.launches - found[name, False].launches if begins else counts.launches - greedy.launches
        assert more <= (0 if begins else SAMPLING_LAUNCHES), (name, counts.names)
        assert counts.hidden_copies == counts.aicpu == 0, (name, counts.names)
        assert counts.syncs == 1
        # Penalties depend on the token before, which arrives after the launch of the step.
        assert counts.uploads == (2 if name in {"penalty", "mixture"} else 1), name


def test_blocks_are_zeroed_in_one_launch_if_attention_reads_their_rest():
    found = call(steps, "qwen2.5-vl", ["greedy"], wrong="npu_fused_infer_attention_score:rest read")
    step, begins = found["greedy", False], found["greedy", True]
    assert begins.launches - step.launches == 1
    assert begins.uploads == step.uploads == 1


def test_norms_of_heads_and_a_missing_operator_cost_a_launch_per_layer_each():
    (normed,) = (counts for (_, begins), counts in call(steps, "qwen3-vl", ["greedy"]).items() if not begins)
    assert normed.launches <= (PER_LAYER + 1) * LAYERS + PER_STEP, normed.names
    found = call(steps, "qwen2.5-vl", ["greedy"], missing="npu_scatter_pa_kv_cache")["greedy", False]
    assert found.launches <= (PER_LAYER + 1) * LAYERS + PER_STEP, found.names
    assert normed.hidden_copies == found.hidden_copies == 0, (normed.names, found.names)
