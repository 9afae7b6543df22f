"""Tests for attention that processes a few queries at a time, against torch's attention."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mindie_mm.device.cpu.cpu_attention import NAME, attend
from mindie_mm.models import load_model
from tools.random_checkpoint import write_checkpoint


class _Layer(nn.Module):
    is_causal = False


def parts(batch, heads, count, width):
    """Return query, key and value in the memory layout of a tower, which has one row per token."""
    generator = torch.Generator().manual_seed(0)
    shape = batch, count, heads, width
    return [torch.randn(shape, generator=generator).bfloat16().transpose(1, 2) for _ in range(3)]


@pytest.mark.parametrize("count", [1, 128, 129, 256, 300])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_result_equals_that_of_torch(count, scaling):
    given = parts(2, 3, count, 40)
    found, _ = attend(_Layer(), *given, None, scaling=scaling, is_causal=False)
    exact, _ = sdpa_attention_forward(_Layer(), *(part.float() for part in given), None, scaling=scaling)
    assert found.shape == (2, count, 3, 40)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "other",
    [{"attention_mask": torch.ones(300, 300).tril().bool()}, {"is_causal": True}],
    ids=["mask", "causal"],
)
def test_masked_and_causal_attention_is_left_to_torch(other):
    """If some keys are masked, torch's attention is called, so the result is identical bit for bit."""
    settings = {"attention_mask": None, "is_causal": False} | other
    given = parts(1, 2, 300, 16)
    assert torch.equal(attend(_Layer(), *given, **settings)[0], sdpa_attention_forward(_Layer(), *given, **settings)[0])


def test_only_a_bfloat16_tower_uses_this_attention(tmp_path, monkeypatch):
    monkeypatch.setenv("MINDIE_MM_KERNELS", "blocks=yes,wide=no")
    path = write_checkpoint(tmp_path / "small", "small")
    names = {}
    for dtype in ("bfloat16", "float32"):
        config = load_model(path, device="cpu", dtype=dtype).module.config
        names[dtype] = config.vision_config._attn_implementation, config.text_config._attn_implementation
    assert names["bfloat16"] == (NAME, names["float32"][1])
    assert names["float32"][0] == "sdpa"
