"""Tests for prompts that a caller of `LLM` gives as token ids, whose handle words may be stale, damaged or hostile."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from mindie_mm import LLM, SamplingParams, Tokenizer
from mindie_mm.errors import (
    CorruptReference,
    InputError,
    MindieMMError,
    SegmentMissing,
    StaleReference,
    TokenOutOfRange,
)
from mindie_mm.shm import Arena, ArraySpec, Ref, release
from mindie_mm.shm.mindie import create_shm, encode_shape_to_int64, encode_shm_name_to_int64
from tests.media_samples import moving_frames, photograph

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IMAGE = np.asarray(photograph("chelsea.png", (150, 120)))
ITEMS = [{"text": "Look: "}, {"image": IMAGE}, {"video": moving_frames(4)}, {"text": "What is it?"}]
ONE_IMAGE = [{"image": IMAGE}, {"text": "What is it?"}]

pytestmark = pytest.mark.usefixtures("copied_workers")


@pytest.fixture(scope="module")
def llm(random_checkpoint):
    with LLM(random_checkpoint) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizers(random_checkpoint, tmp_path_factory):
    """Return a tokenizer for each wire."""
    with (
        Tokenizer.from_pretrained(random_checkpoint) as native,
        Tokenizer.from_pretrained(random_checkpoint, wire="mindie") as mindie,
    ):
        native.tokenize(
            ONE_IMAGE, tmp_path_factory.mktemp("first") / "shm_name.txt"
        )  # creates the arena, which tests keep
        yield {"native": native, "mindie": mindie}


@pytest.fixture
def path_file(tmp_path):
    file = tmp_path / "shm_name.txt"
    yield file
    release(file)


@pytest.fixture
def blocks():
    """Yield an arena for blocks that tests write themselves."""
    with Arena.create(2**20) as arena:
        yield arena


def generate(llm, inputs):
    return llm.generate(inputs, GREEDY, chat_template=False, on_error="return")


def test_token_ids_of_both_wires_are_answered_beside_other_prompts(llm, tokenizers, path_file):
    native, mindie = (tokenizer.tokenize(ITEMS, path_file) for tokenizer in tokenizers.values())
    text = tokenizers["native"].tokenize([{"text": "Hello"}])
    forms = [native, native.numpy(), native.tolist(), tuple(native.tolist()), mindie, list(mindie.numpy())]
    plain = [text.to(torch.int32), text.numpy().astype(np.uint16)]
    *outputs, items, hello, one, other = generate(llm, [*forms, ITEMS, "Hello", *plain])
    assert {tuple(output.token_ids) for output in outputs} == {tuple(items.token_ids)}
    assert hello.token_ids == one.token_ids == other.token_ids != items.token_ids
    release(path_file)
    again = generate(llm, [native, mindie, "Hello"])
    assert [type(output.error) for output in again] == [StaleReference, SegmentMissing, type(None)]


def test_no_hostile_words_fail_more_than_their_own_prompt(llm, tokenizers, path_file, blocks):
    pid = llm._worker.engine.pid
    native, mindie = (tokenizer.tokenize(ONE_IMAGE, path_file).numpy() for tokenizer in tokenizers.values())
    (good,) = generate(llm, [native])
    hostile = [*damaged(native), *damaged(mindie)]
    hostile += [with_words(native, ref.to_words()) for ref in other_generations(native)]
    hostile += [mindie_words(mindie, grid, path_file) for grid in ((1, 8, 12), (2, 8, 10), (1, 2**18, 2**18), (80,))]
    hostile += [of_block(native, blocks, number, item) for number, item in enumerate(item_arrays(native))]
    assert generate(llm, [of_block(native, blocks, 99, [0, placeholder(native), 20, 1, 8, 10])])[0].error is None
    outputs = generate(llm, [*hostile, native])
    assert [index for index, output in enumerate(outputs) if output.error is None] == [len(hostile)]
    assert all(isinstance(output.error, MindieMMError) for output in outputs[:-1])
    assert outputs[-1].token_ids == good.token_ids
    assert llm._worker.engine.pid == pid


def damaged(ids):
    """Yield copies of `ids` with words that are wrong in one way each."""
    words = np.flatnonzero(ids < 0)
    first, second = int(words[0]), int(words[1])
    for slot in words:
        for word in (-1, -2, -(2**62), -(2**63), 1 - 2**63, int(ids[slot]) ^ 1 << 20, int(ids[slot]) ^ 1 << 61):
            yield changed(ids, slot, word)
    yield changed(ids, 0, 2**62)
    yield changed(ids, first, ids[second])
    yield changed(ids, second, ids[first])
    yield np.delete(ids, int(words[-1]) + 1)
    yield np.insert(ids, int(words[-1]) + 1, placeholder(ids))
    yield np.concatenate([ids, ids[words]])
    yield ids[words]
    yield np.roll(ids, len(ids) // 2)


def changed(ids, slot, word):
    other = ids.copy()
    other[slot] = word
    return other


def placeholder(ids):
    return int(ids[int(np.flatnonzero(ids < 0)[-1]) + 1])


def item_arrays(ids):
    """Yield values of the array `item` that do not fit an image of 8 x 10 patches."""
    token = placeholder(ids)
    yield [0, 2**40, 20, 1, 8, 10]
    yield [0, -1, 20, 1, 8, 10]
    yield [7, token, 20, 1, 8, 10]
    yield [0, token, 2**40, 1, 8, 10]
    yield [0, token, 20, 2**31, 2**31, 4]
    yield [0, token, 20, -1, -8, 10]
    yield [0, token, 20, 1, 8, 12]
    yield [1, token, 20, 1, 8, 10]
    yield [0, token, 20]
    yield [0]


def with_words(ids, words):
    other = ids.copy()
    other[ids < 0] = words
    return other


def other_generations(ids):
    """Yield references to the block of `ids` as they were before, or will be after, the block is used again."""
    ref = Ref.from_words(*ids[ids < 0].tolist())
    for step in (-1, 1):
        yield replace(ref, generation=ref.generation + step)


def mindie_words(ids, grid, path_file):
    """Return `ids` with the words of a segment that has 80 patches, and of a grid that does not fit."""
    segment = create_shm(80 * 1176, path_file)
    sizes = encode_shape_to_int64((80, 1176)), encode_shape_to_int64(grid)
    return with_words(ids, [encode_shm_name_to_int64(segment.name), *sizes])


def of_block(ids, arena, number, item):
    """Return `ids` with the words of a block whose `item` array is `item`."""
    specs = {"pixel_values": ArraySpec((80, 588), "uint8"), "item": ArraySpec((len(item),), "int64")}
    with arena.allocate(specs, path_file=None) as block:
        block["item"][...] = item
        return with_words(ids, block.publish(number.to_bytes(16, "big")).to_words())


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([1.5]), InputError, "have the dtype float32; it must be int64"),
        (torch.tensor([1.5], dtype=torch.bfloat16), InputError, "cannot be read"),
        (np.array([2**63], np.uint64), InputError, "have the dtype uint64; it must be int64"),
        (np.array([True]), InputError, "have the dtype bool; it must be int64"),
        (torch.tensor([[1, 2]]), InputError, r"have the shape \[1, 2\]; give the ids of one prompt"),
        ([1, 2**63], InputError, "item 1 of the token ids does not fit into int64"),
        ([1, "b"], InputError, "item 1 of the token ids is of type str; it must be an integer"),
        ([5, -7], CorruptReference, "position 1 is -7, which is neither a token id nor a name word"),
        ([5, 10**9], TokenOutOfRange, "token id 1000000000"),
        (np.array([], np.int64), InputError, "at least 1 token"),
    ],
)
def test_ids_that_are_no_prompt_fail_alone(llm, ids, error, message):
    bad, good = generate(llm, [ids, "Hello"])
    assert good.error is None
    with pytest.raises(error, match=message):
        raise bad.error


def test_a_stream_yields_the_same_output_in_parts(llm, tokenizers, path_file):
    ids = tokenizers["native"].tokenize(ONE_IMAGE, path_file)
    for prompt in (ONE_IMAGE, ids):
        parts = list(llm.stream(prompt, GREEDY, chat_template=False))
        (whole,) = generate(llm, [prompt])
        assert len(parts) > 1, whole.error
        assert whole.error is None
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    with pytest.raises(InputError, match="prompt is one item of a prompt; put the items of a prompt in a list"):
        llm.stream({"text": "Hello"})
    with pytest.raises(CorruptReference):
        next(llm.stream([5, -7], GREEDY))


@pytest.mark.slow
def test_a_stream_keeps_its_llm_open():
    assert "".join(part.text for part in LLM().stream("Hello!", GREEDY))
    with pytest.raises(InputError, match="messages is missing"):
        LLM().chat(None)


def test_a_stream_that_ends_early_aborts_its_request(llm):
    long = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
    streams = [llm.stream("Hello", long) for _ in range(2)]
    assert [next(stream).finish_reason for stream in streams] == [None, None]
    streams[0].close()
    del streams
    while llm._worker.engine._requests:
        time.sleep(0.01)
