"""Tests for the schedulers with handwritten requests: budgets, spans, media, preemption, prefixes and memory."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.scheduler import BaseScheduler, Scheduler, TowerLimits
from mindie_mm.engine.seq2seq import Seq2SeqScheduler
from mindie_mm.nn.model import Positions
from mindie_mm.nn.splice import MediaItem
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm.format.item import MediaShape

BLOCK = 4


def image_item(start: int, length: int, name: bytes = b"image") -> MediaItem:
    """Return an image whose features replace [start, start + length). Images with the same name are equal."""
    view = SimpleNamespace(nbytes=100, digest=name, ref=name)
    return MediaItem(np.arange(start, start + length), view, MediaShape("image", 5, length))


def request(
    name: str,
    length: int,
    *,
    items: tuple[MediaItem, ...] = (),
    joined: tuple[tuple[int, int], ...] = (),
    max_tokens: int = 8,
    shared: bool = False,
    **settings,
) -> Request:
    """Return a request with the prompt ids 0, 1, and so on.

    `joined` lists spans whose first and last tokens attend to each other. If `shared`, other requests may reuse its
    blocks.
    """
    span_ids = torch.full((length,), -1) if joined else None
    for number, (start, stop) in enumerate(joined):
        span_ids[[start, stop - 1]] = number
    new = Request(
        request_id=name,
        params=SamplingParams(temperature=0, **settings),
        token_ids=[*range(length)],
        num_prompt=length,
        items=items,
        prompt_positions=Positions(torch.arange(length).unsqueeze(0)),
        span_ids=span_ids,
        max_tokens=max_tokens,
        generator=None,
    )
    new.num_shareable = sys.maxsize if shared else 0
    return new


def scheduler(*requests: Request, blocks: int = 100, tower_tokens: int = 100, **settings) -> Scheduler:
    config = EngineConfig(**settings)
    sched = Scheduler(config, BlockPool(blocks, BLOCK), EncoderCache(10**6), TowerLimits(tower_tokens, 10**6, 4))
    for one in requests:
        sched.add(one)
    return sched


def step(sched: BaseScheduler) -> list[tuple[str, int, int]]:
    """Schedule a step, and complete it as the engine does. Return (name, start, stop) of the computed tokens."""
    found = sched.schedule()
    if isinstance(sched, Scheduler):
        sched.computed(found)
    for scheduled in found:
        for item in scheduled.request.items_in(scheduled.start, scheduled.stop):
            sched._encoder_cache.put(item, torch.zeros(item.shape.num_features))
        if scheduled.samples:
            scheduled.request.append(7)
    return [(scheduled.request.request_id, scheduled.start, scheduled.stop) for scheduled in found]


def test_a_step_fills_the_token_budget_and_running_requests_come_first():
    sched = scheduler(request("a", 10), request("b", 3), request("c", 2), max_num_batched_tokens=6)
    assert step(sched) == [("a", 0, 6)]
    assert step(sched) == [("a", 6, 10), ("b", 0, 2)]
    assert step(sched) == [("a", 10, 11), ("b", 2, 3), ("c", 0, 2)]
    assert step(sched) == [("a", 11, 12), ("b", 3, 4), ("c", 2, 3)]


@pytest.mark.parametrize(
    "prompt",
    [
        {"joined": ((30, 50),)},  # no chunk may end within the span, so the first chunk ends before it
        {"items": (image_item(0, 10), image_item(30, 90, b"large"))},  # both images together exceed the tower's limit
    ],
)
def test_a_long_prompt_does_not_delay_an_answer_that_began_after_it(prompt):
    """The short answer comes first in each later step, because a chunk of the long prompt fills the budget."""
    sched = scheduler(request("long", 200, **prompt), request("b", 4), tower_tokens=90, max_num_batched_tokens=40)
    assert step(sched) == [("long", 0, 30), ("b", 0, 4)]
    assert step(sched) == [("b", 4, 5), ("long", 30, 69)]
    assert step(sched) == [("b", 5, 6), ("long", 69, 108)]


def test_a_more_urgent_request_overtakes_waiting_requests():
    """Requests with lower priority numbers come first. Requests with equal numbers keep their order."""
    ranked = [request(f"{priority}{name}", 4, priority=priority) for priority, name in ((1, "a"), (0, "b"), (1, "c"))]
    sched = scheduler(*ranked, request("-1d", 4, priority=-1), max_num_seqs=2)
    assert [one.request_id for one in sched.waiting] == ["-1d", "0b", "1a", "1c"]
    assert step(sched) == [("-1d", 0, 4), ("0b", 0, 4)]


def test_a_less_urgent_request_is_preempted_although_it_came_first():
    first, urgent = request("first", 4), request("urgent", 4, priority=-1)
    sched = scheduler(first, blocks=4)
    step(sched)
    sched.add(urgent)
    while first in sched.running:
        step(sched)
    assert sched.running == [urgent]
    assert [*sched.waiting] == [first]
    assert step(sched) == [("urgent", urgent.num_tokens - 2, urgent.num_tokens - 1)]


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"blocks": 4}], ids=["requests", "blocks"])
def test_a_more_urgent_request_begins_in_place_of_the_latest_less_urgent_one(limits):
    """A request of equal urgency waits."""
    sched = scheduler(request("a", 5, priority=1), request("b", 5, priority=1), **limits)
    step(sched)
    sched.add(request("equal", 5, priority=1))
    assert [name for name, _, _ in step(sched)] == ["a", "b"]
    sched.add(request("urgent", 5))
    assert step(sched) == [("a", 6, 7), ("urgent", 0, 5)]
    assert sched.preemptions == 1
    assert [one.request_id for one in sched.waiting] == ["b", "equal"]


def test_coming_media_are_listed_in_the_order_of_need():
    images = [image_item(start, 4, bytes([start])) for start in (0, 10, 20)]
    sched = scheduler(
        request("a", 30, items=images),
        request("b", 9, items=(image_item(2, 4, b"b"),)),
        max_num_batched_tokens=8,
    )
    assert step(sched) == [("a", 0, 8)]
    assert [item.key for item in sched.coming()] == [bytes([10]), bytes([20]), b"b"]
    assert [step(sched) for _ in range(3)][-1] == [("a", 24, 30), ("b", 0, 2)]
    assert [item.key for item in sched.coming()] == [b"b"]
    step(sched)
    assert not [*sched.coming()]


def test_a_request_preempted_for_a_prompt_gets_no_token_in_that_step():
    first, second = request("a", 12, joined=((4, 12),)), request("b", 3)
    sched = scheduler(first, second, blocks=3, max_num_batched_tokens=9)
    assert step(sched) == [("a", 0, 4), ("b", 0, 3)]
    assert step(sched) == [("a", 4, 12)]
    assert ([one.request_id for one in sched.waiting], second.num_computed, second.kv_blocks) == (["b"], 0, [])
    assert (second.token_ids[3:], sched.preemptions) == ([7], 1)
    sched.remove(first)
    assert step(sched) == [("b", 0, 4)]


def test_at_most_max_num_seqs_requests_run():
    first, *others = (request(name, 2) for name in "abc")
    sched = scheduler(first, *others, max_num_seqs=2)
    assert [name for name, _, _ in step(sched)] == ["a", "b"]
    assert [name for name, _, _ in step(sched)] == ["a", "b"]
    sched.remove(first)
    assert [name for name, _, _ in step(sched)] == ["b", "c"]
    for one in others:
        sched.remove(one)
    assert not sched.has_work()
    assert sched.usage == 0
    assert sched.schedule() == []


def test_a_waiting_request_can_be_removed():
    runs, waits = request("a", 2), request("b", 2)
    sched = scheduler(runs, waits, max_num_seqs=1)
    step(sched)
    sched.remove(waits)
    assert not sched.waiting
    assert step(sched) == [("a", 2, 3)]


def test_a_chunk_does_not_end_within_a_span():
    sched = scheduler(request("a", 12, joined=((4, 9),)), max_num_batched_tokens=6)
    assert [step(sched) for _ in range(3)] == [[("a", 0, 4)], [("a", 4, 10)], [("a", 10, 12)]]


def test_overlapping_spans_count_as_one():
    sched = scheduler(request("a", 12, joined=((2, 8), (5, 10))), max_num_batched_tokens=5)
    assert [step(sched) for _ in range(3)] == [[("a", 0, 2)], [("a", 2, 10)], [("a", 10, 12)]]


def test_a_span_beyond_the_budget_is_the_only_prompt_of_its_step():
    """The span cannot be split, but must run eventually. It may exceed the budget if its step has no other prompt."""
    prompts = request("a", 3), request("large", 12, joined=((0, 12),)), request("b", 2)
    sched = scheduler(*prompts, max_num_batched_tokens=5)
    assert step(sched) == [("a", 0, 3)], "the span is not added to a step with another prompt"
    assert step(sched) == [("a", 3, 4), ("large", 0, 12)]
    assert step(sched) == [("a", 4, 5), ("large", 12, 13), ("b", 0, 2)]


def test_a_chunk_ends_before_media_that_exceed_the_tower_budget():
    items = (image_item(1, 3, b"first"), image_item(5, 3, b"second"))
    sched = scheduler(request("a", 10, items=items), tower_tokens=4)
    assert [step(sched) for _ in range(2)] == [[("a", 0, 5)], [("a", 5, 10)]]
    again = request("b", 10, items=items)
    sched.add(again)
    assert step(sched) == [("a", 10, 11), ("b", 0, 10)], "cached media use no tower budget"


def test_media_that_exceed_the_tower_budget_wait_for_the_next_step():
    requests = [request(name, 6, items=(image_item(2, 3, name.encode()),)) for name in "ab"]
    sched = scheduler(*requests, tower_tokens=4)
    assert step(sched) == [("a", 0, 6), ("b", 0, 2)]
    assert step(sched) == [("a", 6, 7), ("b", 2, 6)]


def test_media_and_spans_outside_a_range_are_not_visited():
    """Each step and each block of a prompt looks up media and spans, so the lookup must be a search."""

    class Unread(list):
        def __iter__(self):
            raise AssertionError("walked")

    items = [image_item(start, 5, b"%d" % start) for start in range(0, 60, 10)]
    one = request("a", 60, items=tuple(items), joined=tuple((item.start, item.stop) for item in items))
    spans = one.spans
    one.items, one.spans = Unread(items), Unread(spans)
    for start, stop in ((0, 60), (13, 21), (13, 20), (15, 20), (14, 15), (59, 60), (60, 61)):
        assert one.items_in(start, stop) == [item for item in items if item.start < stop and item.stop > start]
        assert one.spans_in(start, stop) == [span for span in spans if span[0] < stop and span[1] > start]


def test_media_may_overlap():
    """In some Molmo checkpoints, the features of every image overwrite the features of the first image."""
    items = tuple(image_item(4, length, b"%d" % length) for length in (5, 9, 2, 7))
    one = request("a", 20, items=items)
    for start in range(20):
        assert one.items_in(start, start + 1) == [item for item in items if item.start <= start < item.stop]


def test_the_newest_request_is_preempted_and_resumed_first():
    first, second = request("a", 6), request("b", 6)
    sched = scheduler(first, second, request("c", 1), blocks=4)
    assert step(sched) == [("a", 0, 6), ("b", 0, 6)], "no block is left for the third request"
    assert step(sched) == [("a", 6, 7), ("b", 6, 7)]
    assert step(sched) == [("a", 7, 8), ("b", 7, 8)]
    assert step(sched) == [("a", 8, 9)]
    assert sched.preemptions == 1
    assert [one.request_id for one in sched.waiting] == ["b", "c"]
    assert (second.num_computed, second.kv_blocks, second.num_output) == (0, [], 3)
    assert step(sched) == [("a", 9, 10)], "the preempted request waits, because its nine tokens need three blocks"
    sched.remove(first)
    assert step(sched) == [("b", 0, 9), ("c", 0, 1)]


def test_a_preempted_request_waits_behind_requests_whose_turn_is_earlier():
    """A request may be added while others run, although it was asked for earlier: its first engine may have died."""
    first, second = request("a", 4), request("c", 4)
    first.asked_s, second.asked_s = 10.0, 1.0
    sched = scheduler(second, first, blocks=4)
    step(sched)
    late = request("b", 8)
    late.asked_s = 5.0
    sched.add(late)
    while not sched.preemptions:
        step(sched)
    assert [one.request_id for one in sched.waiting] == ["b", "a"]


def test_no_request_is_admitted_in_a_step_with_a_preemption():
    """The last free block stays unused. A first chunk would fit, but would soon be preempted and computed again."""
    sched = scheduler(request("a", 5), request("b", 6), blocks=4, max_num_batched_tokens=5)
    assert [step(sched) for _ in range(2)] == [[("a", 0, 5)], [("a", 5, 6), ("b", 0, 4)]]
    assert [step(sched) for _ in range(2)] == [[("a", 6, 7), ("b", 4, 6)], [("a", 7, 8), ("b", 6, 7)]]
    assert step(sched) == [("a", 8, 9)]
    assert sched.preemptions == 1


def test_a_request_alone_that_needs_more_blocks_is_preempted():
    sched = scheduler(request("a", 4), blocks=1)
    assert step(sched) == [("a", 0, 4)]
    assert step(sched) == []
    assert (sched.preemptions, sched.usage) == (1, 0)


def test_a_prompt_is_computed_from_the_end_of_its_shared_blocks():
    first = request("a", 10, shared=True)
    sched = scheduler(first)
    step(sched)
    for one in (request("b", 10, shared=True), request("c", 8, shared=True), request("d", 10)):
        sched.add(one)
    asks = request("e", 10, shared=True, prompt_logprobs=0)
    sched.add(asks)
    # The last token is always computed, because its logits are needed. Prompt log-probabilities need all logits.
    assert step(sched) == [("a", 10, 11), ("b", 8, 10), ("c", 4, 8), ("d", 0, 10), ("e", 0, 10)]
    assert [one.num_cached for one in sched.running] == [0, 8, 4, 0, 0]
    assert (sched.prefix_queries, sched.prefix_hits) == (10 + 10 + 8, 8 + 4)


def test_a_prompt_waits_for_blocks_of_the_same_step_if_they_save_half():
    sched = scheduler(request("a", 9, shared=True), request("b", 9, shared=True), request("c", 2))
    assert step(sched) == [("a", 0, 9)]
    assert step(sched) == [("a", 9, 10), ("b", 8, 9), ("c", 0, 2)]
    sched = scheduler(request("a", 9, shared=True), request("b", 9), max_num_batched_tokens=20)
    assert step(sched) == [("a", 0, 9), ("b", 0, 9)], "a request that shares no blocks does not wait"


def test_a_preempted_request_finds_its_remaining_blocks():
    first, second = request("a", 6), request("b", 9, shared=True)
    sched = scheduler(first, second, blocks=5)
    assert step(sched) == [("a", 0, 6), ("b", 0, 9)]
    assert step(sched) == [("a", 6, 7), ("b", 9, 10)]
    assert step(sched) == [("a", 7, 8), ("b", 10, 11)]
    assert step(sched) == [("a", 8, 9)]
    sched.remove(first)
    assert step(sched) == [("b", 8, 12)]
    assert second.num_cached == 0, "num_cached keeps its value from the first scheduling"


def encoder_decoder(*requests: Request, room: int = 1000, **settings) -> Seq2SeqScheduler:
    model = SimpleNamespace(prompt_token_bytes=3, spec=SimpleNamespace(kv_token_bytes=2))
    config = EngineConfig(**settings)
    sched = Seq2SeqScheduler(model, config, EncoderCache(10**6), TowerLimits(4, 10**6, 4), room)
    for one in requests:
        sched.add(one)
    return sched


def test_an_encoder_decoder_encodes_whole_prompts_while_answers_run():
    sched = encoder_decoder(request("a", 5), request("b", 4), request("c", 9), max_num_batched_tokens=8)
    assert step(sched) == [("a", 0, 5)], "the second prompt does not fit in the same step"
    assert step(sched) == [("a", 5, 6), ("b", 0, 4)]
    assert step(sched) == [("a", 6, 7), ("b", 4, 5), ("c", 0, 9)], "the first prompt of a step may exceed the budget"


def test_an_encoder_decoder_limits_the_media_of_a_step():
    first, second = (request(name, 6, items=(image_item(1, 3, name.encode()),)) for name in "ab")
    sched = encoder_decoder(first, second)
    assert step(sched) == [("a", 0, 6)]
    assert [item.key for item in sched.coming()] == [b"b"]
    assert step(sched) == [("a", 6, 7), ("b", 0, 6)]
    assert not [*sched.coming()]


def test_an_encoder_decoder_reserves_room_for_the_longest_answer():
    first, second = request("a", 4, max_tokens=4), request("b", 4, max_tokens=4)
    sched = encoder_decoder(
        first, second, room=39
    )  # each request needs 20 bytes: 4 prompt tokens of 3 bytes and 4 output tokens of 2 bytes
    assert step(sched) == [("a", 0, 4)]
    assert sched.usage == pytest.approx(20 / 39)
    assert step(sched) == [("a", 4, 5)]
    sched.remove(first)
    assert sched.usage == 0
    assert step(sched) == [("b", 0, 4)]
    sched.remove(second)
    assert not sched.has_work()
    assert sched.usage == 0
    assert (sched.longest_output(4), sched.longest_output(13)) == (13, 0)
