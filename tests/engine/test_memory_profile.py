"""Tests for the memory profile: the KV cache gets the memory that the worst case leaves.

Other tests cover the host's memory: zeros that are allocated lazily, peaks and free bytes.
"""

import asyncio
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mindie_mm.device import host_memory
from mindie_mm.device.cpu import CPU
from mindie_mm.engine.cache.kv_cache_size import block_size, useful_blocks, useful_bytes
from mindie_mm.engine.core import Engine
from mindie_mm.engine.process import largest_step
from mindie_mm.engine.process.largest_step import Step, WorstCase
from mindie_mm.engine.process.memory_profile import Memory
from mindie_mm.engine.requests.engine_messages import Replica
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import DeviceError, InputError
from mindie_mm.models import family_named, family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig, GiB, MiB, WorkerConfig
from mindie_mm.shm import release
from mindie_mm.shm.owner.arena import Arena
from mindie_mm.tokenize import Tokenizer
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.llm import LLM
from tests.models.contract import noise
from tools.random_checkpoint import write_checkpoint


class Sized(CPU):
    """A CPU device that reports `free` bytes of free memory and counts the computations."""

    def __init__(self, free: int = 4 * GiB) -> None:
        self.free = free
        self.computed = 0

    def free_bytes(self):
        return self.free

    def peak_bytes(self, work, scale=1.0):
        self.computed += 1
        return super().peak_bytes(work, scale)


class Recording(Sized):
    """A device that can record decode steps."""

    records = True


class Weightless(Sized):
    """A device on which work uses no memory, so that the result contains exactly the bytes that are not computed."""

    scratch_bytes = 0

    def peak_bytes(self, work, scale=1.0):
        return lambda: 0

    def grown_bytes(self, work):
        return 0


class WeightlessRecording(Weightless):
    records = True


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    """Return a checkpoint like `random_checkpoint`, but with a limit of 12,544 pixels per image."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small", "tiny", max_pixels=12_544)


FEW = {"max_model_len": 512, "max_num_seqs": 10**6, "max_num_batched_tokens": 64, "max_tower_tokens": 1}


def step(path, kinds=("image",), device=None, **settings):
    config = EngineConfig(device="cpu", **FEW | settings)
    processor = family_named("qwen2_vl").processor(Checkpoint.open(path))
    return WorstCase(load_model(path, device="cpu"), processor, device or Sized(), config).step(kinds)


def room(path, kinds=("image",), device=None, num_engines=1, **settings):
    device = device or Weightless()
    taken = step(path, kinds, device, **settings)
    config = EngineConfig(device="cpu", **FEW | settings)
    return Memory(load_model(path, device="cpu"), taken, device, num_engines=num_engines).kv_cache_bytes(config)


@pytest.mark.slow
def test_a_larger_worst_case_needs_more_memory(random_checkpoint, small_images):
    small, large = step(small_images).num_bytes, step(random_checkpoint).num_bytes
    assert large > small + 2 * MiB
    assert step(small_images).num_bytes == small, "computed figures do not depend on what other programs do"
    assert step(small_images, max_tower_tokens=1024).num_bytes > small + 4 * MiB, (
        "a call to the tower with several items needs more memory"
    )
    none = step(small_images, kinds=()).num_bytes
    assert none < small, "without media, no memory is needed for the tower"
    assert step(small_images, (), max_num_batched_tokens=2048, max_model_len=4096).num_bytes > none + 4 * MiB, (
        "a longer step needs more memory"
    )


def test_memory_of_recorded_steps_counts(random_checkpoint):
    wanted = {"max_num_seqs": 4096, "max_model_len": 1024}
    recorded = step(random_checkpoint, (), Recording(), **wanted).num_bytes
    assert step(random_checkpoint, (), Recording(), **wanted, enforce_eager=True).num_bytes < recorded - 8 * MiB
    many, few = (
        step(random_checkpoint, (), WeightlessRecording(), **wanted | {"max_num_seqs": n}) for n in (4096, 2048)
    )
    assert few.num_bytes < many.num_bytes - MiB, "logits of half as many rows need 3 MiB less"


@pytest.mark.slow
def test_the_largest_item_is_limited_by_the_prompt_length(random_checkpoint):
    """The video fits the prompt. It does not have 768 frames with 255 features each."""
    short, long = (step(random_checkpoint, ("video",), max_model_len=length).num_bytes for length in (64, 512))
    assert long > short + 4 * MiB
    none = step(random_checkpoint, (), max_model_len=3).num_bytes
    assert step(random_checkpoint, ("image", "video"), max_model_len=3).num_bytes == none


def test_the_default_start_of_the_embedded_model_needs_less_than_1_gib():
    model, checkpoint, config = load_model(device="cpu"), Checkpoint.open(), EngineConfig(device="cpu")
    family = family_of(checkpoint)
    taken = WorstCase(model, family.processor(checkpoint), CPU(), config).step(family.kinds)
    assert 100 * MiB < taken.num_bytes < GiB - config.encoder_cache_bytes - useful_bytes(model, config) // 64


SIZES = [1, 15, 16, 300, 511, 512, 1600, 2047, 2048, 4096]


@pytest.mark.parametrize(
    ("max_model_len", "sizes"),
    [(512, [1, 16, 511, 512, 4096]), *(pytest.param(one, SIZES, marks=pytest.mark.slow) for one in (512, 2048))],
    ids=str,
)
@pytest.mark.slow
def test_a_lower_limit_of_tokens_never_needs_more_memory(random_checkpoint, max_model_len, sizes):
    settings = {"max_model_len": max_model_len, "max_num_seqs": 64}
    needs = [step(random_checkpoint, (), max_num_batched_tokens=n, **settings).num_bytes for n in sizes]
    assert needs == sorted(needs)
    assert needs[0] < needs[-1]


def test_the_embeddings_of_a_prompt_count(random_checkpoint):
    """One item of embeddings may fill the context, although it exceeds every limit of the tower."""
    needs = {length: step(random_checkpoint, (), max_model_len=length) for length in (64, 8192)}
    spec = load_model(random_checkpoint, device="cpu").spec
    (embeddings,) = [part for part in needs[8192].parts if part.name.startswith("embeddings of the prompt")]
    assert embeddings.num_bytes >= 8192 * spec.feature_bytes
    assert "max_model_len" in embeddings.settings


def test_a_large_item_is_computed_by_pieces_as_if_whole(random_checkpoint, monkeypatch):
    settings = {"max_model_len": 8192, "max_tower_tokens": 8192}
    (pieces,) = [part for part in step(random_checkpoint, ("video",), **settings).parts if "videos" in part.name]
    monkeypatch.setattr(largest_step, "_LARGE", 10**9)
    (whole,) = [part for part in step(random_checkpoint, ("video",), **settings).parts if "videos" in part.name]
    assert pieces.num_bytes == pytest.approx(whole.num_bytes, rel=0.05)


def test_memory_that_only_a_real_step_shows_counts(small_images, caplog):
    class Growing(Weightless):
        def grown_bytes(self, work):
            return 100 * MiB

    assert step(small_images, device=Growing()).num_bytes == 100 * MiB
    assert "a step of 16 tokens took 100 MiB, which is more than computed" in caplog.text


def test_the_memory_share_and_the_caches_limit_the_size(small_images):
    share = {"memory_share": 0.5}
    assert room(small_images, **share) == pytest.approx((2 * GiB - 256 * MiB) / 2), (
        "half is reserved for copies of keys and values in a decode step"
    )
    assert room(small_images, memory_share=1.0) == pytest.approx((4 * GiB - 256 * MiB) / 2)
    assert room(small_images, **share, encoder_cache_bytes=0) == pytest.approx(GiB)
    config = EngineConfig(max_num_seqs=2, max_model_len=512)
    spec = load_model(small_images, device="cpu").spec
    most = useful_blocks(spec, config) * block_size(spec, config) * spec.kv_token_bytes
    assert room(small_images, max_num_seqs=2) == most == 2 * 512 * spec.kv_token_bytes


def test_a_default_share_that_is_too_small_does_not_prevent_the_start(small_images, caplog):
    """Half of the memory is less than the encoder cache, but all of it suffices for one request."""
    spec = load_model(small_images, device="cpu").spec
    assert room(small_images, device=Weightless(300 * MiB)) == 512 * spec.kv_token_bytes
    assert "memory_share 0.5 leaves too little for one request of full length" in caplog.text
    with pytest.raises(DeviceError, match="no memory is left"):
        room(small_images, device=Weightless(300 * MiB), memory_share=0.5)


def test_an_explicit_size_is_used_and_the_worst_case_must_still_fit(small_images):
    device = Sized()
    assert room(small_images, device=device, kv_cache_bytes=5 * MiB) == 5 * MiB
    assert device.computed
    with pytest.raises(DeviceError, match=r"kv_cache_bytes of 4000 MiB does not fit: cpu has 4096 MiB free .* 256 MiB"):
        room(small_images, kv_cache_bytes=4000 * MiB)


def test_engines_that_start_together_divide_the_free_memory(small_images):
    settings = {"encoder_cache_bytes": 0}
    assert room(small_images, num_engines=4, **settings) == pytest.approx(GiB / 4)
    few = r"cpu has 1024 MiB free for each of 4 engines after loading the weights; .*"
    with pytest.raises(DeviceError, match=few + "Lower kv_cache_bytes, or lower replicas"):
        room(small_images, num_engines=4, kv_cache_bytes=1200 * MiB, **settings)
    with pytest.raises(DeviceError, match=few + "free memory, or lower replicas, or lower max_"):
        room(small_images, num_engines=4, encoder_cache_bytes=GiB)


FREE = """
from pathlib import Path
from mindie_mm.device.cpu import CPU

CPU.free_bytes = lambda self: int(Path(__file__).with_name("free").read_text())
"""


@pytest.mark.slow
async def test_an_engine_is_restarted_if_the_others_have_taken_their_share(random_checkpoint, tmp_path, monkeypatch):
    """Its cache must fit in the memory that is left, and not in a share of it."""
    (tmp_path / "sitecustomize.py").write_text(FREE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = EngineConfig(device="cpu", max_num_seqs=1)
    (tmp_path / "free").write_text(f"{4 * GiB}")
    engine = await AsyncEngine.start(random_checkpoint, config, replica=Replica(0, 2))
    try:
        needed = engine.info.step_bytes
        assert engine.info.kv_cache_bytes < needed
        (tmp_path / "free").write_text(f"{needed}")
        with pytest.raises(DeviceError, match=r"MiB free for each of 2 engines .* the encoder cache takes 0 MiB"):
            await AsyncEngine.start(random_checkpoint, config, replica=Replica(0, 2))
        await engine.reload(grace_s=0)
    finally:
        await engine.close()


@pytest.mark.parametrize("settings", [{}, {"memory_share": 0.5}, {"kv_cache_bytes": 2 * MiB}], ids=str)
def test_the_encoder_cache_shrinks_before_an_engine_does_not_start(settings, small_images, caplog):
    """Without it, the KV cache has room for at least one request of full length, or for the size that is set."""
    free = 10 * MiB
    assert encoder_room(small_images, GiB, **settings) == 256 * MiB
    assert not caplog.records
    smaller = encoder_room(small_images, free, **settings)
    assert 0 < smaller < free
    assert f"the encoder cache takes {smaller // MiB} MiB instead of the 256 MiB of encoder_cache_bytes" in caplog.text
    model = load_model(small_images, device="cpu")
    kept = room(small_images, device=Weightless(free), encoder_cache_bytes=smaller, **settings)
    assert kept == pytest.approx(settings.get("kv_cache_bytes", 512 * model.spec.kv_token_bytes), abs=8)
    assert encoder_room(small_images, 1000, **settings) == 0


def encoder_room(path, free, **settings):
    config = EngineConfig(device="cpu", **FEW | settings)
    return Memory(load_model(path, device="cpu"), Step(()), Weightless(free)).encoder_cache_bytes(config)


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "measured"])
def test_a_context_that_exceeds_the_cache_is_refused_if_configured_and_otherwise_cut(random_checkpoint, caplog, asked):
    """The cache has nine blocks of 16 tokens and 15 more tokens, which are not enough for a tenth block."""
    model = load_model(random_checkpoint, device="cpu")
    caplog.set_level("INFO")
    size, own = model.spec.kv_token_bytes, model.spec.max_model_len

    def engine(num_tokens, **settings):
        settings |= {"kv_block_size": 16, "max_num_seqs": 4}
        if asked:
            return Engine(model, EngineConfig(kv_cache_bytes=num_tokens * size, **settings))
        return Engine(model, EngineConfig(**settings), num_tokens * size)

    advice = "Raise kv_cache_bytes, or lower max_model_len" if asked else "Raise memory_share, lower .* max_model_len"
    message = rf"a context of 145 tokens needs {160 * size} bytes of KV cache; the cache has {144 * size} bytes"
    with pytest.raises(DeviceError, match=rf"^{message}, enough for 144 tokens. {advice}"):
        engine(159, max_model_len=145)
    assert not caplog.records
    assert engine(159, max_model_len=144).ready.max_model_len == 144
    assert engine(160, max_model_len=145).ready.max_model_len == 145
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert f"the KV cache holds 160 tokens in {160 * size} bytes; the context length is 145" in caplog.text
    caplog.clear()
    assert engine(159).ready.max_model_len == 144
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"a context of {own} tokens needs {own * size} bytes of KV cache; the cache has {144 * size}" in caplog.text
    assert "; the context length is 144" in caplog.text
    assert engine(2 * own, max_model_len=2 * own).ready.max_model_len == own, (
        "a context above the checkpoint's own is reduced without an error"
    )


@pytest.mark.usefixtures("copied_workers")
@pytest.mark.slow
def test_the_library_refuses_a_context_that_exceeds_the_cache(random_checkpoint):
    engine = EngineConfig(device="cpu", max_model_len=512, kv_cache_bytes=10_000)
    with pytest.raises(DeviceError, match="a context of 512 tokens needs"):
        LLM(random_checkpoint, WorkerConfig(engine=engine))


def test_the_log_states_free_memory_and_the_size_of_the_cache(small_images, caplog):
    caplog.set_level("INFO")
    room(small_images, kv_cache_bytes=5 * MiB)
    assert "cpu has 4096 MiB free after loading the weights" in caplog.text
    assert "the KV cache takes 5 MiB (kv_cache_bytes)" in caplog.text
    caplog.clear()
    room(small_images, max_num_seqs=1)
    assert "cpu has 4096 MiB free after loading the weights" in caplog.text
    assert "that memory_share 0.5 leaves" in caplog.text
    assert "the largest step takes 0 MiB" in caplog.text


def test_the_error_of_too_little_memory_names_the_largest_part_and_its_setting(small_images, random_checkpoint):
    with pytest.raises(DeviceError, match=r"cpu has 200 MiB free .* encoder cache takes 256 MiB; memory_share is 0.5"):
        room(small_images, device=Sized(200 * MiB))
    towers = {"max_tower_tokens": 10**5, "max_tower_bytes": 2**40, "max_num_seqs": 10**4}
    with pytest.raises(DeviceError, match=r"lower max_tower_tokens, .*: the largest part is the tower on im"):
        room(random_checkpoint, device=Sized(200 * MiB), **towers)
    tokens = {"max_num_batched_tokens": 8000, "max_model_len": 8192, "encoder_cache_bytes": 0}
    with pytest.raises(DeviceError, match=r"max_num_batched_tokens .*: the largest part is a prefill of 8000"):
        room(random_checkpoint, (), device=Sized(200 * MiB), **tokens)


def test_a_successor_keeps_the_memory_of_the_step_and_says_so(small_images, caplog):
    caplog.set_level("INFO")
    model, config = load_model(small_images, device="cpu"), EngineConfig(device="cpu", kv_cache_bytes=5 * MiB)
    kept = Step.kept(700 * MiB)
    assert kept_room(model, kept, config, 4 * GiB) == 5 * MiB
    assert "the largest step takes 700 MiB, as computed when the engine first started" in caplog.text
    assert kept_room(model, kept, config, 300 * MiB) == 5 * MiB, "other programs have taken the memory of the step"


def kept_room(model, kept, config, free):
    return Memory(model, kept, Weightless(free)).kv_cache_bytes(config)


@pytest.mark.parametrize("bad", [{"memory_share": 0.0}, {"memory_share": 1.5}, {"kv_cache_bytes": 0}], ids=str)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        EngineConfig(**bad)


@pytest.mark.usefixtures("copied_workers")
async def test_an_engine_without_memory_for_its_cache_does_not_start(random_checkpoint):
    config = EngineConfig(device="cpu", max_model_len=256, memory_share=1e-9)
    with pytest.raises(DeviceError, match=r"no memory is left for the KV cache: cpu has .* MiB free"):
        await AsyncEngine.start(random_checkpoint, config)


def reset_peak(pid):
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")


def status(pid):
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {key: int(value.split()[0]) * 1024 for key, value in (line.split(":", 1) for line in lines) if "kB" in value}


def anonymous_bytes(pid):
    return status(pid)["RssAnon"]


def peak_bytes(pid):
    """Return the peak of anonymous memory. Pages of files and of shared memory stay mapped after they were read."""
    found = status(pid)
    return found["VmHWM"] - found["RssFile"] - found["RssShmem"]


async def ask(engine, ids):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    return [progress async for progress in engine.generate(str(id(ids)), ids, params)]


@pytest.mark.slow
async def test_a_burst_of_large_images_stays_within_the_computed_memory(random_checkpoint, tmp_path):
    """The engine's peak of anonymous memory is at most the computed worst case plus the caches."""
    path, kv, encoder, arena_bytes = random_checkpoint, 4 * MiB, 2 * MiB, 16 * MiB
    config = EngineConfig(
        device="cpu",
        max_model_len=512,
        max_tower_tokens=512,
        kv_cache_bytes=kv,
        encoder_cache_bytes=encoder,
        num_threads=1,
    )
    processor, model = family_named("qwen2_vl").processor(Checkpoint.open(path)), load_model(path, device="cpu")
    computed = WorstCase(model, processor, CPU(), config).step(("image",)).num_bytes
    path_file = tmp_path / "shm_name.txt"
    with closing(Arena.create(arena_bytes)) as arena, Tokenizer.from_pretrained(path, arena=arena) as tokenizer:
        prompts = [tokenizer.tokenize([{"image": noise(448, 440, i)}], path_file).numpy() for i in range(12)]
        engine = await AsyncEngine.start(path, config)
        try:
            before = anonymous_bytes(engine.pid)
            reset_peak(engine.pid)
            await asyncio.gather(*(asyncio.create_task(ask(engine, ids)) for ids in prompts))
            taken = peak_bytes(engine.pid) - before
        finally:
            await engine.close()
        release(path_file)
    # One call for all images would take six times the memory.
    assert taken <= computed + kv + encoder


def test_cgroup_limits_bound_the_free_memory(tmp_path):
    own, mount = tmp_path / "cgroup", tmp_path / "mount"
    group, first = mount / "a" / "b", mount / "memory" / "c"
    group.mkdir(parents=True)
    first.mkdir(parents=True)
    own.write_text("4:memory:/c\n0::/a/b\n")
    free = host_memory.available_bytes(mount, own)
    assert free > 1000, "without a limit, the host's memory is reported"
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5000\n")
    assert host_memory.available_bytes(mount, own) > 1000
    (group.parent / "memory.max").write_text("9000\n")
    (group.parent / "memory.current").write_text("6000\n")
    assert host_memory.available_bytes(mount, own) == 3000, "the limit of a parent group applies"
    (group.parent / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    assert host_memory.available_bytes(mount, own) == 3500, "the page cache counts as free"
    (group.parent / "memory.stat").write_text("anon 1\ninactive_file 500\nactive_file 700\nshmem 90\n")
    assert host_memory.available_bytes(mount, own) == 4200, "pages that were read twice count as free, too"
    (first / "memory.limit_in_bytes").write_text("700\n")
    (first / "memory.usage_in_bytes").write_text("900\n")
    assert host_memory.available_bytes(mount, own) == 0, "limits of cgroup version 1 apply"
    (first / "memory.stat").write_text("active_file 1\ntotal_inactive_file 300\ntotal_active_file 400\n")
    assert host_memory.available_bytes(mount, own) == 500


def test_growth_is_that_of_anonymous_memory(tmp_path):
    kept = []

    def grow():
        kept.append(torch.full((64 * MiB // 4,), 1.0))

    assert host_memory.grown_bytes(grow) == pytest.approx(64 * MiB, rel=0.1)
    assert host_memory.grown_bytes(lambda: None) < MiB
    (tmp_path / "file").write_bytes(b"x" * 8 * MiB)
    pages = np.memmap(tmp_path / "file", np.uint8, "r")
    assert host_memory.grown_bytes(pages.sum) < MiB, "pages of files do not count"


def grown(work):
    """Return the growth of the memory of this process, including shared memory, in which lazily allocated zeros are."""
    before = psutil.Process().memory_info().rss
    work()
    return psutil.Process().memory_info().rss - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_take_memory_only_when_written(dtype):
    kept = []
    assert grown(lambda: kept.append(host_memory.zeros((256, MiB // 4), dtype))) < MiB
    assert kept[0].shape == (256, MiB // 4)
    assert kept[0].dtype == dtype
    assert not kept[0][::16].any()
    row = kept[0][0].nbytes
    assert row <= grown(lambda: kept[0][7].fill_(1)) < row + 5 * MiB, "at most two huge pages more than the row"


def test_a_step_whose_shapes_depend_on_values_is_run(caplog):
    """A family of another package may have such a step. Its engine starts, and says why the start takes longer."""
    values = torch.arange(2**20)

    def step():
        chosen = values[values.float().sin().nonzero().squeeze(1)]
        return chosen.float().cumsum(0)

    needed = CPU().peak_bytes(step)()
    assert needed >= (2**20 - 1) * (8 + 4 + 4), "the chosen values and two tensors of floats; the sine of 0 is 0"
    assert CPU().peak_bytes(step, 3.0)() == pytest.approx(3 * needed, rel=0.01)
    assert "cannot be computed from shapes" in caplog.text
