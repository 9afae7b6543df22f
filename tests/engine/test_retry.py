"""Tests of the rules for retries, with tokenizers and engines that follow a script."""

import asyncio

import numpy as np
import pytest

from mindie_mm.engine.requests.engine_messages import Timings, TokenLogprob
from mindie_mm.errors import ArenaFull, MediaError, NoProcess, ProcessDied, SegmentMissing, StaleReference
from mindie_mm.shm import Arena, ArraySpec, attach
from mindie_mm.tokenize.prompt import MediaSpan, Prompt
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.worker.retry import PromptSource, generated, tokenized
from mindie_mm.worker.worker import Delta
from service.schemas.choices import Choice

FIRST, SECOND = (Prompt(np.array([index], np.int64)) for index in range(2))
DIED, LOST = ProcessDied("dead"), SegmentMissing("lost")


class Script:
    """A fake tokenizer or engine that returns or raises `steps` in order.

    If there are too many calls, IndexError is raised.
    """

    def __init__(self, *steps):
        self.steps = list(steps)
        self.seen = []

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

    async def generate(self, prompt, use):
        for output in self.next(prompt):
            if isinstance(output, BaseException):
                raise output
            yield output


async def lost(source):
    use = source.use()
    await use.take()
    return await use.renew()


async def outputs(source, engine):
    return [output async for output in generated(source, engine.generate)]


async def test_a_request_whose_tokenizer_died_is_retried_once():
    request = TokenizeRequest(text="a")
    stage = Script(DIED, FIRST)
    (source,) = await tokenized(stage, [request])
    assert source.prompt is FIRST
    assert stage.seen == [request, request]
    with pytest.raises(ProcessDied):
        await tokenized(Script(DIED, DIED), [request])
    with pytest.raises(MediaError):
        await tokenized(Script(MediaError("no picture")), [request])
    with pytest.raises(ProcessDied):  # the request may be retried only once
        await lost(source)


async def test_a_request_that_got_no_process_is_not_retried():
    absent = NoProcess("none came back")
    with pytest.raises(NoProcess):
        await tokenized(Script(absent), [TokenizeRequest(text="a")])
    with pytest.raises(NoProcess):
        await outputs(PromptSource(FIRST), Script(absent))
    (source,) = await tokenized(Script(FIRST, absent), [TokenizeRequest(text="a")])
    with pytest.raises(NoProcess):
        await outputs(source, Script([LOST]))


async def test_an_engine_that_died_before_the_first_output_is_retried_once():
    engine = Script([DIED], ["a", "b"])
    assert await outputs(PromptSource(FIRST), engine) == ["a", "b"]
    assert engine.seen == [FIRST, FIRST]
    with pytest.raises(ProcessDied):
        await outputs(PromptSource(FIRST), Script([DIED], [DIED]))


async def test_lost_blocks_are_rebuilt_once():
    stage, engine = Script(FIRST, SECOND), Script([LOST], ["a"])
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")])
    assert await outputs(source, engine) == ["a"]
    assert engine.seen == [FIRST, SECOND]
    (source,) = await tokenized(Script(FIRST, SECOND), [TokenizeRequest(text="a")])
    with pytest.raises(ProcessDied, match="were lost twice"):
        await outputs(source, Script([LOST], [LOST]))


async def test_lost_blocks_are_rebuilt_even_if_the_tokenizer_dies_first():
    (source,) = await tokenized(Script(FIRST, DIED, SECOND), [TokenizeRequest(text="a")])
    assert await outputs(source, Script([LOST], ["a"])) == ["a"]
    (source,) = await tokenized(Script(FIRST, DIED, DIED), [TokenizeRequest(text="a")])
    with pytest.raises(ProcessDied, match="dead"):
        await outputs(source, Script([LOST]))


async def test_tokenizer_and_engine_may_each_fail_once():
    (source,) = await tokenized(Script(FIRST, SECOND), [TokenizeRequest(text="a")])
    assert await outputs(source, Script([DIED], [LOST], ["a"])) == ["a"]


async def test_nothing_is_retried_after_the_first_output():
    with pytest.raises(ProcessDied):
        await outputs(PromptSource(FIRST), Script(["a", DIED]))


async def test_unread_output_restarts_once():
    engine = Script(["a", "b", DIED], ["a", "b", "c"])
    source = PromptSource(FIRST)
    assert [one async for one in generated(source, engine.generate, "void")] == ["a", "b", "void", "a", "b", "c"]
    assert engine.seen == [FIRST, FIRST]
    engine = Script([DIED], ["a"])
    assert [one async for one in generated(source, engine.generate, "void")] == ["a"], (
        "without earlier output, nothing has to be discarded"
    )
    with pytest.raises(ProcessDied):
        [one async for one in generated(source, Script(["a", DIED], ["a", DIED]).generate, "void")]
    engine = Script(["a", DIED], [LOST], ["b"])
    (source,) = await tokenized(Script(FIRST, SECOND), [TokenizeRequest(text="a")])
    assert [one async for one in generated(source, engine.generate, "void")] == ["a", "void", "b"]


def test_a_restarted_answer_is_empty():
    answer = Choice(index=3)
    logprob = TokenLogprob(1, 0.0, [])
    first = Delta(
        "a", [1], [logprob], [logprob], cached_tokens=5, timings=Timings(queue_s=1, prefill_s=1, tower_s=1, decode_s=1)
    )
    last = Delta("b", [2], [logprob], [logprob], cached_tokens=7, finish_reason="stop", stop_reason="x")
    for delta in (first, Delta("", [], restarted=True), last):
        answer.add(delta)
    assert (answer.index, answer.text, answer.token_ids, answer.cached_tokens) == (3, "b", [2], 7)
    assert (answer.logprobs, answer.prompt_logprobs, answer.timings) == ([logprob], [logprob], None)


async def test_choices_of_one_prompt_share_the_rebuilt_prompt():
    stage = Script(FIRST, SECOND)
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")])

    async def generate(prompt, use):
        await asyncio.sleep(0)  # all choices start with the first prompt
        if prompt is FIRST:
            raise SegmentMissing("lost")
        yield "a"

    async def choice():
        return [output async for output in generated(source, generate)]

    assert await asyncio.gather(choice(), choice(), choice()) == [["a"]] * 3
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
        self.seen.append(request and request.text)
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
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")])
    source.share(3)
    first, second = source.use(), source.use()
    await first.take()
    first.release()
    assert stage.held() == [True], "the block is kept for answers that have not begun"
    await second.take()
    second.release()
    second.release()
    assert stage.held() == [True]

    async def ends(prompt, use):
        assert can_be_read(prompt)
        yield "a"

    assert [one async for one in generated(source, ends)] == ["a"]
    assert stage.held() == [False]


async def test_answers_that_need_media_again_share_one_rebuilt_prompt_and_free_its_blocks(arena):
    stage, remade = Stage(arena), []
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")], remade.append)
    source.share(2)
    uses = [source.use(), source.use()]
    for use in uses:
        await use.take()
    for use in uses:
        use.release()
    for again in (1, 2, 3):  # once for each preemption
        prompts = await asyncio.gather(*(use.renew() for use in uses))
        assert prompts == [stage.prompts[again]] * 2
        uses[0].release()
        assert stage.held() == [False] * again + [True]
        uses[1].release()
        assert stage.held() == [False] * (again + 1)
    assert remade == stage.prompts[1:]


async def test_blocks_lost_while_another_answer_holds_them_are_rebuilt_once(arena):
    stage = Stage(arena)
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")])
    source.share(2)
    uses = [source.use(), source.use()]
    for use in uses:
        await use.take()
    assert await uses[0].renew() is stage.prompts[1]
    assert await uses[1].renew() is stage.prompts[1]
    with pytest.raises(ProcessDied, match="were lost twice"):
        await uses[0].renew()


async def test_a_restarted_answer_gets_its_freed_blocks_rebuilt(arena):
    stage = Stage(arena)
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")])
    engine = Script(["a", DIED], ["a", "b"])

    async def generate(prompt, use):
        assert can_be_read(prompt)
        use.release()
        async for output in engine.generate(prompt, use):
            yield output

    assert [one async for one in generated(source, generate, "void")] == ["a", "void", "a", "b"]
    assert engine.seen == stage.prompts
    assert stage.held() == [False, False]


async def test_one_prompt_of_a_request_is_rebuilt_alone(arena):
    """The other prompts of the request stay unchanged, whether their blocks are still there or freed."""
    stage, texts = Stage(arena), ["a", "b", "c"]
    sources = await tokenized(stage, [TokenizeRequest(text=text) for text in texts])
    assert stage.seen == texts
    uses = [source.use() for source in sources]
    assert [await use.take() for use in uses] == stage.prompts
    uses[0].release()
    uses[1].release()
    assert stage.held() == [False, False, True]
    assert await uses[1].renew() is stage.prompts[3]
    assert stage.seen == [*texts, "b"]
    assert stage.held() == [False, False, True, True]
    assert [source.prompt for source in sources] == [stage.prompts[0], stage.prompts[3], stage.prompts[2]]


async def test_prompts_lost_with_a_tokenizer_are_rebuilt_together_once():
    requests = [TokenizeRequest(text=text) for text in "ab"]
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
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")])
    use = source.use()
    await use.take()
    use.release()
    assert await use.renew() is maker.prompts[1]
    stage = Script(await maker.tokenize(None), full)
    (source,) = await tokenized(stage, [TokenizeRequest(text="a")])
    with pytest.raises(ArenaFull):
        await lost(source)


async def test_blocks_that_cannot_be_rebuilt_are_not_freed(arena):
    stage = Stage(arena)
    use = PromptSource(await stage.tokenize(None)).use()
    await use.take()
    use.release()
    assert stage.held() == [True]
    assert await use.take() is stage.prompts[0]
    with pytest.raises(SegmentMissing, match="release a path file only after the output is complete"):
        await use.renew()
    with pytest.raises(SegmentMissing, match="lost"):
        await outputs(PromptSource(FIRST), Script([LOST]))
