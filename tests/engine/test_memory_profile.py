"""Tests of the memory profile: the KV cache gets the memory that the worst case leaves.

Other tests cover the host's memory: zeros that are allocated lazily, peaks and free bytes.
"""

import asyncio
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch

from mindie_mm.device import host_memory
from mindie_mm.device.cpu import CPU
from mindie_mm.engine.cache.kv_cache_size import block_size, useful_blocks
from mindie_mm.engine.core import Engine
from mindie_mm.engine.process.memory_profile import WorstCase, kv_cache_bytes
from mindie_mm.engine.requests.engine_messages import Replica
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import DeviceError, InputError
from mindie_mm.models import family_named, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import EngineConfig, GiB, MiB, WorkerConfig
from mindie_mm.shm import release
from mindie_mm.shm.owner.arena import Arena
from mindie_mm.tokenize import Tokenizer
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.llm import LLM
from tests.models.contract import picture
from tests.warm import START_METHOD
from tools.random_checkpoint import write_checkpoint


class Sized(CPU):
    """A CPU device that reports `free` bytes of free memory and counts the trial runs."""

    def __init__(self, free: int = 4 * GiB) -> None:
        self.free = free
        self.tried = 0

    def free_bytes(self):
        return self.free

    def peak_bytes(self, work):
        self.tried += 1
        return super().peak_bytes(work)


class Recording(Sized):
    """A device that can record decode steps."""

    records = True


class Weightless(Recording):
    """A device on which work uses no memory, so that the result contains exactly the bytes that are not measured."""

    def peak_bytes(self, work):
        super().peak_bytes(work)
        return 0


@pytest.fixture(scope="module")
def small_pictures(tmp_path_factory):
    """Return a checkpoint like `random_checkpoint`, but with a limit of 12,544 pixels per picture."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small", "tiny", max_pixels=12_544)


def room(path, kinds=("image",), device=None, num_engines=1, **settings):
    few = {"max_model_len": 512, "max_num_seqs": 10**6, "max_num_batched_tokens": 64, "max_tower_tokens": 1}
    config = EngineConfig(device="cpu", **few | {"measure_s": 600} | settings)
    processor = family_named("qwen2_vl").processor(Checkpoint.open(path))
    return kv_cache_bytes(
        load_model(path, device="cpu"), processor, kinds, device or Sized(), config, num_engines=num_engines
    )


@pytest.fixture(scope="module")
def own_room():
    """Yield a function that runs `room` in a new process.

    Memory that the allocator of this process has freed but kept would be reused, and the measurement would miss it.
    """
    with ProcessPoolExecutor(1, get_context(START_METHOD)) as processes:
        yield lambda *args, **kwargs: processes.submit(room, *args, **kwargs).result(timeout=300)


@pytest.mark.slow
def test_a_larger_worst_case_leaves_a_smaller_cache(random_checkpoint, small_pictures, own_room):
    small, large = own_room(small_pictures), own_room(random_checkpoint)
    assert small - large > 2 * MiB
    assert own_room(small_pictures, max_tower_tokens=1024) < small - 4 * MiB, (
        "a call of the tower with several items needs more memory"
    )
    none = own_room(small_pictures, kinds=())
    assert none > small, "without media, no memory is needed for the tower"
    longer = own_room(small_pictures, (), max_num_batched_tokens=2048, max_model_len=4096)
    assert longer < none - 4 * MiB, "a longer step needs more memory"


@pytest.mark.slow
def test_memory_of_recorded_steps_counts(random_checkpoint, own_room):
    wanted = {"max_num_seqs": 4096, "max_model_len": 1024}
    recorded = own_room(random_checkpoint, (), Recording(), **wanted)
    for settings in ({"enforce_eager": True}, {"measure_s": 0}):
        assert own_room(random_checkpoint, (), Recording(), **wanted, **settings) > recorded + 8 * MiB
    many, few = (room(random_checkpoint, (), Weightless(), **wanted | {"max_num_seqs": n}) for n in (4096, 2048))
    assert few > many + 1 * MiB, "logits of half as many rows need 3 MiB less, and the KV cache gets part of these"


@pytest.mark.slow
def test_the_largest_item_is_limited_by_the_prompt_length(random_checkpoint, own_room):
    """The video in the trial fits the prompt. It does not have 768 frames with 255 features each."""
    short, long = (own_room(random_checkpoint, ("video",), max_model_len=length) for length in (64, 512))
    assert short - long > 4 * MiB
    none = own_room(random_checkpoint, (), max_model_len=3)
    assert own_room(random_checkpoint, ("image", "video"), max_model_len=3) > none - MiB


def test_an_extrapolation_from_few_trials_is_near_the_measurement(random_checkpoint, own_room):
    """The extrapolation may exceed the measurement.

    The reason is that the allocator keeps memory that small trials have freed.
    """
    none, whole, extrapolated = (
        own_room(random_checkpoint, max_tower_tokens=4096, measure_s=s) for s in (0, 600, 0.01)
    )
    assert 0.6 * (none - whole) < none - extrapolated < 2 * (none - whole)


def test_trials_begin_with_a_small_part_of_a_large_picture(random_checkpoint):
    """The model refuses a strip of 14 rows. The next trial is another small part, not all 12.8 megapixels."""
    model, config = load_model(random_checkpoint, device="cpu"), EngineConfig(device="cpu", max_model_len=8192)
    processor = family_named("qwen2_vl").processor(Checkpoint.open(random_checkpoint))
    worst = WorstCase(model, processor, CPU(), config)
    largest = worst._largest("image")
    assert largest is not None
    trials = [trial.size for trial in worst._tower_trials("image", largest, 8192)]
    assert trials[0] < 256
    assert trials == sorted(trials)
    assert trials[-1] > 8000


def test_the_memory_share_and_the_caches_limit_the_size(small_pictures):
    assert room(small_pictures) == pytest.approx((2 * GiB - 256 * MiB) / 2), (
        "half is reserved for copies of keys and values in a decode step"
    )
    assert room(small_pictures, memory_share=1.0) == pytest.approx((4 * GiB - 256 * MiB) / 2)
    assert room(small_pictures, encoder_cache_bytes=0) == pytest.approx(GiB)
    config = EngineConfig(max_num_seqs=2, max_model_len=512)
    spec = load_model(small_pictures, device="cpu").spec
    most = useful_blocks(spec, config) * block_size(spec, config) * spec.kv_token_bytes
    assert room(small_pictures, max_num_seqs=2) == most == 2 * 512 * spec.kv_token_bytes


def test_an_explicit_size_is_used_and_the_worst_case_is_still_tried(small_pictures):
    device = Sized()
    assert room(small_pictures, device=device, kv_cache_bytes=5 * MiB) == 5 * MiB
    assert device.tried
    with pytest.raises(DeviceError, match=r"kv_cache_bytes of 4000 MiB does not fit: cpu has 4096 MiB free .* 256 MiB"):
        room(small_pictures, kv_cache_bytes=4000 * MiB)


def test_engines_that_start_together_divide_the_free_memory(small_pictures):
    settings = {"encoder_cache_bytes": 0}
    assert room(small_pictures, num_engines=4, **settings) == pytest.approx(GiB / 4)
    few = r"cpu has 1024 MiB free for each of 4 engines after loading the weights; .*[Ll]ower .*"
    with pytest.raises(DeviceError, match=few + "max_num_batched_tokens, or lower replicas$"):
        room(small_pictures, num_engines=4, kv_cache_bytes=1200 * MiB, **settings)
    with pytest.raises(DeviceError, match=few + "max_model_len, or set kv_cache_bytes, or lower replicas$"):
        room(small_pictures, num_engines=4, encoder_cache_bytes=GiB)


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
    config = EngineConfig(device="cpu", encoder_cache_bytes=400 * MiB, memory_share=1.0)
    (tmp_path / "free").write_text(f"{540 * MiB}")
    with pytest.raises(DeviceError, match="cpu has 270 MiB free for each of 2 engines"):
        await AsyncEngine.start(random_checkpoint, config, replica=Replica(0, 2))
    (tmp_path / "free").write_text(f"{GiB}")
    engine = await AsyncEngine.start(random_checkpoint, config, replica=Replica(0, 2))
    try:
        (tmp_path / "free").write_text(f"{540 * MiB}")
        await engine.reload(grace_s=0)
    finally:
        await engine.close()


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "measured"])
def test_a_context_that_exceeds_the_cache_is_refused_if_configured_and_otherwise_cut(random_checkpoint, caplog, asked):
    """The cache has nine blocks of 16 tokens and 15 more tokens, which are not enough for a tenth block."""
    caplog.set_level("INFO")
    model = load_model(random_checkpoint, device="cpu")
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
def test_the_library_refuses_a_context_that_exceeds_the_cache(random_checkpoint):
    engine = EngineConfig(device="cpu", max_model_len=512, kv_cache_bytes=10_000)
    with pytest.raises(DeviceError, match="a context of 512 tokens needs"):
        LLM(random_checkpoint, WorkerConfig(engine=engine))


def test_the_log_states_free_memory_and_the_size_of_the_cache(small_pictures, caplog):
    caplog.set_level("INFO")
    room(small_pictures, kv_cache_bytes=5 * MiB)
    assert "cpu has 4096 MiB free after loading the weights" in caplog.text
    assert "the KV cache takes 5 MiB (kv_cache_bytes)" in caplog.text
    caplog.clear()
    room(small_pictures, max_num_seqs=1)
    assert "cpu has 4096 MiB free after loading the weights" in caplog.text
    assert "that memory_share 0.5 leaves" in caplog.text


def test_the_error_of_too_little_memory_gives_sizes_and_settings(small_pictures):
    with pytest.raises(DeviceError, match=r"cpu has 300 MiB free .* encoder cache takes 256 MiB; memory_share is 0.5"):
        room(small_pictures, device=Sized(300 * MiB))
    with pytest.raises(DeviceError, match="Raise memory_share, lower max_num_batched_tokens"):
        room(small_pictures, device=Sized(300 * MiB))


def test_a_trial_that_would_not_fit_is_skipped(random_checkpoint):
    free = Sized(64 * MiB)
    with pytest.raises(DeviceError, match="no memory is left"):
        room(random_checkpoint, max_tower_tokens=10**6, max_tower_bytes=2**40, encoder_cache_bytes=0, device=free)
    assert free.tried < 16


@pytest.mark.parametrize(
    "bad", [{"memory_share": 0.0}, {"memory_share": 1.5}, {"measure_s": -1}, {"kv_cache_bytes": 0}], ids=str
)
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


def peak_bytes(pid):
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


async def ask(engine, ids):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    return [progress async for progress in engine.generate(str(id(ids)), ids, params)]


async def test_a_burst_of_large_pictures_stays_within_the_measured_memory(random_checkpoint, tmp_path):
    """The engine's peak memory is at most the measured worst case plus the caches and the pages that it shares."""
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
    measured = WorstCase(model, processor, CPU(), config).num_bytes(("image",))
    path_file = tmp_path / "shm_name.txt"
    with closing(Arena.create(arena_bytes)) as arena, Tokenizer.from_pretrained(path, arena=arena) as tokenizer:
        prompts = [tokenizer.tokenize([{"image": picture(448, 440, i)}], path_file).numpy() for i in range(12)]
        engine = await AsyncEngine.start(path, config)
        try:
            before = psutil.Process(engine.pid).memory_info().rss
            reset_peak(engine.pid)
            await asyncio.gather(*(asyncio.create_task(ask(engine, ids)) for ids in prompts))
            taken = peak_bytes(engine.pid) - before
        finally:
            await engine.close()
        release(path_file)
    # One call for all pictures would take six times the measured memory. Fragmentation adds up to a fifth.
    assert 0.5 * measured < taken <= 1.25 * measured + kv + encoder + arena_bytes + 8 * MiB


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
    assert host_memory.available_bytes(mount, own) == 3500, "inactive file pages count as free"
    (first / "memory.limit_in_bytes").write_text("700\n")
    (first / "memory.usage_in_bytes").write_text("900\n")
    assert host_memory.available_bytes(mount, own) == 0, "limits of cgroup version 1 apply"


def test_a_peak_is_the_memory_in_use_at_one_time():
    def take():
        """Return a tensor with a memory mapping of its own.

        An allocator with free blocks could put two tensors into the same mapping.
        """
        return host_memory.zeros((64 * MiB // 4,), torch.float32).fill_(1)

    def work():
        for _ in range(3):
            take()

    for _ in range(2):
        assert host_memory.peak_bytes(work) == pytest.approx(64 * MiB, rel=0.1)
    kept = []
    assert host_memory.peak_bytes(lambda: kept.append(take())) == pytest.approx(64 * MiB, rel=0.1), (
        "memory that is still allocated counts"
    )
    assert host_memory.peak_bytes(lambda: None) < MiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_take_memory_only_when_written(dtype):
    kept = []
    assert host_memory.peak_bytes(lambda: kept.append(host_memory.zeros((256, MiB // 4), dtype))) < MiB
    assert kept[0].shape == (256, MiB // 4)
    assert kept[0].dtype == dtype
    assert not kept[0][::16].any()
    row = kept[0][0].nbytes
    assert row <= host_memory.peak_bytes(lambda: kept[0][7].fill_(1)) < row + 5 * MiB, (
        "at most two huge pages more than the row"
    )
