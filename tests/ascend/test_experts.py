"""Tests for mixtures of experts on the simulated NPU: fused operators, plain torch as a fallback, and waits."""

from __future__ import annotations

import pytest
import torch

from tests.ascend.processes import call
from tests.ascend.test_kernels import Recorder, with_log_lines

OPERATORS = ["npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_swiglu", "npu_grouped_matmul"]
SUM, ROUNDING = "npu_moe_token_unpermute", "npu_dynamic_quant"
TOLERANCE = 0.05
CHOSEN = torch.tensor([[3, 1], [0, 3], [3, 0]], dtype=torch.int32)


def test_rows_are_sorted_by_expert(npu):
    x = torch.arange(6.0).view(3, 2)
    settings = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1}
    route = torch.ops.npu.npu_moe_init_routing_v2
    rows, places, counts, _ = route(x.to(npu), CHOSEN.to(npu), active_expert_range=[0, 4], **settings)
    assert counts.cpu().tolist() == [2, 1, 0, 3]
    assert rows.cpu().tolist() == x[torch.tensor([1, 2, 0, 0, 1, 2])].tolist()
    assert places.cpu().tolist() == [3, 2, 0, 4, 5, 1]
    *_, scattered = route(x.to(npu), CHOSEN.to(npu), active_expert_range=[0, 4], row_idx_type=1, **settings)[:2]
    assert scattered.cpu().tolist() == [2, 5, 1, 0, 3, 4]


def test_experts_that_are_not_active_have_no_rows(npu):
    settings = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1}
    x = torch.arange(6.0).view(3, 2).to(npu)
    rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x, CHOSEN.to(npu), active_expert_range=[1, 4], **settings
    )
    assert counts.cpu().tolist() == [1, 0, 3]
    assert places.cpu().tolist() == [1, 0, -1, 2, 3, -1]
    assert rows.isnan().any(1).cpu().tolist() == [False] * 4 + [True] * 2


def test_each_group_of_rows_has_its_weight(npu):
    rows, weight = torch.randn(5, 4), torch.randn(3, 4, 8)
    expected = torch.cat([rows[:2] @ weight[0], rows[2:4] @ weight[2]])
    for groups, kind in (([2, 0, 2], 1), ([2, 2, 4], 0)):
        (found,) = torch.ops.npu.npu_grouped_matmul(
            [rows.to(npu)],
            [weight.to(npu)],
            group_list=torch.tensor(groups).to(npu),
            group_list_type=kind,
            group_type=0,
            split_item=2,
        )
        assert torch.allclose(found[:4].cpu(), expected)
        assert found[4].isnan().all(), "no group has the last row"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_integers_are_exact_and_scaled_by_row_and_column(dtype, npu):
    random = torch.Generator().manual_seed(0)
    rows, weight = (torch.randint(-128, 128, shape, generator=random).to(torch.int8) for shape in ((5, 96), (3, 96, 8)))
    scales, row_scales = torch.rand(3, 8, generator=random) / 2**12, torch.rand(5, generator=random)
    given = scales.to(torch.bfloat16) if dtype == torch.bfloat16 else scales
    (found,) = torch.ops.npu.npu_grouped_matmul(
        [rows.to(npu)],
        [weight.to(npu)],
        scale=[given.to(npu)],
        per_token_scale=[row_scales.to(npu)],
        group_list=torch.tensor([2, 0, 2]).to(npu),
        group_list_type=1,
        group_type=0,
        split_item=2,
        output_dtype=dtype,
    )
    sums = torch.cat([rows[:2].long() @ weight[0].long(), rows[2:4].long() @ weight[2].long()])
    factors = given.float()[[0, 0, 2, 2]] * row_scales[:4].unsqueeze(1)
    assert torch.equal(found[:4].cpu(), (sums.float() * factors).to(dtype))
    assert found[4].isnan().all(), "no group has the last row"


def test_the_scales_of_rounded_rows_follow_their_rows(npu):
    settings = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1}
    x, scales = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int8), torch.tensor([0.5, 1.0, 2.0])
    rows, _, _, found = torch.ops.npu.npu_moe_init_routing_v2(
        x.to(npu), CHOSEN.to(npu), scale=scales.to(npu), active_expert_range=[1, 4], **settings
    )
    assert rows[:4].cpu().tolist() == [[1, 2], [1, 2], [3, 4], [5, 6]]
    assert found[:4].cpu().tolist() == [0.5, 0.5, 1.0, 2.0]
    assert found[4:].isnan().all()


def test_the_rows_of_a_token_are_summed_with_their_weights(npu):
    rows, places, weights = torch.randn(4, 3), torch.tensor([2, 0, 3, 1], dtype=torch.int32), torch.rand(2, 2)
    expected = (rows[places.long()].view(2, 2, 3) * weights.unsqueeze(-1)).sum(1)
    found = torch.ops.npu.npu_moe_token_unpermute(rows.to(npu), places.to(npu), weights.to(npu))
    assert torch.allclose(found.cpu(), expected)


def passed(dtype: str, start: int | None = None, rounds: bool = False) -> dict:
    """Run a layer on CPU and NPU with several numbers of rows. Return the operators, the difference and the waits.

    If `start` is given, the layer has half of the experts, and the other experts are on another rank. With `rounds`,
    weights are int8, and inputs are rounded.
    """
    import torch_npu  # noqa: F401

    with torch.inference_mode():
        return passed_in_inference(dtype, start, rounds)


def passed_in_inference(dtype: str, start: int | None, rounds: bool) -> dict:
    from mindie_mm.device import Kernels, kernels_of
    from mindie_mm.nn.experts import JoinedExperts
    from tests.ascend.test_runtime import simulator

    torch.manual_seed(0)
    own = slice(None) if start is None else slice(start, start + 6)
    first, second = (torch.randn(12, 16, 16) / 4)[own], (torch.randn(12, 16, 8) / 4)[own]
    scales = None
    if rounds:
        scales = tuple((weight.abs().amax(2) / 127).bfloat16().float() for weight in (first, second))
        pairs = zip((first, second), scales, strict=True)
        first, second = ((weight / own.unsqueeze(2)).round().clamp(-128, 127).to(torch.int8) for weight, own in pairs)
    else:
        first, second = (weight.to(getattr(torch, dtype)) for weight in (first, second))
    on_host, layer = (JoinedExperts(first, second, Kernels().swiglu, start, scales) for _ in range(2))
    layer.to("npu")
    layer.activate = kernels_of(layer.first.device).swiglu
    names, worst, waits = [], 0.0, []
    for rows in (1, 2, 256, 257):
        hidden = torch.randn(rows, 16).to(getattr(torch, dtype))
        given = hidden, torch.rand(rows, 12).argsort(1)[:, :3], torch.rand(rows, 3).to(hidden.dtype)
        on_device = [part.to("npu") for part in given]
        layer(*on_device)  # the first call tries operators
        simulator().sim_syncs_reset()
        with Recorder() as recorder:
            out = layer(*on_device)
        waits.append(simulator().sim_syncs())
        names.append(recorder.names)
        worst = max(worst, (out.cpu().float() - on_host(*given).float()).abs().max().item())
    return {"names": names, "worst": worst, "waits": waits}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fused_operators_give_the_results_of_plain_torch_and_never_wait(dtype):
    found = call(passed, dtype)
    assert found["names"] == [[*OPERATORS, SUM]] * 4
    assert found["worst"] < TOLERANCE
    assert found["waits"] == [0] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_int8_weights_are_multiplied_by_rounded_rows_without_a_wait(dtype):
    found = call(passed, dtype, None, True)
    assert found["names"] == [[ROUNDING, *OPERATORS[:3], ROUNDING, OPERATORS[3], SUM]] * 4
    assert found["worst"] < TOLERANCE
    assert found["waits"] == [0] * 4


def test_int8_weights_are_multiplied_in_plain_torch_if_the_operator_is_wrong():
    found, lines = call(with_log_lines, passed, "bfloat16", None, True, wrong="npu_grouped_matmul:undefined row")
    assert found["worst"] < TOLERANCE
    assert [line.startswith("npu_grouped_matmul (npu_dynamic_quant) gives wrong") for line in lines] == [True], lines


def test_int8_weights_of_a_rank_add_nothing_for_other_ranks():
    found = call(passed, "bfloat16", 6, True)
    assert found["worst"] < TOLERANCE
    assert found["waits"] == [0] * 4


@pytest.mark.parametrize("start", [0, 6])
def test_a_rank_adds_nothing_for_the_experts_of_other_ranks(start):
    found = call(passed, "bfloat16", start)
    assert found["names"] == [OPERATORS] * 4
    assert found["worst"] < TOLERANCE
    assert found["waits"] == [0] * 4


def test_plain_torch_waits_once_to_sort_many_rows_and_never_for_few():
    found = call(passed, "float32")
    assert not {*OPERATORS, SUM} & {name for own in found["names"] for name in own} - {"npu_swiglu"}
    assert found["worst"] < 1e-4
    assert found["waits"] == [0, 0, 0, 1]


@pytest.mark.parametrize("name", [*OPERATORS[:2], SUM])
def test_a_missing_or_wrong_operator_is_logged_once_and_replaced_by_plain_torch(name):
    for settings, words in ({"missing": name}, "does not run"), ({"wrong": f"{name}:undefined row"}, "gives wrong"):
        found, lines = call(with_log_lines, passed, "bfloat16", **settings)
        assert found["worst"] < TOLERANCE
        assert found["waits"] == [0, 0, 0, 1]
        assert [line.startswith(f"npu_grouped_matmul {words}") for line in lines] == [True], lines
