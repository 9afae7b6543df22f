"""Tests for torch's operators on the simulated NPU: the same results as on the host, stream order and waits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.ascend.counted import counted
from tests.ascend.processes import call
from tests.ascend.test_runtime import simulator

VALUES = torch.linspace(-2, 3, 24).reshape(4, 6)
IDS = torch.tensor([3, 0, 2])


def written(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor, after writes in place through views of every kind."""
    values = values.clone()
    values[1:3, ::2] = 7
    values.view(-1)[5:9].add_(1)
    values.t()[2] = values[3, 0]
    values.index_copy_(0, IDS[:2].to(values.device), values[:2].clone())
    values.index_put_((IDS.to(values.device),), values[0].clone())
    values[values > 2] = 0
    return values.masked_fill_(values < 0, 5)


def resized(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, dtype=values.dtype, device=values.device)
    torch.add(values, values, out=out)
    return torch.cumsum(out, 0, out=out)


OPERATORS = {
    "products": lambda x: x @ x.t() + functional.linear(x[:, :4], x[:, :4]),
    "batched products": lambda x: torch.einsum("bij,bkj->bik", x.view(2, 2, 6), x.view(2, 2, 6)),
    "softmax": lambda x: functional.log_softmax(x, -1) + x.softmax(0),
    "norm": lambda x: functional.layer_norm(x, (6,), x[0], x[1]),
    "reductions": lambda x: torch.stack([x.mean(), x.var(), x.amax(), x.norm(), x.logsumexp((0, 1))]),
    "sorted": lambda x: torch.cat([x.sort(-1, descending=True).values, x.topk(3).indices.to(x.dtype)], 1),
    "gathered": lambda x: x.gather(1, IDS.to(x.device).expand(4, 3)) + x.index_select(1, IDS.to(x.device)),
    "scattered": lambda x: torch.zeros_like(x).scatter(1, IDS.to(x.device).expand(4, 3), x[:, :3]),
    "unknown sizes": lambda x: torch.cat([x[x > 0], x.nonzero().flatten().to(x.dtype), x.unique()]),
    "repeated": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1], device=x.device), dim=0),
    "embedded": lambda x: functional.embedding(IDS.to(x.device), x),
    "convolved": lambda x: functional.conv2d(x.view(1, 1, 4, 6), x[:2, :2].reshape(1, 1, 2, 2)),
    "resized image": lambda x: functional.interpolate(x.view(1, 1, 4, 6), size=(7, 5), mode="bilinear"),
    "padded": lambda x: functional.pad(x, (1, 2, 0, 1), value=3),
    "masked": lambda x: torch.where(x > 0, x, 0).masked_fill(x > 2, -1).clamp(max=1),
    "strides": lambda x: x.t().contiguous() + x.t(),
    "split": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1) + torch.stack(x.unbind(0)),
    "made": lambda x: torch.arange(4, device=x.device, dtype=x.dtype) + torch.ones(4, device=x.device) * x[0, 0],
    "written in place": written,
    "into an empty out": resized,
    "nothing": lambda x: x[:0].masked_fill_(x[:0] > 0, 1).add_(x[:0]).softmax(-1) @ x.t(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_the_same_numbers_as_on_the_host(npu, name, dtype):
    values = VALUES.to(dtype)
    expected, found = OPERATORS[name](values), OPERATORS[name](values.to(npu))
    assert found.device == npu
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(
    ("dtype", "settings", "operator"),
    [
        (torch.float32, {}, "npu::npu_fusion_attention_v3"),
        (torch.bfloat16, {"is_causal": True}, "npu::npu_fusion_attention_v3"),
        (torch.bfloat16, {"attn_mask": torch.eye(6, dtype=torch.bool)}, "npu::npu_fusion_attention_v3"),
        (torch.bfloat16, {"attn_mask": torch.eye(6, dtype=torch.bfloat16)}, "aten::softmax"),
    ],
)
def test_torchs_attention_is_torch_npus_kernel_over_simulated_operators(npu, dtype, settings, operator):
    rows = torch.linspace(-2, 2, 3 * 2 * 6 * 8).view(3, 1, 2, 6, 8).to(dtype)
    expected = functional.scaled_dot_product_attention(*rows, **settings)
    given = {name: value.to(npu) if isinstance(value, torch.Tensor) else value for name, value in settings.items()}
    on_device = [*rows.to(npu)]
    with counted() as counts:
        found = functional.scaled_dot_product_attention(*on_device, **given)
    assert torch.allclose(found.cpu().float(), expected.float(), atol=0.02)
    assert counts.names["launches"][operator] == 1, counts.names


def test_operators_outside_inference_mode_give_the_same_numbers_as_on_the_host(npu):
    """torch_npu registers some operators only for autograd."""
    values = VALUES.to(npu).requires_grad_()
    for operator in (OPERATORS["products"], OPERATORS["softmax"], OPERATORS["gathered"]):
        assert torch.equal(operator(values).detach().cpu(), operator(VALUES))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.bool, torch.float64])
def test_copies_between_host_and_device_allow_any_strides_and_dtype(npu, dtype):
    on_device = torch.zeros(6, 8, dtype=dtype, device=npu)
    on_device[1:5, :6] = VALUES  # copies from the host into a view of another dtype
    expected = torch.zeros(6, 8, dtype=dtype)
    expected[1:5, :6] = VALUES
    assert torch.equal(on_device.cpu(), expected)
    assert torch.equal(on_device.t()[2:].to("cpu", torch.float32), expected.t()[2:].float())
    target = torch.zeros(8, 6)
    target[::2] = on_device.t()[::2]  # copies from the device into a view on the host
    assert torch.equal(target[::2], expected.t()[::2].float())
    assert not target[1::2].any()


def test_a_cast_to_float64_gives_float32(npu):
    values = VALUES.to(npu)
    for cast in (values.double, lambda: values.int().to(torch.float64), lambda: values.half().type(torch.float64)):
        with pytest.warns(UserWarning, match="do not support double"):
            assert cast().dtype == torch.float32
    assert values.to("cpu", torch.float64).dtype == torch.float64
    assert torch.zeros(2, dtype=torch.float64, device=npu).dtype == torch.float64, "a new tensor may be float64"


def test_a_cast_to_the_same_dtype_returns_the_same_tensor(npu):
    values = VALUES.to(npu)
    assert values.to(values.dtype, copy=True).data_ptr() == values.data_ptr()
    assert values.to(npu, values.dtype, copy=True).data_ptr() != values.data_ptr()


@pytest.mark.parametrize("operator", ["index_fill", "index_fill_"])
def test_an_operator_that_copies_the_whole_tensor_is_refused(npu, operator):
    values = VALUES.to(npu)
    for value in (0, values[0, 0]):
        with pytest.raises(RuntimeError, match=f"aten::{operator} is not called on an NPU: it writes a copy"):
            getattr(values, operator)(1, IDS.to(npu), value)


def test_an_operator_accepts_host_scalars_and_host_indices(npu):
    values = VALUES.to(npu)
    assert torch.equal((values * torch.tensor(2.0)).cpu(), VALUES * 2), "a scalar operand may be on the host"
    assert torch.equal(values[:, IDS].cpu(), VALUES[:, IDS]), "indices in brackets may be on the host"


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x + VALUES,
        lambda x: x.index_select(1, IDS),
        lambda x: x.index_copy_(1, IDS, x[:, :3].clone()),
        lambda x: x.index_add_(1, IDS, x[:, :3].clone()),
        lambda x: x.index_put_((IDS.to(x.device),), VALUES[:3]),
    ],
    ids=["sum", "index_select", "index_copy_", "index_add_", "index_put_ of values"],
)
def test_an_operator_refuses_other_host_tensors(npu, operator):
    with pytest.raises(RuntimeError, match=r"to be (on|in) the same device"):
        operator(VALUES.to(npu))


def test_the_seed_determines_the_random_numbers(npu):
    generator = torch.Generator(npu).manual_seed(5)
    drawn = [torch.empty(100, device=npu).exponential_(generator=generator).cpu() for _ in range(2)]
    assert not torch.equal(*drawn)
    again = torch.empty(100, device=npu).exponential_(generator=generator.manual_seed(5)).cpu()
    assert torch.equal(again, drawn[0])
    torch.manual_seed(3)
    first = torch.rand(100, device=npu).cpu()
    torch.manual_seed(3)
    assert torch.equal(torch.rand(100, device=npu).cpu(), first)
    assert 0.3 < float(first.mean()) < 0.7
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=npu, generator=torch.Generator())


def test_another_stream_must_wait_before_it_reads_a_result(npu):
    values, side = VALUES.to(npu), torch.npu.Stream(npu)
    torch.npu.synchronize()
    computed = values * 2  # this runs on the default stream
    with torch.npu.stream(side), pytest.raises(RuntimeError, match=r"race: stream \d+ reads .* which wrote it"):
        computed + 0
    computed = values * 2
    side.wait_stream(torch.npu.current_stream(npu))
    with torch.npu.stream(side):
        twice = computed + computed
    assert torch.equal(computed.cpu(), VALUES * 2)
    with pytest.raises(RuntimeError, match=r"race: stream \d+ reads .* which wrote it"):
        twice + 0
    with torch.npu.stream(side):
        twice = computed + computed
        done = torch.npu.Event()
        done.record()
    done.wait()
    assert torch.equal((twice + 0).cpu(), VALUES * 4)


def test_another_stream_must_wait_before_it_reads_an_in_place_change(npu):
    values, side = VALUES.to(npu), torch.npu.Stream(npu)
    torch.npu.synchronize()
    with torch.npu.stream(side):
        values.mul_(3)
    with pytest.raises(RuntimeError, match=r"race: stream \d+ reads .* which wrote it"):
        values + 0
    side.synchronize()
    assert torch.equal((values + 0).cpu(), VALUES * 3)


@pytest.mark.parametrize("size", [24, 2**19], ids=["small", "more than is put off"])
def test_another_stream_must_wait_before_it_overwrites_an_input(npu, size):
    values, side = torch.arange(float(size)).to(npu), torch.npu.Stream(npu)
    torch.npu.synchronize()
    read = values[:2] + 1
    with torch.npu.stream(side), pytest.raises(RuntimeError, match=r"race: stream \d+ writes .* which reads it"):
        values.mul_(3)
    side.wait_stream(torch.npu.current_stream(npu))
    with torch.npu.stream(side):
        values.fill_(3)
    with pytest.raises(RuntimeError, match=r"race: stream \d+ reads .* which wrote it"):
        values[-1] + 0
    assert read.tolist() == [1, 2]


RESULTS = {
    "small": lambda x: x[:4] * 3,
    "large": lambda x: x * 3,
    "with gaps": lambda x: x[:, ::2].mul_(3),
    "large, with gaps": lambda x: x[:, 1:-1].mul_(3),
    "rows": lambda x: torch.ops.npu.npu_scatter_nd_update_(x, torch.arange(8, device=x.device).view(8, 1), x[8:16] * 3)[
        :8
    ],
}


def unwaited() -> dict[str, list[float]]:
    """Return how much of results is unknown to a stream that has not waited, and their largest error after a wait."""
    import torch_npu  # noqa: F401

    found, side = {}, torch.npu.Stream()
    for name, operator in RESULTS.items():
        values = torch.ones(1024, 1024).to("npu")
        torch.npu.synchronize()
        with torch.npu.stream(side):
            tripled = operator(values)
        unseen = (tripled + 0).cpu()
        side.synchronize()
        found[name] = [unseen.isnan().float().mean().item(), float((tripled.cpu() - 3).abs().max())]
    return found


def test_an_allowed_race_reads_poisoned_memory():
    assert call(unwaited, races=0) == {name: [1, 0] for name in RESULTS}


@pytest.mark.parametrize(
    ("operator", "count"),
    [
        (lambda x: x @ x.t(), 0),
        (lambda x: x.argmax(-1), 0),
        (lambda x: x.index_select(1, x[0].long().clamp(0, 5)), 0),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[:, IDS], 1),
        (lambda x: x[VALUES > 0], 1),
        (lambda x: x.index_put_((IDS,), x[0]), 1),
        (lambda x: x.index_put_((x > 0,), x[0, 0]), 1),
        (lambda x: x.index_put_((x[0].long().clamp(0, 3),), x[0]), 0),
        (lambda x: x.unique(), 1),
        (lambda x: x.sum().item(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.tolist(), 1),
    ],
)
def test_operators_synchronize_only_if_the_host_needs_their_result(npu, operator, count):
    values = VALUES.to(npu)
    torch.npu.synchronize()
    library = simulator()
    library.sim_syncs_reset()
    operator(values)
    assert library.sim_syncs() == count


def two_devices() -> dict:
    import torch_npu  # noqa: F401

    first, second = VALUES.to("npu:0"), VALUES.to("npu:1")
    try:
        first + second
        message = ""
    except RuntimeError as error:
        message = str(error)
    moved = first.t().to("npu:1")
    with torch.npu.device(1):
        made = torch.ones(3, device="npu")
    return {
        "message": message,
        "moved": torch.equal(moved.cpu(), VALUES.t()),
        "together": torch.equal((moved.t() + second).cpu(), VALUES * 2),
        "made": [str(made.device), made.tolist()],
        "of the second": str((second + second).device),
    }


def test_two_devices_have_separate_tensors():
    found = call(two_devices, devices=2)
    assert "npu:0 and npu:1" in found.pop("message")
    assert found == {"moved": True, "together": True, "made": ["npu:1", [1.0] * 3], "of the second": "npu:1"}
