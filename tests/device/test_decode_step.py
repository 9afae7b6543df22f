"""Tests for decode steps in compiled code."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mindie_mm.device import FLOAT8, QuantizedWeight, StaticInput, open_device
from mindie_mm.device.cpu import decode_step
from mindie_mm.device.cpu.cpu_quantized import CPUQuantizedLinear
from mindie_mm.device.cpu.decode_step import GROUP, MOST_ROWS, DecodeStep, NotCompiled, StepLinear
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.models import load_model
from mindie_mm.nn.angles import Angles
from mindie_mm.nn.attention import CHUNKED
from mindie_mm.nn.decoder_layer import fuse
from mindie_mm.nn.paged_batch import Chunk, PagedBatch
from mindie_mm.nn.paged_cache import KVLayer, PagedCache
from mindie_mm.settings.config import EngineConfig
from tests.models.steps import step_logits
from tests.nn.test_decoder_layer import MODELS, WINDOW, text_model

CPU = torch.device("cpu")
INSTRUCTIONS: dict[str, list[Any]] = {
    "DEFAULT": ["generic"],
    "AVX2": ["generic", "avx2"],
    "AVX512": ["generic", pytest.param("avx2", marks=pytest.mark.slow), "avx512"],
}
"""The libraries that a processor can run, by torch's name of its instructions."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: kind for name, kind in MODELS.items() if "chunks" not in name and "experts" not in name},
    "gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "many heads for each key": ("Llama", {"num_attention_heads": 16, "num_key_value_heads": 1}),
}
WIDE = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}
WEIGHTS = ("auto", "int8")
GROUPS = {"groups of 32": 32, "groups of 128": 128, "4 bits": 0, "4 bits in 32": 32, "4 bits in 64": 64, "codes": 64}
"""Number of inputs with the same scale and zero point. 0 means all inputs."""
FLOATS = {"float8": 0, "float8 in 32": 32, "float8 in 128": 128}
"""The same of weights in FP8."""
QUANTIZED = ("int8", *GROUPS, *FLOATS, "by largest", "constants")
"""Kinds of quantized weights. Two of them round inputs to 8 bits."""
LENGTHS = (1, 11, 33, 5, 8, 2, 70, 9)
"""Numbers of tokens of the sequences of a step, including the new token."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ["generic"]))
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.setenv("MINDIE_MM_KERNELS", f"step={name}")
    if decode_step._load(name) is None:
        pytest.skip("the package was installed without a C compiler")
    return name


Part = tuple[int, int, int]
"""Number of a sequence, and start and stop of the tokens that a step computes."""


def last(row: int) -> Part:
    return row, LENGTHS[row] - 1, LENGTHS[row]


def quantized(plain: nn.Linear, kind: str) -> CPUQuantizedLinear:
    if kind == "int8":
        return CPUQuantizedLinear.of(plain)
    outputs, inputs = plain.weight.shape
    groups = plain.weight.detach().float().view(outputs, -1, (GROUPS | FLOATS).get(kind) or inputs)
    if kind in FLOATS:
        scales = groups.abs().amax(2) / torch.finfo(FLOAT8).max
        values = (groups / scales.unsqueeze(2)).to(FLOAT8).view(outputs, inputs)
        return CPUQuantizedLinear(QuantizedWeight(values, scales), plain.bias)
    most = 7 if "4" in kind or kind == "codes" else 127
    scales = groups.abs().amax(2) / most
    values = (groups / scales.unsqueeze(2)).round().to(torch.int8)
    zeros = static = None
    if kind in GROUPS:
        zeros = (torch.arange(scales.numel()) % 5).view_as(scales).float()
        values = (values + zeros.unsqueeze(2)).clamp(-most, most).to(torch.int8)
    values = values.view(outputs, inputs)
    if kind == "constants":
        zero, step = 3.0, 0.03  # of an input of about the standard normal distribution
        sums = (-zero * values.sum(1)).int()
        static = StaticInput(step, zero, scales.flatten() * step, sums, has_bias=False)
    weight = QuantizedWeight(values, scales, zeros, None, kind not in GROUPS, static)
    if most == 7:
        weight = weight.packed()
        assert weight.values.shape == (outputs, inputs // 2)
    if kind == "codes":
        weight = replace(weight, zeros=None, codes=torch.randn(16, generator=torch.Generator().manual_seed(0)))
    return CPUQuantizedLinear(weight, plain.bias)


def quantize(model: Any, kind: str) -> None:
    """Replace the linear layers of the decoder layers."""
    for layer in model.layers:
        for parent in [*layer.modules()]:
            for name, part in [*parent.named_children()]:
                if isinstance(part, nn.Linear):
                    setattr(parent, name, quantized(part, kind))


class Steps:
    """A model, and sequences whose last tokens are computed in a step. The first blocks of two sequences are shared."""

    def __init__(self, model: Any, block_size: int = 4, weights: str = "auto") -> None:
        if weights != "auto":
            quantize(model, weights)
        assert fuse(model) == len(model.layers)
        self.model = model
        config = model.config
        kept = KVLayer(config.num_key_value_heads, model.layers[0].head_dim)
        counts = [-(-length // block_size) for length in LENGTHS]
        self.cache = PagedCache.allocate(
            [kept] * len(model.layers), num_blocks=sum(counts), block_size=block_size, dtype=model.dtype, device=CPU
        )
        self.cache.memory[0].fill_(torch.nan)  # what no sequence has written is never read
        order = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist())
        self.blocks = [[next(order) for _ in range(count)] for count in counts]
        generator = torch.Generator().manual_seed(1)
        width = config.hidden_size
        self.hidden = [torch.randn(n, width, generator=generator).to(model.dtype) for n in LENGTHS]
        if (shared := 2 * block_size) < LENGTHS[2]:
            self.hidden[6][:shared] = self.hidden[2][:shared]
            self.blocks[6][:2] = self.blocks[2][:2]
        for row, length in enumerate(LENGTHS):
            if length > 1:
                self._torch([Chunk(0, length - 1, self.blocks[row])], self.hidden[row][:-1], torch.arange(length - 1))

    def _torch(self, chunks: list[Chunk], hidden: Tensor, positions: Tensor) -> Tensor:
        with torch.inference_mode():
            out = self.model(
                inputs_embeds=hidden.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                paged=PagedBatch(chunks, self.cache, CPU),
            )
        result: Tensor = out.last_hidden_state[0]
        return result

    def _batch(self, parts: list[Part]) -> tuple[list[Chunk], Tensor, Tensor]:
        chunks = [Chunk(start, stop, self.blocks[row]) for row, start, stop in parts]
        hidden = torch.cat([self.hidden[row][start:stop] for row, start, stop in parts])
        return chunks, hidden, torch.cat([torch.arange(start, stop) for _, start, stop in parts])

    def torch(self, rows: list[int]) -> Tensor:
        """Return the states of the last tokens without compiled code, which computes each sequence alone.

        Numbers that no sequence has written become 0, because torch reads the rest of a block under a mask.
        """
        self.cache.memory[0].nan_to_num_()
        return torch.cat([self._torch(*self._batch([last(row)])) for row in rows])

    def compiled(self, rows: list[int], step: DecodeStep | None = None) -> Tensor:
        """Return the states of the last tokens."""
        return self.compiled_parts([last(row) for row in rows], step)

    def compiled_parts(self, parts: list[Part], step: DecodeStep | None = None) -> Tensor:
        chunks, hidden, positions = self._batch(parts)
        angles = Angles.of(*self.model.rotary_emb(hidden.unsqueeze(0), positions.unsqueeze(0)))
        table = PagedBatch(chunks, self.cache, CPU).decode_table()
        assert table is not None
        with torch.inference_mode():
            return (step or self.step()).run(hidden, (angles.cos, angles.sin), *table, self.cache.memory[0])

    def step(self) -> DecodeStep:
        norm = self.model.norm
        layers = [layer.step_layer() for layer in self.model.layers]
        return DecodeStep(layers, norm.weight, norm.variance_epsilon)


ALL = [*range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        # Attention and norms do not depend on the weights, so the shorter suite combines few of them.
        pytest.param(
            case, weights, marks=[pytest.mark.slow] if weights != "auto" and case != "llama with biases" else []
        )
        for case, weights in itertools.product(KINDS, ("auto", "int8", "groups of 32", "4 bits"))
    ],
)
def test_a_compiled_step_equals_torch(case: str, weights: str, instructions: str) -> None:
    name, settings = KINDS[case]
    settings = {**settings, **(WIDE if "4 bits" in weights else {})}
    models = (text_model(name, dtype, **settings) for dtype in (torch.float32, torch.bfloat16))
    exact, rounded = (Steps(model, weights=weights) for model in models)
    ours, expected = exact.compiled(ALL), exact.torch(ALL)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    off, theirs = ((one.float() - expected).norm() for one in (rounded.compiled(ALL), rounded.torch(ALL)))
    assert off <= theirs


@pytest.mark.parametrize("weights", ["by largest", "constants"])
def test_a_compiled_step_rounds_inputs_as_torch(weights: str, instructions: str) -> None:
    """A value between two rounded values may become either of them, so the results of some rows differ a little."""
    steps = Steps(text_model("Qwen2"), weights=weights)
    ours, theirs = steps.compiled(ALL), steps.torch(ALL)
    plain = Steps(text_model("Qwen2"), weights="int8").compiled(ALL)
    assert (ours - theirs).norm() <= 0.1 * (ours - plain).norm()
    difference = (ours - theirs).abs().amax(1)
    assert difference.median() <= 1e-5
    assert (ours - plain).abs().amax(1).median() >= 1e-3


@pytest.mark.parametrize("block_size", [3, 128])
def test_blocks_may_have_any_size(block_size: int, instructions: str) -> None:
    steps = Steps(text_model("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1), block_size)
    torch.testing.assert_close(steps.compiled(ALL), steps.torch(ALL), rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", ["auto", *QUANTIZED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_neighbors(dtype: torch.dtype, weights: str, instructions: str) -> None:
    steps = Steps(text_model("Qwen3", dtype, **WIDE), weights=weights)
    step = steps.step()
    alone = [steps.compiled([row], step)[0] for row in ALL]
    for rows in (ALL, ALL[::-1], *(ALL[:count] for count in range(2, len(ALL))), ALL + ALL[:3]):
        together = steps.compiled(rows, step)
        assert all(torch.equal(one, alone[row]) for row, one in zip(rows, together, strict=True))
    steps.hidden[3][-1] = torch.nan
    spoiled = steps.compiled(ALL, step)
    assert [row for row in ALL if not spoiled[row].isfinite().all()] == [3]
    assert all(torch.equal(spoiled[row], alone[row]) for row in ALL if row != 3)


@pytest.mark.parametrize("case", ["qwen2 with windows", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_one_sequence_have_the_same_bits_as_one_by_one(
    dtype: torch.dtype, case: str, instructions: str
) -> None:
    name, settings = KINDS[case]
    steps = Steps(text_model(name, dtype, **settings))
    step = steps.step()
    parts = [(2, 30, 33), (6, 66, 70), last(1)]  # the tokens of two sequences are in two blocks each
    alone = torch.cat(
        [steps.compiled_parts([(row, i, i + 1)], step) for row, start, stop in parts for i in range(start, stop)]
    )
    stored = steps.cache.memory[0].clone()
    for row, start, stop in parts:
        own = steps.cache.memory[0][:, steps.blocks[row]].flatten(1, 2)
        own[:, start:stop] = torch.nan
        steps.cache.memory[0][:, steps.blocks[row]] = own.view(len(own), len(steps.blocks[row]), -1, *own.shape[2:])
    assert torch.equal(steps.compiled_parts(parts, step), alone)
    assert torch.equal(steps.cache.memory[0].nan_to_num(), stored.nan_to_num())
    whole = [(7, 0, LENGTHS[7] - 1)]
    expected = torch.cat([steps.compiled_parts([(7, i, i + 1)], step) for i in range(LENGTHS[7] - 1)])
    assert torch.equal(steps.compiled_parts(whole, step), expected)


def test_new_keys_and_values_are_stored_as_in_torch(instructions: str) -> None:
    ours, theirs = (Steps(text_model("Qwen3")) for _ in range(2))
    ours.compiled(ALL)
    theirs.torch(ALL)
    torch.testing.assert_close(ours.cache.memory[0].nan_to_num(), theirs.cache.memory[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [384, 208])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", *QUANTIZED])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_multiplies_few_rows(width: int, weights: str, bias: bool, instructions: str) -> None:
    linear: Any = nn.Linear(width, 345, bias=bias).requires_grad_(False)
    rows = torch.randn(MOST_ROWS, width, generator=torch.Generator().manual_seed(0))
    given = rows.clone()
    if weights in QUANTIZED:
        if width % 64:
            with pytest.raises(NotCompiled, match="not a multiple of 64"):
                StepLinear(quantized(linear, "int8"))
            with pytest.raises(NotCompiled, match="not a multiple of 128"):
                StepLinear(quantized(linear, "4 bits"))
            return
        linear = quantized(linear, weights)
    else:
        linear.to(getattr(torch, weights))
    ours = StepLinear(linear)
    exact = nn.functional.linear(rows.double(), linear.weight.double(), linear.bias.double() if bias else None)
    if weights in ("by largest", "constants"):
        assert 1e-3 < (linear(rows) - exact).norm() / exact.norm() < 0.1
        exact = linear(rows)
    most = max(count for count in range(1, MOST_ROWS + 1) if ours.takes(rows[:count]))
    assert most in ((GROUP, MOST_ROWS) if weights in ("by largest", "constants") else (MOST_ROWS,))
    for count in range(1, MOST_ROWS + 1):
        torch.testing.assert_close(ours(rows[:count]), exact[:count].float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(rows, given)
    assert not ours.takes(torch.cat([rows, rows]))


def test_every_number_of_8_bits_is_read(instructions: str) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOAT8).repeat(4, 1)
    numbers = numbers.where(numbers.float().isfinite(), torch.zeros(()).to(FLOAT8))
    scales = torch.tensor([1.0, 2.0**-100, 100.0, 3e-5]).unsqueeze(1)
    layer = StepLinear(CPUQuantizedLinear(QuantizedWeight(numbers, scales), None))
    exact = (numbers.float() * scales).T
    for start in range(0, 256, MOST_ROWS):
        assert torch.equal(layer(torch.eye(256)[start : start + MOST_ROWS]), exact[start : start + MOST_ROWS])


def test_a_forked_process_starts_its_own_threads() -> None:
    if decode_step._load(decode_step._best()) is None:
        pytest.skip("the package was installed without a C compiler")
    linear = StepLinear(nn.Linear(512, 1024).requires_grad_(False))
    rows = torch.randn(2, 512)
    expected = linear(rows)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(torch.equal(linear(rows), expected) for _ in range(50)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


TASKS = Path("/proc/self/task")
"""Folders of the threads of this process."""


def times_slept(tasks: set[Path]) -> int:
    """Return how often these threads have waited."""
    found = 0
    for task in tasks:
        status = (task / "status").read_text(encoding="utf-8")
        found += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def wakes_with_fewer_threads() -> int:
    linear, rows = StepLinear(nn.Linear(512, 1024).requires_grad_(False)), torch.randn(1, 512)
    torch.set_num_threads(4)
    before = {*TASKS.iterdir()}
    linear(rows)
    own = {*TASKS.iterdir()} - before
    assert len(own) == 3
    torch.set_num_threads(2)
    time.sleep(0.1)  # all of them fall asleep
    start = times_slept(own)
    for _ in range(100):
        linear(rows)
        time.sleep(0.002)
    return times_slept(own) - start


def test_threads_above_a_reduced_number_are_not_woken() -> None:
    if decode_step._load(decode_step._best()) is None:
        pytest.skip("the package was installed without a C compiler")
    pid = os.fork()
    if pid == 0:  # torch's own threads do not exist here
        os._exit(0 if 0 < wakes_with_fewer_threads() <= 150 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_steps_of_several_threads_do_not_disturb_each_other(instructions: str) -> None:
    linears = [StepLinear(nn.Linear(256, 512).requires_grad_(False)) for _ in range(3)]
    rows = torch.randn(2, 256)
    expected = [linear(rows) for linear in linears]
    with ThreadPoolExecutor(3) as pool:
        results = pool.map(lambda linear: [linear(rows) for _ in range(100)], linears)
    for one, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(each, wanted) for each in one)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Llama", {"layer_types": [CHUNKED, "full_attention"], "attention_chunk_size": 4}, "within chunks"),
        ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2}, "experts"),
        ("Llama", {"head_dim": 8}, "8 dimensions, which is not a multiple of 16"),
        ("Llama", {"intermediate_size": 90}, "90 dimensions, which is not a multiple of 16"),
        ("Llama", {"hidden_act": "relu"}, "neither SiLU nor GELU"),
    ],
)
def test_other_layers_are_refused_with_the_reason(name: str, settings: dict[str, Any], reason: str) -> None:
    model = text_model(name, **settings)
    fuse(model)
    with pytest.raises(NotCompiled, match=reason):
        DecodeStep([layer.step_layer() for layer in model.layers], model.norm.weight, 1e-6)


def test_a_replaced_linear_layer_is_refused() -> None:
    model = text_model("Llama")
    fuse(model)
    layers = [layer.step_layer() for layer in model.layers]
    model.layers[0].down.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(NotCompiled, match="does more than a product"):
        DecodeStep(layers, model.norm.weight, 1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_embedded_checkpoint_runs_compiled_steps(
    weights: str, instructions: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model(None, "cpu", "float32", weights=weights)
    assert f"compiled code ({instructions}) runs steps of up to {MOST_ROWS} tokens" in caplog.text
    ids = torch.from_numpy(np.random.default_rng(0).integers(8, 200, 77))
    ran: list[int] = []
    run = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", lambda *given: ran.append(len(given[1])) or run(*given))
    torch.testing.assert_close(step_logits(model, ids), model.logits(ids)[-1], rtol=0, atol=1e-4)
    assert ran == [1]
    (finding,) = open_device("cpu").decode_steps()
    assert finding.status == "ok"
    assert f"compiled code ({instructions})" in finding.found


def test_torch_runs_the_steps_without_the_library(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_step, "_load", lambda _: None)
    with caplog.at_level(logging.INFO):
        model = load_model(None, "cpu", "float32")
    assert "torch runs all decode steps: the package has no decode_step_" in caplog.text
    (finding,) = open_device("cpu").decode_steps()
    assert (finding.status, finding.found) == ("warning", "torch runs all decode steps")
    assert "install a C compiler" in finding.advice
    ids = torch.arange(10, 40)
    torch.testing.assert_close(step_logits(model, ids), model.logits(ids)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tokens_do_not_depend_on_requests_that_join_and_leave(weights: str) -> None:
    """Compiled code runs decode steps. Torch runs steps that include a part of a prompt."""
    model = load_model(None, "cpu", "float32", weights=weights)
    numbers = range(11)
    prompts = [np.random.default_rng(number).integers(8, 200, 5 + 4 * number) for number in numbers]
    params = [SamplingParams(temperature=0.8, seed=n, max_tokens=33 - 2 * n, ignore_eos=True) for n in numbers]

    def answers(chosen: Sequence[int]) -> dict[str, list[int]]:
        engine, waiting = Engine(model, EngineConfig(max_num_batched_tokens=24)), [*chosen]
        tokens: dict[str, list[int]] = {str(number): [] for number in chosen}
        while waiting or engine.has_work():
            if waiting:
                number = waiting.pop(0)
                assert engine.add(Add(str(number), prompts[number].tobytes(), params[number])) is None
            for progress in engine.step().progress:
                assert progress.error is None
                tokens[progress.request_id] += progress.token_ids
        return tokens

    alone: dict[str, list[int]] = {}
    for number in numbers:
        alone |= answers([number])
    assert answers(numbers) == alone


def test_a_library_of_another_version_is_not_used(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherBatch(decode_step._Batch):
        _fields_ = (("more", ctypes.c_int64),)

    loaded = decode_step._load(instructions)
    assert decode_step._is_of_this_version(loaded)
    monkeypatch.setattr(decode_step, "_Batch", OtherBatch)
    assert not decode_step._is_of_this_version(loaded)
    assert not decode_step._is_of_this_version(ctypes.CDLL(None))
