"""Tests for the fused operators against plain torch, and plain torch as a fallback for missing operators."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ascend.processes import call

HALF_TOLERANCE = 0.03


class Recorder:
    """A context that records the names of all npu:: and atb:: operators that are called in it."""

    def __new__(cls):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.names: list[str] = []

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace in ("npu", "atb"):
                    self.names.append(func._schema.name.removeprefix(f"{func.namespace}::"))
                return func(*args, **(kwargs or {}))

        return Mode()


def attention(
    heads: int, kv_heads: int, width: int, block_size: int, dtype: str, chunk_size: int | None = None
) -> dict:
    """Run three steps on CPU and NPU: whole prompts, a chunk of a prompt and single tokens, and only single tokens."""
    import torch

    from mindie_mm.device import open_device
    from mindie_mm.device.npu.npu_kernels import works
    from mindie_mm.nn.attention import paged_attention
    from mindie_mm.nn.paged_batch import Chunk, PagedBatch
    from mindie_mm.nn.paged_cache import KVLayer, PagedCache

    devices = torch.device("cpu"), open_device("npu").torch_device
    for name in WRITES:
        works(name, devices[1], getattr(torch, dtype), kv_heads, width, width)
    for name in (FUSED, f"{FUSED} (TND)"):
        works(name, devices[1], getattr(torch, dtype), heads, kv_heads, width, block_size)
    generator = torch.Generator().manual_seed(0)
    blocks = [[5, 1, 7], [2, 9], [4, 0, 3]]
    steps = [
        [Chunk(0, 5, blocks[0]), Chunk(0, block_size + 3, blocks[1]), Chunk(0, 1, blocks[2])],
        [Chunk(5, 6, blocks[0]), Chunk(block_size + 3, block_size + 9, blocks[1]), Chunk(1, 2, blocks[2])],
        [Chunk(6, 7, blocks[0]), Chunk(block_size + 9, block_size + 10, blocks[1]), Chunk(2, 3, blocks[2])],
    ]
    caches = [
        PagedCache.allocate(
            [KVLayer(kv_heads, width)],
            num_blocks=10,
            block_size=block_size,
            dtype=getattr(torch, dtype),
            device=device,
        )
        for device in devices
    ]
    worst, names = 0.0, []
    for chunks in steps:
        count = sum(chunk.stop - chunk.start for chunk in chunks)
        rows = [
            torch.randn(n, count, width, generator=generator).to(getattr(torch, dtype))
            for n in (heads, kv_heads, kv_heads)
        ]
        outs = []
        for device, cache in zip(devices, caches, strict=True):
            with Recorder() as recorder:
                batch = PagedBatch(chunks, cache, device)
                own = (part.to(device) for part in rows)
                out = paged_attention(0, *own, batch, width**-0.5, chunk_size=chunk_size)
            outs.append(out.float().cpu())
        names.append(recorder.names)
        worst = max(worst, float((outs[0] - outs[1]).abs().max()))
    return {"worst": worst, "names": names}


WRITES = ["npu_scatter_pa_kv_cache", "npu_scatter_nd_update_"]
STORE = WRITES[:1]
FUSED = "npu_fused_infer_attention_score"


@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        # If the head size is 128, one call computes all rows.
        ((4, 2, 128, 128, "bfloat16"), [[FUSED], [FUSED], [FUSED]]),
        ((8, 1, 128, 128, "float16"), [[FUSED], [FUSED], [FUSED]]),
        # For other head sizes, one call computes all single rows, and each longer chunk needs its own call.
        ((4, 2, 64, 128, "bfloat16"), [[FUSED] * 3, [FUSED] * 2, [FUSED]]),
        ((3, 3, 32, 256, "float16"), [[FUSED] * 3, [FUSED] * 2, [FUSED]]),
        ((8, 1, 128, 256, "float16"), [[FUSED] * 3, [FUSED] * 2, [FUSED]]),
        # Plain torch computes calls that the operator refuses: float32, other block sizes and other head sizes.
        ((4, 2, 64, 128, "float32"), [[], [], []]),
        ((4, 2, 128, 16, "bfloat16"), [[], [], []]),
        ((4, 2, 72, 128, "bfloat16"), [[], [], []]),
    ],
)
def test_attention_over_pages_equals_plain_torch(shape, calls):
    found = call(attention, *shape)
    assert found["worst"] < (1e-5 if shape[-1] == "float32" else HALF_TOLERANCE)
    assert found["names"] == [STORE + own for own in calls]


def test_attention_within_chunks_uses_the_same_operators():
    found = call(attention, 4, 2, 128, 128, "bfloat16", 128)
    assert found["worst"] < HALF_TOLERANCE
    assert found["names"] == [[*STORE, FUSED]] * 3


def layers() -> dict:
    import torch

    with torch.inference_mode():
        return layers_in_inference()


def layers_in_inference() -> dict:
    import torch
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from mindie_mm.device import open_device
    from mindie_mm.device.npu import npu_layers
    from mindie_mm.nn.layers import RMSNorm

    device = open_device("npu").torch_device
    kinds = [Qwen2RMSNorm, modeling_llama.LlamaRMSNorm, RMSNorm, Gemma3RMSNorm]
    named = [(f"{kind.__name__} {width}", kind, width) for kind in kinds for width in (48, 64)]
    torch.manual_seed(0)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.ModuleDict({name: kind(width, 1e-6) for name, kind, width in named})
        for norm in model.values():
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        model.to(device, dtype)
        values = {width: torch.rand(3, 5, width, device=device, dtype=dtype) - 0.5 for width in (48, 64)}
        expected = {name: model[name](values[width]) for name, _, width in named}
        npu_layers.fuse(model)
        for name, _, width in named:
            with Recorder() as recorder:
                off = (model[name](values[width]).float() - expected[name].float()).abs().max().item()
            found[f"{name} {dtype}"] = [recorder.names, off]

    config = modeling_llama.LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    layer = torch.nn.ModuleList([modeling_llama.LlamaAttention(config, 0)])
    q, k, cos, sin = (torch.randn(1, *rest) for rest in ((2, 7, 32), (1, 7, 32), (7, 32), (7, 32)))
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    npu_layers.fuse(layer)
    npu_layers.fuse(layer)  # the second call must not wrap anything again
    with Recorder() as recorder:
        rotated = modeling_llama.apply_rotary_pos_emb(*(part.to(device) for part in (q, k, cos, sin)))
        own = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        narrow = [part[..., :12].contiguous().to(device) for part in (q, k, cos, sin)]
        modeling_llama.apply_rotary_pos_emb(*narrow)
    found["rotation"] = [
        recorder.names[-2:],
        max(float((a.cpu() - b).abs().max()) for a, b in zip(rotated, expected, strict=True)),
        all(torch.equal(a, b) for a, b in zip(own, expected, strict=True)),
        recorder.names.count("npu_rotary_mul"),
    ]
    return found


def test_norms_and_rotations_with_equal_results_are_replaced():
    found = call(layers)
    names, off, own, calls = found.pop("rotation")
    assert names == ["npu_rotary_mul"] * 2
    assert off < 1e-6
    assert own  # on the host, the result is unchanged
    assert calls == 3  # the trial, the queries and the keys; narrower heads are rotated without the operator
    for name, (called, off) in found.items():
        assert called == ([] if name.startswith("Gemma3") else ["npu_rms_norm"]), name
        assert off < (1e-5 if name.endswith("float32") else HALF_TOLERANCE), name


def windows(count: int) -> dict:
    """Run a layer of a tower with `count` windows of one to three patches, on the CPU and on the NPU."""
    import torch
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention

    from mindie_mm.device import open_device
    from mindie_mm.device.npu import npu_layers

    device = open_device("npu").torch_device
    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(hidden_size=64, num_heads=4, attn_implementation="sdpa")
    layer = torch.nn.ModuleList([Qwen2_5_VLVisionAttention(config)]).to(torch.bfloat16)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), (torch.arange(count) % 3 + 1).cumsum(0).int()])
    hidden = torch.randn(int(bounds[-1]), 64, dtype=torch.bfloat16)
    angles = torch.randn(len(hidden), 16).float()
    with torch.inference_mode():
        places = {"position_embeddings": (angles.cos(), angles.sin())}
        expected = layer[0](hidden, bounds, **places)
        npu_layers.fuse(layer.to(device))
        places = {"position_embeddings": (angles.cos().to(device), angles.sin().to(device))}
        with Recorder() as recorder:
            found = layer[0](hidden.to(device), bounds, **places)
    return {"names": recorder.names, "off": (found.float().cpu() - expected.float()).abs().max().item()}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "calls"), [(1, 1), (1024, 1), (2500, 3)])
def test_a_tower_may_have_more_windows_than_one_call_accepts(count, calls):
    """Qwen2.5-VL has 1036 windows for 3136x4088 pixels, and 2304 windows for 768 frames of 336x140 pixels."""
    found = call(windows, count)
    assert found["names"] == [FUSED] * calls
    assert found["off"] < HALF_TOLERANCE


def left_alone() -> dict[str, bool]:
    import sys
    from types import ModuleType

    import torch
    from torch import nn
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from mindie_mm.device import open_device
    from mindie_mm.device.npu import npu_layers

    class GatedRMSNorm(Qwen2RMSNorm):
        def forward(self, hidden, gate):
            return super().forward(hidden) * gate

    class BareRMSNorm(nn.Module):
        eps = 1e-6

    class Turned(nn.Module):
        """A layer whose Python module has a rotary function with other arguments than in transformers."""

        __module__ = "turned"

    sys.modules["turned"] = source = ModuleType("turned")
    source.apply_rotary_pos_emb = rotation = lambda q: q
    apart = Qwen2RMSNorm(48)
    apart.register_forward_hook(lambda *_: None)
    parts = {"gated": GatedRMSNorm(48), "bare": BareRMSNorm(), "apart": apart, "plain": Qwen2RMSNorm(48)}
    model = nn.ModuleDict({**parts, "turned": Turned()}).to(open_device("npu").torch_device)
    on_host = nn.ModuleDict({"plain": Qwen2RMSNorm(48)})
    npu_layers.fuse(model)
    npu_layers.fuse(on_host)
    found = {name: type(model[name]) is type(part) for name, part in parts.items()}
    return found | {
        "on the host": isinstance(on_host["plain"], Qwen2RMSNorm),
        "rotation": source.apply_rotary_pos_emb is rotation,
        "works": torch.isfinite(model["plain"](torch.ones(2, 48, device="npu"))).all().item(),
    }


def test_layers_of_another_kind_are_not_replaced():
    expected = dict.fromkeys(["gated", "bare", "apart", "on the host", "rotation", "works"], True) | {"plain": False}
    assert call(left_alone) == expected


def short_of_memory() -> list[object]:
    import pytest
    import torch

    from mindie_mm.device import open_device
    from mindie_mm.device.npu import npu_kernels

    device, trials = open_device("npu").torch_device, npu_kernels._TRIALS
    own = trials["npu_rms_norm"]

    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    trials["npu_rms_norm"] = fails, own[1]
    with pytest.raises(torch.OutOfMemoryError):
        npu_kernels.works("npu_rms_norm", device, torch.bfloat16, 48)
    trials["npu_rms_norm"] = own
    return [npu_kernels.works("npu_rms_norm", device, torch.bfloat16, 48)]


def test_a_trial_without_memory_does_not_rule_out_the_operator():
    assert call(short_of_memory) == [True]


def with_log_lines(function, *arguments) -> tuple[Any, list[str]]:
    """Return the result of the function, and the log lines about operators."""
    import logging

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("mindie_mm.device.npu.npu_kernels").addHandler(Kept())
    return function(*arguments), lines


def twice() -> list[dict]:
    return [attention(4, 2, 128, 128, "bfloat16") for _ in range(2)]


SAYS = " does not run on npu:0 in torch.{}; plain torch is used instead: "


@pytest.mark.parametrize(
    "names",
    [[FUSED], WRITES, [f"{name}@128" for name in WRITES], [FUSED, *WRITES]],
)
def test_a_missing_operator_is_logged_once_and_replaced_by_plain_torch(names):
    found, lines = call(with_log_lines, twice, missing=",".join(names))
    names = [name.partition("@")[0] for name in names]
    assert max(one["worst"] for one in found) < HALF_TOLERANCE
    assert not {*names} & {name for one in found for step in one["names"] for name in step}
    # Each layout of attention is tried separately.
    # Likewise, another operator may write keys and values.
    lines = [line.replace("npu_scatter_nd_update_ is used", "plain torch is used") for line in lines]
    packed = [line for line in lines if line.startswith(f"{FUSED} (TND)")]
    assert len(packed) == (FUSED in names)
    reasons = [line.partition(SAYS.format("bfloat16")) for line in lines if line not in packed]
    assert sorted(name for name, _, reason in reasons if reason) == sorted(names)


WRONG = " gives wrong results on npu:0 in torch.{}; plain torch is used instead: "


@pytest.mark.parametrize("fault", ["mean", "mask lost", "undefined row"])
def test_attention_with_wrong_results_is_replaced_by_plain_torch(fault):
    found, lines = call(with_log_lines, twice, wrong=f"{FUSED}:{fault}")
    assert max(one["worst"] for one in found) < HALF_TOLERANCE
    assert not {FUSED} & {name for one in found for step in one["names"] for name in step}
    packed = f"{FUSED} (TND){WRONG.format('bfloat16')}".replace("plain torch", "its layout BSH")
    assert len(lines) == 2
    assert {line.partition("its results")[0] for line in lines} == {packed, FUSED + WRONG.format("bfloat16")}


def test_writes_in_another_format_are_replaced():
    """The first operator is replaced by the second, and the second by plain torch."""
    for wrong, calls in ((WRITES[:1], WRITES[1:] * 2), (WRITES, [])):
        found, lines = call(with_log_lines, twice, wrong=",".join(f"{name}:nz" for name in wrong))
        assert max(one["worst"] for one in found) < HALF_TOLERANCE
        assert [name for name in found[0]["names"][0] if name != FUSED] == calls
        for name, line, instead in zip(wrong, lines, ["npu_scatter_nd_update_", "plain torch"], strict=False):
            says = WRONG.format("bfloat16").replace("plain torch", instead)
            assert line.startswith(name + says + "its results differ")


TOWER = [FUSED, "_npu_flash_attention_unpad", "npu_fusion_attention"]
"""Operators for towers, in the order in which they are tried."""


@pytest.mark.parametrize("num_wrong", [1, 2, 3])
@pytest.mark.parametrize("fault", ["mean", "undefined row"])
def test_tower_attention_with_wrong_results_is_replaced(fault, num_wrong):
    found, lines = call(with_log_lines, windows, 3, wrong=",".join(f"{one}:{fault}" for one in TOWER[:num_wrong]))
    assert found["names"] == TOWER[num_wrong : num_wrong + 1]
    assert found["off"] < HALF_TOLERANCE
    assert len(lines) == num_wrong
    for name, line in zip(TOWER, lines, strict=False):
        assert line.startswith(name)
        assert " gives wrong results on npu:0 in torch.bfloat16; " in line
    assert all(f"; {name} " in line for name, line in zip(TOWER[1:], lines, strict=False))


def tower() -> float:
    """Return the difference between the CPU and the NPU of a tower that does not pack its images."""
    import torch
    from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipAttention

    from mindie_mm.device import open_device
    from mindie_mm.device.npu import npu_layers

    torch.manual_seed(0)
    config = SiglipVisionConfig(hidden_size=64, num_attention_heads=4, attn_implementation="sdpa")
    layer = torch.nn.ModuleList([SiglipAttention(config)]).to(torch.bfloat16).eval()
    hidden = torch.randn(2, 70, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = layer[0](hidden)[0]
        npu_layers.fuse(layer.to(open_device("npu").torch_device))
        found = layer[0](hidden.to("npu"))[0]
    return (found.float().cpu() - expected.float()).abs().max().item()


@pytest.mark.parametrize("fault", ["mean", "undefined row"])
def test_wrong_results_of_torchs_attention_are_replaced_by_products_and_softmax(fault):
    off, (line,) = call(with_log_lines, tower, wrong=f"npu_fusion_attention_v3:{fault}")
    assert off < HALF_TOLERANCE
    assert line.startswith("scaled_dot_product_attention" + WRONG.format("bfloat16"))


def test_correct_results_of_torchs_attention_are_kept():
    off, lines = call(with_log_lines, tower)
    assert off < HALF_TOLERANCE
    assert not lines


@pytest.mark.parametrize("operator", ["npu_rms_norm", "npu_rotary_mul"])
def test_layers_with_wrong_results_are_not_replaced(operator):
    found, lines = call(with_log_lines, layers, wrong=f"{operator}:undefined row")
    _, off, own, _ = found.pop("rotation")
    assert off < 1e-6
    assert own
    for name, (called, off) in found.items():
        assert operator not in called
        assert off < (1e-5 if name.endswith("float32") else HALF_TOLERANCE), name
    assert all(line.startswith(operator + " gives wrong results") for line in lines)
    assert lines


def test_attention_uses_the_layout_bsh_if_rows_cannot_be_packed():
    """If packed rows cannot have pages, as in a CANN that follows _op_plugin_docs, the layout is BSH."""
    found, lines = call(with_log_lines, twice, missing=f"{FUSED}@128")
    assert [one["names"] for one in found] == [[STORE + [FUSED] * calls for calls in (3, 2, 1)]] * 2
    assert max(one["worst"] for one in found) < HALF_TOLERANCE
    (line,) = lines
    assert line.startswith(f"{FUSED} (TND) does not run on npu:0 in torch.bfloat16; its layout BSH is used instead: ")


def sizes() -> list[bool]:
    """Return which batch sizes are accepted, for heads that can be packed and for other heads."""
    import torch

    from mindie_mm.device import Rows, Uploads, kernels_of, open_device

    device = open_device("npu").torch_device
    taken = []
    for width in (128, 64):
        query = torch.zeros(4, 1, width, dtype=torch.bfloat16, device=device)
        pages = torch.zeros(1, 128, 2, width, dtype=torch.bfloat16, device=device)
        attends = kernels_of(device).attends
        for count, length in ((4096, 2**18 + 1), (4097, 2**18), (1, 2**18 + 1)):
            rows = Rows.build([1] * count, [length] * count, [[0]] * count, 128, Uploads(device))
            taken.append(attends(query, pages, pages, rows))
    return taken


def test_plain_torch_computes_batches_that_the_operator_refuses():
    """At most 4096 sequences can be packed. A row that is not packed can have at most 262144 keys."""
    assert call(sizes) == [True, True, True, False, True, False]


def scaled() -> list[str]:
    """Return the operators that run in a model whose cosines are scaled, as with YaRN."""
    import torch
    from transformers.models.llama import modeling_llama

    from mindie_mm.device.npu import npu_layers

    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    config = modeling_llama.LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, rope_parameters=rope
    )
    model = modeling_llama.LlamaModel(config).to("npu")
    npu_layers.fuse(model)
    with Recorder() as recorder, torch.inference_mode():
        model(torch.arange(5).unsqueeze(0).to("npu"))
    return recorder.names


def test_plain_torch_rotates_if_cosines_exceed_one():
    """The operator's documentation allows only cosines in [-1, 1]."""
    names = call(scaled)
    assert "npu_rms_norm" in names
    assert "npu_rotary_mul" not in names


@pytest.mark.parametrize("missing", ["npu_rms_norm", "npu_rms_norm@48"])
def test_a_norm_without_its_operator_is_kept(missing):
    """The norm stays as it was, at every width or only at the missing width. The reason is logged once per dtype."""
    found, lines = call(with_log_lines, layers, missing=missing)
    del found["rotation"]
    for name, (called, off) in found.items():
        runs = "@" in missing and " 64 " in name and not name.startswith("Gemma3")
        assert called == (["npu_rms_norm"] if runs else []), name
        assert off < (1e-5 if name.endswith("float32") else HALF_TOLERANCE), name
    assert [line.partition(": ")[0] + ": " for line in lines] == [
        f"npu_rms_norm{SAYS.format(dtype)}" for dtype in ("float32", "bfloat16")
    ]


@pytest.mark.parametrize("missing", ["npu_rotary_mul", "npu_rotary_mul@32"])
def test_a_rotation_without_its_operator_uses_plain_torch(missing):
    found, lines = call(with_log_lines, layers, missing=missing)
    _, off, own, calls = found["rotation"]
    assert calls == 1, "the operator is called only in the trial"
    assert off < 1e-6
    assert own
    (line,) = lines
    assert line.startswith("npu_rotary_mul" + SAYS.format("float32"))


def test_without_operators_a_tower_computes_each_window_separately():
    found, lines = call(with_log_lines, windows, 3, missing=",".join(TOWER))
    assert found["names"] == []
    assert found["off"] < HALF_TOLERANCE
    assert len(lines) == 3
    assert all(" does not run on npu:0 in torch.bfloat16; " in line for line in lines)
    assert "SelfAttentionOperation CreateOperation failed!" in lines[1], "torch_npu without NNAL says this"


def widths() -> dict[int, list[float]]:
    """Return the difference of each operator for towers from plain torch, by the width of a head."""
    import torch

    from mindie_mm.device import open_device
    from mindie_mm.device.npu import npu_kernels
    from mindie_mm.device.npu.packed_attention import OPERATORS

    device = open_device("npu").torch_device
    return {
        width: [npu_kernels._difference(name, device, torch.float16, 16, width) for name in OPERATORS]
        for width in (16, 64, 72, 80, 128, 192)
    }


def test_operators_for_towers_accept_every_width_of_a_head():
    """Heads are widened to 64, 128 or 192, because CANN documents no others."""
    assert {width: max(off) < 0.01 for width, off in call(widths).items()} == dict.fromkeys(
        (16, 64, 72, 80, 128, 192), True
    )


def examined() -> list[tuple[str, str, str]]:
    """Return the subject, status and text of doctor's findings about operators."""
    from mindie_mm.device import open_device

    return [(one.subject, one.status, one.found) for one in open_device("npu").operators()]


def test_doctor_shows_the_difference_and_the_time_of_each_operator():
    found = call(examined, wrong="npu_rotary_mul:undefined row", missing="npu_rms_norm")
    assert len(found) == 40
    for subject, status, text in found:
        if subject.startswith("npu_rms_norm"):
            assert status == "warning"
            assert "aclnnRmsNorm" in text
        else:
            assert status == ("warning" if subject.startswith("npu_rotary_mul") else "ok"), text
            assert re.fullmatch(r"differs by \S+ \(limit 0\.0[15]\), \d+\.\d{3} ms", text)
