"""What each step computes: budgets, spans, media, preemption, prefixes and room, by hand-made sequences."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindie_mm.engine.cache.block_pool import BlockPool
from mindie_mm.engine.cache.encoder_cache import EncoderCache
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.requests.sequence import Sequence
from mindie_mm.engine.scheduler import BaseScheduler, Scheduler
from mindie_mm.engine.seq2seq import Seq2SeqScheduler
from mindie_mm.engine.tower_budget import TowerLimits
from mindie_mm.nn.model import Positions
from mindie_mm.nn.splice import MediaItem, MediaShape
from mindie_mm.settings.config import EngineConfig

BLOCK = 4


def picture(start: int, length: int, name: bytes = b"picture") -> MediaItem:
    """One whose features stand on [start, start + length); of the same name, the same picture."""
    view = SimpleNamespace(nbytes=100, digest=name, ref=name)
    return MediaItem(np.arange(start, start + length), view, MediaShape("image", 5, length))


def sequence(
    name: str,
    length: int,
    *,
    items: tuple[MediaItem, ...] = (),
    joined: tuple[tuple[int, int], ...] = (),
    max_tokens: int = 8,
    shared: bool = False,
    **settings,
) -> Sequence:
    """A prompt of the ids 0..; `shared`: others may share its blocks.

    `joined`: spans whose first and last tokens attend to each other both ways.
    """
    span_ids = torch.full((length,), -1) if joined else None
    for number, (start, stop) in enumerate(joined):
        span_ids[[start, stop - 1]] = number
    made = Sequence(
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
    made.num_shareable = sys.maxsize if shared else 0
    return made


def scheduler(*sequences: Sequence, blocks: int = 100, tower_tokens: int = 100, **settings) -> Scheduler:
    config = EngineConfig(**settings)
    made = Scheduler(config, BlockPool(blocks, BLOCK), EncoderCache(10**6), TowerLimits(tower_tokens, 10**6, 4))
    for one in sequences:
        made.add(one)
    return made


def step(made: BaseScheduler) -> list[tuple[str, int, int]]:
    """Schedules a step and does what the engine does with it; names, and tokens [start, stop)."""
    found = made.schedule()
    if isinstance(made, Scheduler):
        made.computed(found)
    for scheduled in found:
        for item in scheduled.sequence.items_in(scheduled.start, scheduled.stop):
            made._encoder_cache.put(item, torch.zeros(item.shape.num_features))
        if scheduled.samples:
            scheduled.sequence.append(7)
    return [(scheduled.sequence.request_id, scheduled.start, scheduled.stop) for scheduled in found]


def test_a_step_is_as_many_tokens_as_the_budget_and_running_ones_come_first():
    made = scheduler(sequence("a", 10), sequence("b", 3), sequence("c", 2), max_num_batched_tokens=6)
    assert step(made) == [("a", 0, 6)]
    assert step(made) == [("a", 6, 10), ("b", 0, 2)]
    assert step(made) == [("a", 10, 11), ("b", 2, 3), ("c", 0, 2)]
    assert step(made) == [("a", 11, 12), ("b", 3, 4), ("c", 2, 3)]


@pytest.mark.parametrize(
    "prompt",
    [
        {"joined": ((30, 50),)},  # no chunk ends in it, so that the first one ends before it
        {"items": (picture(0, 10), picture(30, 90, b"large"))},  # more than the tower takes beside the first
    ],
)
def test_a_long_prompt_holds_up_no_answer_that_began_behind_it(prompt):
    """What its first chunk left of the budget let the other one in; each further chunk takes all that a step has."""
    made = scheduler(sequence("long", 200, **prompt), sequence("b", 4), tower_tokens=90, max_num_batched_tokens=40)
    assert step(made) == [("long", 0, 30), ("b", 0, 4)]
    assert step(made) == [("b", 4, 5), ("long", 30, 69)]
    assert step(made) == [("b", 5, 6), ("long", 69, 108)]


def test_media_of_later_steps_are_told_in_the_order_of_need():
    pictures = [picture(start, 4, bytes([start])) for start in (0, 10, 20)]
    made = scheduler(
        sequence("a", 30, items=pictures),
        sequence("b", 9, items=(picture(2, 4, b"b"),)),
        max_num_batched_tokens=8,
    )
    assert step(made) == [("a", 0, 8)]
    assert [item.key for item in made.coming()] == [bytes([10]), bytes([20]), b"b"]
    assert [step(made) for _ in range(3)][-1] == [("a", 24, 30), ("b", 0, 2)]
    assert [item.key for item in made.coming()] == [b"b"]
    step(made)
    assert not [*made.coming()]


def test_who_gives_up_its_blocks_to_a_prompt_has_no_token_in_that_step():
    first, second = sequence("a", 12, joined=((4, 12),)), sequence("b", 3)
    made = scheduler(first, second, blocks=3, max_num_batched_tokens=9)
    assert step(made) == [("a", 0, 4), ("b", 0, 3)]
    assert step(made) == [("a", 4, 12)]
    assert ([one.request_id for one in made.waiting], second.num_computed, second.blocks) == (["b"], 0, [])
    assert (second.token_ids[3:], made.preemptions) == ([7], 1)
    made.remove(first)
    assert step(made) == [("b", 0, 4)]


def test_no_more_sequences_run_than_may():
    first, *others = (sequence(name, 2) for name in "abc")
    made = scheduler(first, *others, max_num_seqs=2)
    assert [name for name, _, _ in step(made)] == ["a", "b"]
    assert [name for name, _, _ in step(made)] == ["a", "b"]
    made.remove(first)
    assert [name for name, _, _ in step(made)] == ["b", "c"]
    for one in others:
        made.remove(one)
    assert not made.has_work()
    assert made.usage == 0
    assert made.schedule() == []


def test_one_that_waits_is_removed_too():
    waits = sequence("b", 2)
    made = scheduler(sequence("a", 2), waits, max_num_seqs=1)
    step(made)
    made.remove(waits)
    assert not made.waiting
    assert step(made) == [("a", 2, 3)]


def test_a_span_is_not_cut():
    made = scheduler(sequence("a", 12, joined=((4, 9),)), max_num_batched_tokens=6)
    assert [step(made) for _ in range(3)] == [[("a", 0, 4)], [("a", 4, 10)], [("a", 10, 12)]]


def test_spans_that_overlap_are_one():
    made = scheduler(sequence("a", 12, joined=((2, 8), (5, 10))), max_num_batched_tokens=5)
    assert [step(made) for _ in range(3)] == [[("a", 0, 2)], [("a", 2, 10)], [("a", 10, 12)]]


def test_a_span_of_more_than_the_budget_is_a_steps_only_prompt():
    """It overdraws the step that it comes first in, beside next tokens alone; what cannot be cut must run at last."""
    large = sequence("large", 12, joined=((0, 12),))
    made = scheduler(sequence("a", 3), large, sequence("b", 2), max_num_batched_tokens=5)
    assert step(made) == [("a", 0, 3)], "the span does not come behind another prompt"
    assert step(made) == [("a", 3, 4), ("large", 0, 12)]
    assert step(made) == [("a", 4, 5), ("large", 12, 13), ("b", 0, 2)]


def test_a_chunk_ends_before_media_that_the_tower_cannot_take():
    items = (picture(1, 3, b"first"), picture(5, 3, b"second"))
    made = scheduler(sequence("a", 10, items=items), tower_tokens=4)
    assert [step(made) for _ in range(2)] == [[("a", 0, 5)], [("a", 5, 10)]]
    again = sequence("b", 10, items=items)
    made.add(again)
    assert step(made) == [("a", 10, 11), ("b", 0, 10)], "what is cached costs the tower nothing"


def test_media_behind_another_requests_wait_for_the_next_step():
    sequences = [sequence(name, 6, items=(picture(2, 3, name.encode()),)) for name in "ab"]
    made = scheduler(*sequences, tower_tokens=4)
    assert step(made) == [("a", 0, 6), ("b", 0, 2)]
    assert step(made) == [("a", 6, 7), ("b", 2, 6)]


def test_media_and_spans_out_of_view_are_not_walked():
    """Every step asks for every sequence's, and each block of a prompt for its own."""

    class Unread(list):
        def __iter__(self):
            raise AssertionError("walked")

    items = [picture(start, 5, b"%d" % start) for start in range(0, 60, 10)]
    one = sequence("a", 60, items=tuple(items), joined=tuple((item.start, item.stop) for item in items))
    spans = one.spans
    one.items, one.spans = Unread(items), Unread(spans)
    for start, stop in ((0, 60), (13, 21), (13, 20), (15, 20), (14, 15), (59, 60), (60, 61)):
        assert one.items_in(start, stop) == [item for item in items if item.start < stop and item.stop > start]
        assert one.spans_in(start, stop) == [span for span in spans if span[0] < stop and span[1] > start]


def test_media_may_lie_over_each_other():
    """As in Molmo's checkpoints that write each picture's features over the first one's."""
    items = tuple(picture(4, length, b"%d" % length) for length in (5, 9, 2, 7))
    one = sequence("a", 20, items=items)
    for start in range(20):
        assert one.items_in(start, start + 1) == [item for item in items if item.start <= start < item.stop]


def test_the_last_come_gives_up_its_blocks_and_is_the_first_to_come_back():
    first, second = sequence("a", 6), sequence("b", 6)
    made = scheduler(first, second, sequence("c", 1), blocks=4)
    assert step(made) == [("a", 0, 6), ("b", 0, 6)], "no block is left for the third"
    assert step(made) == [("a", 6, 7), ("b", 6, 7)]
    assert step(made) == [("a", 7, 8), ("b", 7, 8)]
    assert step(made) == [("a", 8, 9)]
    assert made.preemptions == 1
    assert [one.request_id for one in made.waiting] == ["b", "c"]
    assert (second.num_computed, second.blocks, second.num_output) == (0, [], 3)
    assert step(made) == [("a", 9, 10)], "it needs three blocks for its nine tokens"
    made.remove(first)
    assert step(made) == [("b", 0, 9), ("c", 0, 1)]


def test_none_is_admitted_in_a_step_that_had_too_few_blocks():
    """One block is left, and a first chunk would fit into it, only to be computed again and again."""
    made = scheduler(sequence("a", 5), sequence("b", 6), blocks=4, max_num_batched_tokens=5)
    assert [step(made) for _ in range(2)] == [[("a", 0, 5)], [("a", 5, 6), ("b", 0, 4)]]
    assert [step(made) for _ in range(2)] == [[("a", 6, 7), ("b", 4, 6)], [("a", 7, 8), ("b", 6, 7)]]
    assert step(made) == [("a", 8, 9)]
    assert made.preemptions == 1


def test_one_that_nothing_else_makes_room_for_gives_up_its_own():
    made = scheduler(sequence("a", 4), blocks=1)
    assert step(made) == [("a", 0, 4)]
    assert step(made) == []
    assert (made.preemptions, made.usage) == (1, 0)


def test_a_prompt_begins_behind_the_blocks_that_others_filled():
    first = sequence("a", 10, shared=True)
    made = scheduler(first)
    step(made)
    for one in (sequence("b", 10, shared=True), sequence("c", 8, shared=True), sequence("d", 10)):
        made.add(one)
    asks = sequence("e", 10, shared=True, prompt_logprobs=0)
    made.add(asks)
    # The last token is computed anew: its row is needed. Who asks for a prompt's log-probabilities needs all rows.
    assert step(made) == [("a", 10, 11), ("b", 8, 10), ("c", 4, 8), ("d", 0, 10), ("e", 0, 10)]
    assert [one.num_cached for one in made.running] == [0, 8, 4, 0, 0]
    assert (made.prefix_queries, made.prefix_hits) == (10 + 10 + 8, 8 + 4)


def test_what_the_same_step_computes_is_waited_for_where_it_spares_half():
    made = scheduler(sequence("a", 9, shared=True), sequence("b", 9, shared=True), sequence("c", 2))
    assert step(made) == [("a", 0, 9)]
    assert step(made) == [("a", 9, 10), ("b", 8, 9), ("c", 0, 2)]
    made = scheduler(sequence("a", 9, shared=True), sequence("b", 9), max_num_batched_tokens=20)
    assert step(made) == [("a", 0, 9), ("b", 0, 9)], "what shares nothing does not wait"


def test_a_preempted_sequence_finds_what_is_left_of_its_blocks():
    first, second = sequence("a", 6), sequence("b", 9, shared=True)
    made = scheduler(first, second, blocks=5)
    assert step(made) == [("a", 0, 6), ("b", 0, 9)]
    assert step(made) == [("a", 6, 7), ("b", 9, 10)]
    assert step(made) == [("a", 7, 8), ("b", 10, 11)]
    assert step(made) == [("a", 8, 9)]
    made.remove(first)
    assert step(made) == [("b", 8, 12)]
    assert second.num_cached == 0, "of the first time"


def encoder_decoder(*sequences: Sequence, room: int = 1000, **settings) -> Seq2SeqScheduler:
    model = SimpleNamespace(prompt_token_bytes=3, spec=SimpleNamespace(kv_token_bytes=2))
    config = EngineConfig(**settings)
    made = Seq2SeqScheduler(model, config, EncoderCache(10**6), TowerLimits(4, 10**6, 4), room)
    for one in sequences:
        made.add(one)
    return made


def test_an_encoder_decoders_prompt_is_encoded_whole_and_answered_beside_the_others():
    made = encoder_decoder(sequence("a", 5), sequence("b", 4), sequence("c", 9), max_num_batched_tokens=8)
    assert step(made) == [("a", 0, 5)], "the second does not fit behind the first"
    assert step(made) == [("a", 5, 6), ("b", 0, 4)]
    assert step(made) == [("a", 6, 7), ("b", 4, 5), ("c", 0, 9)], "a step's first prompt may be more than the budget"


def test_an_encoder_decoders_media_fit_the_tower():
    first, second = (sequence(name, 6, items=(picture(1, 3, name.encode()),)) for name in "ab")
    made = encoder_decoder(first, second)
    assert step(made) == [("a", 0, 6)]
    assert [item.key for item in made.coming()] == [b"b"]
    assert step(made) == [("a", 6, 7), ("b", 0, 6)]
    assert not [*made.coming()]


def test_an_encoder_decoder_sets_aside_what_an_answer_may_become():
    first, second = sequence("a", 4, max_tokens=4), sequence("b", 4, max_tokens=4)
    made = encoder_decoder(first, second, room=39)  # 20 each: 4 tokens of 3 bytes, and 4 of 2
    assert step(made) == [("a", 0, 4)]
    assert made.usage == pytest.approx(20 / 39)
    assert step(made) == [("a", 4, 5)]
    made.remove(first)
    assert made.usage == 0
    assert step(made) == [("b", 0, 4)]
    made.remove(second)
    assert not made.has_work()
    assert made.usage == 0
    assert (made.longest_output(4), made.longest_output(13)) == (13, 0)
