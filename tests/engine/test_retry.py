"""Tests for the rules for retries, with tokenizers and engines that follow a script."""

import asyncio

import numpy as np
import pytest

from mindie_mm.engine.requests.engine_messages import Origin, Progress, Timings
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import (
    ArenaFull,
    EngineReloaded,
    MediaError,
    NoProcess,
    ProcessDied,
    SegmentMissing,
    StaleReference,
    WeightsChanged,
)
from mindie_mm.shm import Arena, ArraySpec, attach
from mindie_mm.tokenize.prompt import MediaSpan, Prompt
from mindie_mm.tokenize.requests import request_of_items
from mindie_mm.worker.retry import PromptSource, Use, generated, tokenized

FIRST, SECOND = (Prompt(np.array([index], np.int64)) for index in range(2))
DIED, LOST, RELOADED = ProcessDied("dead"), SegmentMissing("lost"), EngineReloaded("replaced")
CONSUMED = Progress(request_id="a", media_consumed=True)
PARAMS = SamplingParams(temperature=1.0, prompt_logprobs=1)


def drew(*token_ids, **more):
    return Progress(request_id="a", token_ids=[*token_ids], **more)


def unchanged():
    return lambda step: step


class Script:
    """A fake tokenizer or engine that returns or raises `steps` in order.

    If there are too many calls, IndexError is raised.
    """

    def __init__(self, *steps):
        self.steps = list(steps)
        self.seen = []
        self.calls = []
        """Arguments of each attempt, after the id of the request."""

    def next(self, *seen):
        self.seen += seen
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step

    async def tokenize(self, request):
        return self.next(request)

    async def tokenize_together(self, requests):
        return [self.next(request) for request in requests]

    async def generate(self, request_id, *arguments):
        self.calls.append(arguments)
        for output in self.next(arguments[0].tolist()):
            if isinstance(output, BaseException):
                raise output
            yield output


async def lost(source):
    use = Use(source)
    await use.take()
    use.end_attempt(LOST)
    return await use.take()


async def freed(use):
    """Take the prompt of a released `use` again."""
    use.end_attempt(StaleReference("freed"))
    return await use.take()


async def outputs(source, engine):
    """Return the tokens of an answer."""
    steps = [step async for step in generated(engine, source, PARAMS, "a", unchanged)]
    return [token for step in steps for token in step.token_ids]


async def test_a_request_whose_tokenizer_died_is_retried_once():
    request = request_of_items([{"text": "a"}], chat=False)
    stage = Script(DIED, FIRST)
    (source,) = await tokenized(stage, [request])
    assert source.prompt is FIRST
    assert stage.seen == [request, request]
    with pytest.raises(ProcessDied):
        await tokenized(Script(DIED, DIED), [request])
    with pytest.raises(MediaError):
        await tokenized(Script(MediaError("no image")), [request])
    with pytest.raises(ProcessDied):  # the request may be retried only once
        await lost(source)


async def test_a_request_that_got_no_process_is_not_retried():
    absent = NoProcess("none came back")
    with pytest.raises(NoProcess):
        await tokenized(Script(absent), [request_of_items([{"text": "a"}], chat=False)])
    with pytest.raises(NoProcess):
        await outputs(PromptSource(FIRST), Script(absent))
    (source,) = await tokenized(Script(FIRST, absent), [request_of_items([{"text": "a"}], chat=False)])
    with pytest.raises(NoProcess):
        await outputs(source, Script([LOST]))


async def test_an_engine_that_died_before_the_first_output_is_retried_once():
    engine = Script([DIED], [drew(1, 2)])
    assert await outputs(PromptSource(FIRST), engine) == [1, 2]
    assert engine.seen == [[0], [0]]
    with pytest.raises(ProcessDied):
        await outputs(PromptSource(FIRST), Script([DIED], [DIED]))


async def test_an_answer_continues_from_the_drawn_tokens_with_one_seed_and_time():
    origin = Origin(b"prompt", b"weights")
    engine = Script([drew(1, origin=origin), drew(2, 3), DIED], [drew(4), RELOADED], [RELOADED], [drew(5)])
    assert await outputs(PromptSource(FIRST), engine) == [1, 2, 3, 4, 5]
    assert engine.seen == [[0]] * 4
    _, first, asked_s, *_ = engine.calls[0]
    assert first.seed is not None
    assert [call[1].seed for call in engine.calls] == [first.seed] * 4
    assert [call[1].prompt_logprobs for call in engine.calls] == [1, None, None, None]
    assert [call[2] for call in engine.calls] == [asked_s] * 4
    assert [call[3:] for call in engine.calls] == [
        ([], None),
        ([1, 2, 3], origin),
        ([1, 2, 3, 4], origin),
        ([1, 2, 3, 4], origin),
    ]


async def test_a_greedy_answer_gets_no_seed():
    engine = Script([drew(1)])
    greedy = SamplingParams(temperature=0)
    assert [step async for step in generated(engine, PromptSource(FIRST), greedy, "a", unchanged)] == [drew(1)]
    assert engine.calls[0][1] == greedy


@pytest.mark.parametrize("deaths", [0, 1, 2])
async def test_an_answer_survives_a_number_of_deaths(deaths):
    engine = Script(*([drew(number), DIED] for number in range(3)))
    with pytest.raises(ProcessDied, match="dead"):
        await outputs(PromptSource(FIRST, deaths=deaths), engine)
    assert len(engine.calls) == deaths + 1


async def test_an_answer_does_not_continue_with_other_weights():
    changed = WeightsChanged("other")
    with pytest.raises(WeightsChanged):
        await outputs(PromptSource(FIRST), Script([drew(1), RELOADED], [changed]))


async def test_an_answer_starts_again_with_other_weights_if_its_parts_can_be_discarded():
    engine = Script([drew(1, origin=Origin(b"prompt", b"old")), RELOADED], [WeightsChanged("other")], [drew(2)])
    asked_to = []
    again = generated(engine, PromptSource(FIRST), PARAMS, "a", unchanged, discard=lambda: asked_to.append("discard"))
    assert [step.token_ids async for step in again] == [[1], [2]]
    assert asked_to == ["discard"]
    assert engine.calls[2] == engine.calls[0]


async def test_an_answer_keeps_the_times_until_its_first_token():
    def times(**times):
        return Timings(**{"queue_s": 0, "prefill_s": 0, "tower_s": 0, "decode_s": 0} | times)

    before = [
        drew(1, timings=times(queue_s=1, prefill_s=2, tower_s=1.5)),
        drew(2, timings=times(queue_s=1, prefill_s=3)),
    ]
    after = [drew(3, timings=times(queue_s=7, prefill_s=2, tower_s=1)), drew(4)]
    engine = Script([*before, DIED], after)
    steps = [step async for step in generated(engine, PromptSource(FIRST), PARAMS, "a", unchanged)]
    assert [step.timings for step in steps[:2]] == [step.timings for step in before]
    assert steps[2].timings == times(queue_s=1, prefill_s=2, tower_s=1.5, decode_s=6)
    assert steps[3].timings is None


async def test_lost_blocks_are_rebuilt_once():
    stage, engine = Script(FIRST, SECOND), Script([LOST], [drew(1)])
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])
    assert await outputs(source, engine) == [1]
    assert engine.seen == [[0], [1]]
    (source,) = await tokenized(Script(FIRST, SECOND), [request_of_items([{"text": "a"}], chat=False)])
    with pytest.raises(ProcessDied, match="were lost twice"):
        await outputs(source, Script([LOST], [LOST]))


async def test_lost_blocks_are_rebuilt_even_if_the_tokenizer_dies_first():
    (source,) = await tokenized(Script(FIRST, DIED, SECOND), [request_of_items([{"text": "a"}], chat=False)])
    assert await outputs(source, Script([LOST], [drew(1)])) == [1]
    (source,) = await tokenized(Script(FIRST, DIED, DIED), [request_of_items([{"text": "a"}], chat=False)])
    with pytest.raises(ProcessDied, match="dead"):
        await outputs(source, Script([LOST]))


async def test_tokenizer_and_engine_may_each_fail_once():
    (source,) = await tokenized(Script(FIRST, SECOND), [request_of_items([{"text": "a"}], chat=False)])
    assert await outputs(source, Script([DIED], [LOST], [drew(1)])) == [1]
    (source,) = await tokenized(Script(FIRST, SECOND), [request_of_items([{"text": "a"}], chat=False)])
    assert await outputs(source, Script([drew(1), DIED], [LOST], [drew(2)])) == [1, 2]


async def test_choices_of_one_prompt_share_the_rebuilt_prompt():
    stage = Script(FIRST, SECOND)
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])

    class Engine:
        async def generate(self, request_id, ids, *_):
            await asyncio.sleep(0)  # all choices start with the first prompt
            if ids.tolist() == [0]:
                raise LOST
            yield drew(1)

    assert await asyncio.gather(*(outputs(source, Engine()) for _ in range(3))) == [[1]] * 3
    assert stage.steps == []


@pytest.fixture
def arena():
    with Arena.create(2**20) as arena:
        yield arena


class Stage:
    """A tokenizer stage. Each of its prompts has one block. `prompts` lists all prompts, in order."""

    def __init__(self, arena):
        self.arena = arena
        self.prompts = []
        self.seen = []

    async def tokenize(self, request):
        self.seen.append(request and request.items[0].text)
        await asyncio.sleep(0)
        with self.arena.allocate({"pixel_values": ArraySpec((4,), "uint8")}, path_file=None) as block:
            block["pixel_values"][...] = 7
            words = block.publish().to_words()
        self.prompts.append(Prompt(np.array([1, *words, 5]), (MediaSpan(1, 4, "image", 5),)))
        return self.prompts[-1]

    async def tokenize_together(self, requests):
        return [await self.tokenize(request) for request in requests]

    def held(self):
        """Return, for each prompt, whether its block can be read."""
        return [can_be_read(prompt) for prompt in self.prompts]


def can_be_read(prompt):
    try:
        return [attach(ref)["pixel_values"].tolist() for ref in prompt.refs()] == [[7] * 4]
    except StaleReference:
        return False


async def test_blocks_are_freed_when_every_answer_has_consumed_them_or_ended(arena):
    stage = Stage(arena)
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])
    source.share(3)
    first, second = Use(source), Use(source)
    await first.take()
    first.free()
    assert stage.held() == [True], "the block is kept for answers that have not begun"
    await second.take()
    second.free()
    second.free()
    assert stage.held() == [True]
    assert await outputs(source, Script([drew(1)])) == [1]
    assert stage.held() == [False]


async def test_answers_that_need_media_again_share_one_rebuilt_prompt_and_free_its_blocks(arena):
    stage, remade = Stage(arena), []
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)], remade.append)
    source.share(2)
    uses = [Use(source), Use(source)]
    for use in uses:
        await use.take()
    for use in uses:
        use.free()
    for again in (1, 2, 3):  # once for each preemption
        prompts = await asyncio.gather(*(freed(use) for use in uses))
        assert prompts == [stage.prompts[again]] * 2
        uses[0].free()
        assert stage.held() == [False] * again + [True]
        uses[1].free()
        assert stage.held() == [False] * (again + 1)
    assert remade == stage.prompts[1:]


async def test_an_answer_that_needs_media_again_finds_the_blocks_that_another_answer_holds(arena):
    stage = Stage(arena)
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])
    source.share(2)
    uses = [Use(source), Use(source)]
    for use in uses:
        await use.take()
    uses[0].free()
    assert await freed(uses[0]) is stage.prompts[0]
    assert stage.held() == [True]


async def test_blocks_lost_while_another_answer_holds_them_are_rebuilt_once(arena):
    stage = Stage(arena)
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])
    source.share(2)
    uses = [Use(source), Use(source)]
    for use in uses:
        await use.take()
    for use in uses:
        use.end_attempt(LOST)
        assert await use.take() is stage.prompts[1]
    uses[0].end_attempt(LOST)
    with pytest.raises(ProcessDied, match="were lost twice"):
        await uses[0].take()


@pytest.mark.parametrize("failure", [DIED, StaleReference("freed")], ids=["died", "preempted"])
async def test_an_answer_that_continues_gets_its_freed_blocks_rebuilt(arena, failure):
    stage = Stage(arena)
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])
    engine = Script([CONSUMED, drew(1), failure], [CONSUMED, drew(2)])
    held = [stage.held() async for step in generated(engine, source, PARAMS, "a", unchanged)]
    assert held == [[False], [False], [False, False], [False, False]]
    assert engine.seen == [prompt.ids.tolist() for prompt in stage.prompts]


async def test_one_prompt_of_a_request_is_rebuilt_alone(arena):
    """The other prompts of the request stay unchanged, whether their blocks are still there or freed."""
    stage, texts = Stage(arena), ["a", "b", "c"]
    sources = await tokenized(stage, [request_of_items([{"text": text}], chat=False) for text in texts])
    assert stage.seen == texts
    uses = [Use(source) for source in sources]
    assert [await use.take() for use in uses] == stage.prompts
    uses[0].free()
    uses[1].free()
    assert stage.held() == [False, False, True]
    assert await freed(uses[1]) is stage.prompts[3]
    assert stage.seen == [*texts, "b"]
    assert stage.held() == [False, False, True, True]
    assert [source.prompt for source in sources] == [stage.prompts[0], stage.prompts[3], stage.prompts[2]]


async def test_prompts_lost_with_a_tokenizer_are_rebuilt_together_once():
    requests = [request_of_items([{"text": text}], chat=False) for text in "ab"]
    stage = Script(DIED, FIRST, SECOND)
    sources = await tokenized(stage, requests)
    assert stage.seen == [requests[0], *requests]
    assert [source.prompt for source in sources] == [FIRST, SECOND]
    for source in sources:
        with pytest.raises(ProcessDied, match="were lost twice"):
            await lost(source)


async def test_rebuilding_freed_media_waits_for_room_in_the_arena(arena):
    maker = Stage(arena)
    full = ArenaFull("no room")
    stage = Script(await maker.tokenize(None), full, full, await maker.tokenize(None))
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])
    use = Use(source)
    await use.take()
    use.free()
    assert await freed(use) is maker.prompts[1]
    stage = Script(await maker.tokenize(None), full)
    (source,) = await tokenized(stage, [request_of_items([{"text": "a"}], chat=False)])
    with pytest.raises(ArenaFull):
        await lost(source)


async def test_the_callers_blocks_are_neither_freed_nor_rebuilt(arena):
    stage = Stage(arena)
    source = PromptSource(await stage.tokenize(None))
    engine = Script(*[[CONSUMED, drew(number), StaleReference("preempted")] for number in range(3)], [drew(3)])
    assert await outputs(source, engine) == [0, 1, 2, 3]
    assert engine.seen == [stage.prompts[0].ids.tolist()] * 4
    assert stage.held() == [True]
    with pytest.raises(SegmentMissing, match="lost"):
        await outputs(PromptSource(FIRST), Script([LOST]))
