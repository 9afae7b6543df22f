"""The rule of what is tried again, by itself."""

import asyncio

import numpy as np
import pytest

from mindie_mm.engine.messages import Timings, TokenLogprob
from mindie_mm.engine.retry import PromptSource, generated, tokenized
from mindie_mm.engine.worker import Delta
from mindie_mm.errors import MediaError, NoProcess, ProcessDied, SegmentMissing
from mindie_mm.tokenize.messages import TokenizeRequest
from mindie_mm.tokenize.prompt import Prompt
from service.choices import Choice

FIRST, SECOND = (Prompt(np.array([index], np.int64)) for index in range(2))
DIED, LOST = ProcessDied("dead"), SegmentMissing("lost")


class Script:
    """Gives, or raises, one after another; whoever asks for more than there is has tried too often."""

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

    async def generate(self, prompt):
        for output in self.next(prompt):
            if isinstance(output, BaseException):
                raise output
            yield output


async def outputs(source, engine):
    return [output async for output in generated(source, engine.generate)]


async def test_a_tokenizer_that_died_over_a_request_gives_it_to_another_once():
    request = TokenizeRequest(text="a")
    stage = Script(DIED, FIRST)
    source = await tokenized(stage, request)
    assert source.prompt is FIRST
    assert stage.seen == [request, request]
    with pytest.raises(ProcessDied):
        await tokenized(Script(DIED, DIED), request)
    with pytest.raises(MediaError):
        await tokenized(Script(MediaError("no picture")), request)
    with pytest.raises(ProcessDied):  # its second try it has had
        await source.replace(FIRST)


async def test_who_has_waited_in_vain_for_a_process_does_not_wait_again():
    absent = NoProcess("none came back")
    with pytest.raises(NoProcess):
        await tokenized(Script(absent), TokenizeRequest(text="a"))
    with pytest.raises(NoProcess):
        await outputs(PromptSource(FIRST), Script(absent))
    source = await tokenized(Script(FIRST, absent), TokenizeRequest(text="a"))
    with pytest.raises(NoProcess):
        await outputs(source, Script([LOST]))


async def test_an_engine_that_died_before_the_first_output_is_asked_again_once():
    engine = Script([DIED], ["a", "b"])
    assert await outputs(PromptSource(FIRST), engine) == ["a", "b"]
    assert engine.seen == [FIRST, FIRST]
    with pytest.raises(ProcessDied):
        await outputs(PromptSource(FIRST), Script([DIED], [DIED]))


async def test_blocks_that_were_lost_are_made_again_once():
    stage, engine = Script(FIRST, SECOND), Script([LOST], ["a"])
    source = await tokenized(stage, TokenizeRequest(text="a"))
    assert await outputs(source, engine) == ["a"]
    assert engine.seen == [FIRST, SECOND]
    source = await tokenized(Script(FIRST, SECOND), TokenizeRequest(text="a"))
    with pytest.raises(ProcessDied, match="no third try"):
        await outputs(source, Script([LOST], [LOST]))


async def test_a_tokenizer_that_lost_its_arena_ends_over_the_next_request_at_no_cost_of_the_request():
    source = await tokenized(Script(FIRST, DIED, SECOND), TokenizeRequest(text="a"))
    assert await outputs(source, Script([LOST], ["a"])) == ["a"]
    with pytest.raises(ProcessDied, match="dead"):
        await outputs(await tokenized(Script(FIRST, DIED, DIED), TokenizeRequest(text="a")), Script([LOST]))


async def test_both_may_die_once():
    source = await tokenized(Script(FIRST, SECOND), TokenizeRequest(text="a"))
    assert await outputs(source, Script([DIED], [LOST], ["a"])) == ["a"]


async def test_after_the_first_output_nothing_is_tried_again():
    with pytest.raises(ProcessDied):
        await outputs(PromptSource(FIRST), Script(["a", DIED]))


async def test_output_that_nobody_has_read_starts_again_once():
    engine = Script(["a", "b", DIED], ["a", "b", "c"])
    source = PromptSource(FIRST)
    assert [one async for one in generated(source, engine.generate, "void")] == ["a", "b", "void", "a", "b", "c"]
    assert engine.seen == [FIRST, FIRST]
    engine = Script([DIED], ["a"])
    assert [one async for one in generated(source, engine.generate, "void")] == ["a"], "there is nothing to take back"
    with pytest.raises(ProcessDied):
        [one async for one in generated(source, Script(["a", DIED], ["a", DIED]).generate, "void")]
    engine = Script(["a", DIED], [LOST], ["b"])
    source = await tokenized(Script(FIRST, SECOND), TokenizeRequest(text="a"))
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


async def test_choices_of_one_prompt_share_its_second_one():
    stage = Script(FIRST, SECOND)
    source = await tokenized(stage, TokenizeRequest(text="a"))

    async def generate(prompt):
        await asyncio.sleep(0)  # all have begun with the first one
        if prompt is FIRST:
            raise SegmentMissing("lost")
        yield "a"

    async def choice():
        return [output async for output in generated(source, generate)]

    assert await asyncio.gather(choice(), choice(), choice()) == [["a"]] * 3
    assert stage.steps == []


async def test_a_settled_prompt_has_dropped_what_a_second_try_needs():
    source = await tokenized(Script(FIRST, SECOND), TokenizeRequest(text="a"))
    dropped = []
    source.on_settled = lambda: dropped.append(1)
    source.settle()
    assert dropped == [1]
    with pytest.raises(ProcessDied):
        await source.replace(FIRST)
