"""Tests for the prefix cache. KV blocks are reused only for the same ids and the same media."""

import io
import struct
import zlib

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Abort, Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.models import load_model
from mindie_mm.nn.model import Positions
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import free, release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import request_of_items
from tests.models.contract import clip, noise, run

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"kv_block_size": 4}
QUESTION = {"text": "What is in the image? Describe this picture."}
RED, BLUE = (noise(60, 90, seed) for seed in (1, 2))
PROMPTS = [
    [{"text": "Hello there, what is a red square?"}],
    [{"image": RED}, QUESTION],
    [{"image": RED}, QUESTION],
    [{"image": RED}, {"text": "What is it?"}],
    [{"image": BLUE}, QUESTION],
    [{"image": RED}, {"image": BLUE}, QUESTION],
    [{"text": "Hello there, what is a red square?"}, {"image": RED}, {"text": "and"}, {"video": clip(4, 56, 84)}],
    [{"text": "Hello there, what is a red circle?"}],
]


@pytest.fixture(scope="module")
def model(random_checkpoint, device):
    return load_model(random_checkpoint, device=device)


@pytest.fixture
def path_file(tmp_path):
    yield tmp_path / "shm_name.txt"
    release(tmp_path / "shm_name.txt")


@pytest.fixture
def tokenizer(random_checkpoint, path_file):
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        yield tokenizer


@pytest.fixture
def prompts(tokenizer, path_file):
    return [tokenizer.tokenize(items, path_file) for items in PROMPTS]


def ask(engine, ids, params=GREEDY):
    """Run one request, with no other request in the engine. Return its first and its last progress."""
    assert engine.add(Add("r", ids.numpy().tobytes(), params)) is None
    news = []
    while engine.has_work():
        news += (one for one in engine.step().progress if one.token_ids)
    return news[0], news[-1]


def cached(engine, ids):
    return ask(engine, ids)[0].cached_tokens


def assert_all_free(engine):
    """Assert that no KV block is in use or lost, and that the index of cached blocks is consistent."""
    blocks = engine._blocks
    assert engine.stats.kv_cache_usage == 0
    assert sorted(blocks._free) == list(range(blocks.num_blocks))
    assert not any(blocks._holders)
    assert {block: key for key, block in blocks._blocks.items()} == blocks._keys


@pytest.mark.parametrize("items", [PROMPTS[0], PROMPTS[1]], ids=["text", "image"])
def test_requests_with_different_salts_share_no_blocks(model, tokenizer, path_file, items):
    engine = Engine(model, EngineConfig(**SMALL))
    digests = set()
    for salt, shares in (("", False), ("a", False), ("b", False), ("a", True), ("", True)):
        options = PromptOptions(cache_salt=salt)
        prompt = tokenizer.answer(request_of_items(items, chat=False, path_file=str(path_file), options=options))
        params = msgspec.structs.replace(GREEDY, cache_salt=salt)
        assert (ask(engine, torch.from_numpy(prompt.ids), params)[0].cached_tokens > 0) == shares
        digests |= {item.digest for item in model.read(prompt.ids)}
    assert len(digests) == 3 * len(prompt.spans)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24, "max_tower_tokens": 8},
        {"max_num_batched_tokens": 16, "max_tower_bytes": 1},
        {"kv_cache_bytes": 40 * 4 * 2 * 2 * 2 * 16 * 4, "encoder_cache_bytes": 1000},
    ],
    ids=["one step each", "small chunks", "one item at a time", "few blocks, so that some are preempted"],
)
def test_outputs_equal_those_without_prefix_caching(settings, model, prompts):
    config = {**SMALL, **settings}
    plain, errors = run(Engine(model, EngineConfig(prefix_caching=False, **config)), prompts, max_tokens=12)
    assert not errors
    engine = Engine(model, EngineConfig(**config))
    for order in (slice(None), slice(None, None, -1), slice(1, None, 2)):
        outputs, errors = run(engine, prompts[order], max_tokens=12)
        assert not errors
        assert [*outputs.values()] == [*plain.values()][order]
        assert_all_free(engine)
    assert engine.stats.prefix_cache_hits > sum(len(ids) for ids in prompts) / 2
    if "kv_cache_bytes" in settings:
        assert engine.stats.preemptions > 0


def test_a_preempted_request_finds_its_own_blocks_again(model):
    """The cache has room for one and a half sequences. The second is preempted, and some of its blocks stay cached."""
    config = EngineConfig(kv_block_size=4, kv_cache_bytes=30 * 4 * model.spec.kv_token_bytes)
    prompts = [torch.arange(10, 50), torch.arange(100, 150)]
    params = {"max_tokens": 25, "ignore_eos": True}
    plain, _ = run(Engine(model, config), prompts[1:], **params)
    engine = Engine(model, config)
    for i, ids in enumerate(prompts):
        engine.add(Add(str(i), ids.numpy().tobytes(), SamplingParams(temperature=0, **params)))
    second = engine._requests["1"]
    found = 0
    while engine.has_work():
        engine.step()
        if not second.kv_blocks and second.num_output and "1" in engine._requests:
            found = len(engine._blocks.find(second.keys)) * 4
    assert engine.stats.preemptions > 0
    assert second.output_ids == plain[0]
    assert found >= 48
    assert_all_free(engine)


def test_a_repeated_image_needs_no_tower_and_no_prefill(model, tokenizer, path_file):
    engine = Engine(model, EngineConfig(encoder_cache_bytes=0, **SMALL))
    asked, other = (tokenizer.tokenize([{"image": one}, QUESTION], path_file) for one in (RED, BLUE))
    first, last = ask(engine, asked)
    assert first.cached_tokens == 0
    assert last.timings.tower_s > 0
    ask(engine, other)  # evicts the features of the first image
    again, last = ask(engine, tokenizer.tokenize([{"image": RED}, QUESTION], path_file))
    assert again.cached_tokens == (len(asked) - 1) // 4 * 4
    assert last.timings.tower_s == 0
    assert again.token_ids == first.token_ids


def test_a_prompt_that_continues_an_answer_finds_the_blocks_of_the_answer(model, tokenizer, path_file):
    engine = Engine(model, EngineConfig(**SMALL))
    ids = tokenizer.tokenize([{"image": RED}, QUESTION], path_file)
    outputs, _ = run(engine, [ids], max_tokens=9, ignore_eos=True)
    longer = torch.cat([ids, torch.tensor([*outputs[0], 20, 21, 22])])
    known = len(ids) + 8  # the keys and values of the last token were never computed
    assert cached(engine, longer) == known // 4 * 4
    assert ask(engine, longer)[1].token_ids == ask(Engine(model, EngineConfig()), longer)[1].token_ids


def test_concurrent_requests_with_one_prompt_compute_it_once(model, tokenizer, path_file):
    engine = Engine(model, EngineConfig(**SMALL))
    ids = tokenizer.tokenize([{"image": RED}, QUESTION], path_file)
    outputs, _ = run(engine, [ids] * 8, max_tokens=8, ignore_eos=True)
    assert len({tuple(output) for output in outputs.values()}) == 1
    assert engine.stats.prefix_cache_hits == 7 * ((len(ids) - 1) // 4 * 4)


def test_prompt_logprobs_use_no_cached_prefix(model, tokenizer, path_file):
    engine = Engine(model, EngineConfig(**SMALL))
    ids = tokenizer.tokenize([{"image": RED}, QUESTION], path_file)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    first, _ = ask(engine, ids, params)
    again, _ = ask(engine, ids, params)
    assert again.cached_tokens == 0
    assert len(again.prompt_logprobs) == len(ids) - 1
    assert again.prompt_logprobs == first.prompt_logprobs
    assert cached(engine, ids) > 0


def test_prefix_caching_can_be_turned_off(model, prompts):
    engine = Engine(model, EngineConfig(prefix_caching=False))
    run(engine, prompts * 2, max_tokens=2)
    assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (0, 0)


def test_aborted_and_failed_requests_leave_only_computed_blocks(model, tokenizer, path_file):
    config = EngineConfig(max_num_batched_tokens=16, encoder_cache_bytes=0, async_scheduling=False, **SMALL)
    engine = Engine(model, config)
    ids = tokenizer.tokenize([{"image": RED}, QUESTION, {"image": BLUE}, QUESTION], path_file)
    engine.add(Add("left", ids.numpy().tobytes(), GREEDY))
    engine.add(Add("waits", ids.numpy().tobytes(), GREEDY))
    engine.step()
    engine.abort(Abort("left"))
    engine.abort(Abort("waits"))
    assert_all_free(engine)
    assert cached(engine, ids) == 16

    (item,) = model.read(tokenizer.tokenize([{"image": noise(60, 90, 3)}], path_file).numpy())
    bad = tokenizer.tokenize([{"image": noise(60, 90, 3)}, QUESTION], path_file)
    engine.add(Add("bad", bad.numpy().tobytes(), GREEDY))
    free(model.read(bad.numpy())[0].ref)
    tokenizer.tokenize([{"image": noise(30, 40)}], path_file)  # the owner reclaims the freed block
    assert [progress.error.name for progress in engine.step().progress] == ["StaleReference"]
    assert_all_free(engine)
    good = tokenizer.tokenize([{"image": noise(60, 90, 3)}, QUESTION], path_file)
    assert cached(engine, good) == 0, "a failed step leaves no cached blocks"
    assert item.digest == model.read(good.numpy())[0].digest


def png(mode, rows, palette=None, comment=b""):
    image = Image.fromarray(rows, "P" if palette is not None else None)
    if palette is not None:
        image.putpalette(palette)
    out = io.BytesIO()
    image.convert(mode).save(out, "PNG", compress_level=0)
    data = out.getvalue()
    return data[:33] + chunk(b"tEXt", b"Comment\0" + comment) + data[33:]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bmp(rows):
    out = io.BytesIO()
    Image.fromarray(rows).save(out, "BMP")
    return out.getvalue()


GREY = noise(56, 84)[:, :, 0]
TOUCHED = GREY.copy()
TOUCHED[-1, -1] ^= 1
RAINBOW = [value for i in range(256) for value in (i, 255 - i, i // 2)]
INVERTED = [255 - value for value in RAINBOW]
PAIRS = {
    "one pixel, the last": (bmp(np.flipud(GREY)), bmp(np.flipud(TOUCHED))),
    "another mode": (png("L", GREY), png("RGB", GREY)),
    "grey and its alpha": (png("L", GREY), png("LA", GREY)),
    "another palette": (png("P", GREY, RAINBOW), png("P", GREY, INVERTED)),
    "the same indices in grey": (png("P", GREY, RAINBOW), png("L", GREY)),
    "a different image behind a long equal beginning": (
        png("L", GREY, comment=b"x" * 10_000),
        png("L", TOUCHED, comment=b"x" * 10_000),
    ),
    "decoded, another height of as many bytes": (np.zeros((56, 84, 3), np.uint8), np.zeros((84, 56, 3), np.uint8)),
    "decoded, one pixel": (np.zeros((56, 84, 3), np.uint8), np.eye(56, 84, dtype=np.uint8)[:, :, None].repeat(3, 2)),
    "an image and its bytes": (bmp(GREY), np.repeat(GREY[:, :, None], 3, 2)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_a_different_image_is_never_a_hit(pair, model, tokenizer, path_file, tmp_path):
    engine = Engine(model, EngineConfig(**SMALL))
    found = []
    for i, one in enumerate(pair):
        source = one
        if isinstance(one, bytes):
            source = str(tmp_path / f"{i}.png")
            (tmp_path / f"{i}.png").write_bytes(one)
        ids = tokenizer.tokenize([{"image": source}, QUESTION], path_file)
        (item,) = model.read(ids.numpy())
        found.append((cached(engine, ids), item.digest))
        assert cached(engine, ids) == (len(ids) - 1) // 4 * 4, "the same image is a hit"
    assert [number for number, _ in found] == [0, 0]
    assert found[0][1] != found[1][1]


def test_an_image_with_other_settings_is_never_a_hit(model, tokenizer, path_file):
    engine = Engine(model, EngineConfig(**SMALL))
    for settings in ({}, {"max_pixels": 56 * 56}):
        ids = tokenizer.tokenize([{"image": RED, **settings}, QUESTION], path_file)
        assert cached(engine, ids) == 0


def test_placeholder_ids_without_an_image_are_never_a_hit(model, tokenizer, path_file):
    """A client can send a prompt whose ids are ordinary placeholder tokens, without an image."""
    engine = Engine(model, EngineConfig(**SMALL))
    ids = tokenizer.tokenize([{"image": RED}, QUESTION], path_file)
    ask(engine, ids)
    plain = ids.clone()
    plain[ids < 0] = model.module.config.image_token_id
    assert cached(engine, plain) == 0
    assert cached(engine, ids) > 0


def test_swapped_images_are_never_a_hit(model, tokenizer, path_file):
    engine = Engine(model, EngineConfig(**SMALL))
    for order in ((RED, BLUE), (BLUE, RED)):
        ids = tokenizer.tokenize([*({"image": one} for one in order), QUESTION], path_file)
        assert cached(engine, ids) == 0


def test_an_item_without_a_digest_is_never_a_hit(model, random_checkpoint, path_file):
    engine = Engine(model, EngineConfig(**SMALL))
    with Tokenizer.from_pretrained(random_checkpoint, wire="mindie") as tokenizer:
        ids = tokenizer.tokenize([QUESTION, {"image": RED}, QUESTION], path_file)
    (item,) = model.read(ids.numpy())
    assert item.digest is None
    assert cached(engine, ids) == 0
    assert cached(engine, ids) == item.start // 4 * 4, "the text before the item is a hit"


def variant(model, **attributes):
    """Return a copy of the model whose class has the given `attributes`."""
    copy = object.__new__(type("Variant", (type(model),), attributes))
    copy.__dict__ = model.__dict__
    return copy


def one_span(self, length, items):
    spans = torch.full((length,), -1)
    for item in items:
        spans[item.slots] = 0
    return spans


def a_span_each(self, length, items):
    spans = torch.full((length,), -1)
    for number, item in enumerate(items):
        spans[item.slots] = number
    return spans


def greedy(model, ids, count):
    out = []
    for _ in range(count):
        out.append(int(model.logits(torch.cat([ids, torch.tensor(out, dtype=torch.int64)]))[-1].argmax()))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("spans", [a_span_each, one_span])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_tower_tokens": 4},
        {"max_num_batched_tokens": 1},
        {"kv_cache_bytes": 40 * 4 * 2 * 2 * 2 * 16 * 4},
    ],
    ids=["one step", "chunks smaller than a span", "token by token", "few blocks"],
)
def test_bidirectional_spans_are_never_split(spans, settings, model, prompts):
    spanned = variant(model, bidirectional_spans=spans)
    expected = [greedy(spanned, ids, 8) for ids in prompts]
    assert expected != [greedy(model, ids, 8) for ids in prompts], "the spans change the tokens"
    engine = Engine(spanned, EngineConfig(**SMALL, **settings))
    for _ in range(2):
        outputs, errors = run(engine, prompts, max_tokens=8, ignore_eos=True)
        assert not errors
        assert [*outputs.values()] == expected
        assert_all_free(engine)
    assert engine.stats.prefix_cache_hits > 0


def test_all_items_of_a_bidirectional_span_must_be_equal(model, tokenizer, path_file):
    """Later KV blocks of a span must be equal, too, because the span's first tokens attend to its last tokens."""
    engine = Engine(variant(model, bidirectional_spans=one_span), EngineConfig(**SMALL))
    for second in (RED, BLUE):
        ids = tokenizer.tokenize([{"text": "0123"}, {"image": RED}, {"text": "and"}, {"image": second}], path_file)
        start = model.read(ids.numpy())[0].start
        assert cached(engine, ids) == (0 if second is RED else start // 4 * 4)
    assert cached(Engine(model, EngineConfig()), ids) == 0


def test_the_prompt_length_matters_only_if_positions_depend_on_it(model):
    def positions(self, length, items):
        return Positions(torch.stack([torch.arange(length)] * 3) + length)

    short, long = torch.arange(100, 130), torch.arange(100, 131)
    for attributes, expected in (({}, 28), ({"positions": positions}, 0)):
        engine = Engine(variant(model, **attributes), EngineConfig(**SMALL))
        assert cached(engine, short) == 0
        assert cached(engine, long) == expected
