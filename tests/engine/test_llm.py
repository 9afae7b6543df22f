"""Tests for `LLM`, the interface for offline scripts."""

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from mindie_mm import LLM, BeamSearchParams, Embeddings, SamplingParams, StructuredOutputs, Tokenizer
from mindie_mm.errors import (
    ContextLengthExceeded,
    InputError,
    LimitExceeded,
    MediaError,
    OperationalError,
    ProcessDied,
)
from mindie_mm.settings.config import EngineConfig, WorkerConfig
from mindie_mm.shm import arenas_of
from mindie_mm.worker import worker as worker_module
from mindie_mm.worker.worker import Worker
from tools.demo import data_url

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LOGPROBS = msgspec.structs.replace(GREEDY, logprobs=0)

pytestmark = pytest.mark.usefixtures("copied_workers")


@pytest.fixture(scope="module")
def llm(random_checkpoint):
    """Yield an LLM that was opened by a relative path in another working directory."""
    with contextlib.chdir(random_checkpoint.parent):
        llm = LLM(random_checkpoint.name, limit_mm_per_prompt={"video": 1})
    with llm:
        yield llm


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))


def test_inputs_run_in_one_batch_and_the_outputs_keep_their_order(llm, image):
    inputs = [[{"image": image}, {"text": "What?"}], "Hello", [{"text": "a"}, {"image": image}, {"image": image}]]
    together = llm.generate(inputs, GREEDY)
    alone = [llm.generate([one], GREEDY)[0] for one in inputs]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert all(output.finish_reason == "length" and output.timings for output in together)


def test_control_tokens_of_a_raw_prompt_are_parsed(llm):
    raw = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    (chat,) = llm.generate(["What?"], params)

    def length(**options):
        (output,) = llm.generate([raw], params, chat_template=False, **options)
        return len(output.prompt_logprobs), output.token_ids

    assert length() == length(parse_special=True) == (len(chat.prompt_logprobs), chat.token_ids)
    assert length(parse_special=False)[0] > length()[0]
    streamed = [*llm.stream(raw, params, chat_template=False)]
    assert [token for delta in streamed for token in delta.token_ids] == chat.token_ids
    with pytest.raises(InputError, match="parse_special=true is not supported for a chat"):
        llm.generate([raw], params, parse_special=True)


def test_the_image_changes_the_answer(llm, image):
    black = Image.new("RGB", image.size)
    (one,), (other,) = (llm.generate([[{"image": given}, {"text": "What?"}]], GREEDY) for given in (image, black))
    assert one.token_ids != other.token_ids


def test_an_array_in_any_form_is_the_image(llm, image):
    """Numbers of numpy are numbers, too."""
    params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(6), ignore_eos=np.bool_(True))
    rgb, file = np.asarray(image), io.BytesIO()
    image.save(file, "PNG")
    forms = [
        image,
        rgb,
        rgb.transpose(2, 0, 1),
        rgb / 255,
        torch.from_numpy((rgb / np.float32(255)).transpose(2, 0, 1)),
        file,
    ]
    options = {"max_pixels": np.int64(2**16)}
    outputs = llm.generate([[{"image": form, **options}, {"text": "What is it?"}] for form in forms], params)
    assert len({(output.text, *output.token_ids) for output in outputs}) == 1
    with pytest.raises(InputError, match="floats must be from 0 to 1"):
        llm.generate([[{"image": rgb.astype(np.float32)}, {"text": "What is it?"}]], params)


def test_encoded_items_take_the_place_of_the_items(llm, image):
    other, question = image.resize((40, 60)), {"text": "What?"}
    items = [{"image": image}, question, {"image": other}, {"image": Embeddings(np.zeros((4, 64), "f2"), (1, 4, 4))}]
    first, second, given = features = llm.encode(items)
    assert llm.encode([question]) == llm.encode([]) == []
    assert (given.array.shape, given.array.any(), given.grid) == ((4, 64), False, (1, 4, 4))
    assert not any(block for arena in arenas_of([os.getpid()]) for block in arena.blocks), "blocks are left"
    (expected,) = llm.generate([[{"image": image}, question, {"image": other}]], LOGPROBS)
    batch = [torch.from_numpy(one.array).unsqueeze(0) for one in features[:2]]
    thw = torch.tensor([first.grid, second.grid])
    inputs = [
        [{"image_embeds": first}, question, {"image": second}],
        [{"image_embeds": first.array, "grid": first.grid}, question, {"image": other}],
        [{"image_embeds": batch[0], "image_grid_thw": thw[:1]}, question, {"image_embeds": [second]}],
    ]
    for output in llm.generate(inputs, LOGPROBS):
        assert_same(output, expected)
    (expected,) = llm.generate([[{"image": image}, {"image": other}, question]], LOGPROBS)
    inputs = [[{"image_embeds": features[:2]}, question], [{"image_embeds": batch, "image_grid_thw": thw}, question]]
    for output in llm.generate(inputs, LOGPROBS):
        assert_same(output, expected)


def assert_same(output, expected):
    assert output.token_ids == expected.token_ids
    found, wanted = ([one.logprob for one in each.logprobs] for each in (output, expected))
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ({"image": "a.png"}, InputError, r"items is of type dict; it must be a list, such as \[{'image': path}\]"),
        ("a.png", InputError, "items is of type str"),
        ([5], InputError, r"inputs\[0\] is of type int"),
        ([{"image": "/no/such/file.png"}], MediaError, "/no/such/file.png"),
    ],
)
def test_items_that_cannot_be_encoded_are_refused(llm, items, error, message):
    with pytest.raises(error, match=message):
        llm.encode(items)
    assert not any(block for arena in arenas_of([os.getpid()]) for block in arena.blocks), "blocks are left"


def test_the_chat_template_can_be_omitted(llm):
    (bare,), (turn,) = (llm.generate(["Hello"], GREEDY, chat_template=template) for template in (False, True))
    assert bare.token_ids != turn.token_ids


def test_one_bad_input_does_not_fail_the_others(llm):
    inputs = ["Hello", [{"image": "/no/such/file.png"}], "There"]
    good, bad, also_good = llm.generate(inputs, GREEDY, on_error="return")
    assert good.text
    assert also_good.text
    assert isinstance(bad.error, MediaError)
    assert "/no/such/file.png" in str(bad.error)
    with pytest.raises(MediaError):
        llm.generate(inputs, GREEDY)


def test_an_input_with_too_many_items_is_refused_before_any_is_decoded(llm):
    (output,) = llm.generate([[{"video": b"not a video"}] * 2], GREEDY, on_error="return")
    assert isinstance(output.error, LimitExceeded)
    assert "has 2 media items of kind video; the limit is 1 (limit_mm_per_prompt)" in str(output.error)
    with pytest.raises(LimitExceeded, match="the limit is 1"):
        llm.chat([{"role": "user", "content": [{"video": b"not a video"}]}] * 2, GREEDY)


def test_texts_may_have_images_as_in_text_generation_webui(llm, image):
    url = data_url(image)
    text = f'<img src="{url}">What?'
    items = [{"image": url}, {"text": "What?"}]
    expected, found = llm.generate([items], GREEDY), llm.generate([text], GREEDY, webui=True)
    assert found[0].token_ids == expected[0].token_ids
    message = {"role": "user", "content": text}
    assert llm.chat([message], GREEDY, webui=True).token_ids == expected[0].token_ids
    streamed = [token for delta in llm.stream(text, GREEDY, webui=True) for token in delta.token_ids]
    assert streamed == expected[0].token_ids


def test_an_unexpected_exception_does_not_fail_the_others(llm, monkeypatch):
    own, left = llm._answer, iter([True])

    async def answer(request, params):
        if next(left, False):
            raise ZeroDivisionError("as a library does")
        return await own(request, params)

    monkeypatch.setattr(llm, "_answer", answer)
    bad, good = llm.generate(["a", "b"], GREEDY, on_error="return")
    assert isinstance(bad.error, OperationalError)
    assert isinstance(bad.error.__cause__, ZeroDivisionError)
    assert (good.error, bool(good.text)) == (None, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1}, "temperature=-1 must be in"),
        ({"max_tokens": "5"}, "max_tokens='5' must be an integer, not a string"),
        ({"stop": None}, "stop must be a list, not null"),
        ({"stop": (1,)}, r"stop\[0\] must be a string, not an integer"),
        ({"stop_token_ids": (10**6,)}, "stop_token_ids has token id 1000000"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_input_is_read(llm, wrong, message):
    params = SamplingParams(**wrong)
    with pytest.raises(InputError, match=message):
        llm.generate([[{"image": "/no/such/file.png"}]], params, on_error="return")
    with pytest.raises(InputError, match=message):
        llm.chat([], params)


def test_an_output_has_the_requested_logprobs_and_stop_reason(llm):
    plain, asked = (
        llm.generate(["Hello"], msgspec.structs.replace(GREEDY, **more))[0]
        for more in ({}, {"prompt_logprobs": 1, "logprobs": 0, "cache_salt": "not kept"})
    )
    assert (plain.prompt_logprobs, plain.logprobs, plain.stop_reason) == (None, None, None)
    assert len(asked.logprobs) == len(asked.token_ids)
    assert asked.prompt_logprobs
    third = plain.token_ids[2]
    (stopped,) = llm.generate(["Hello"], msgspec.structs.replace(GREEDY, stop_token_ids=(third,)))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)
    more = {"stop_token_ids": (third,), "include_stop_str_in_output": True}
    (included,) = llm.generate(["Hello"], msgspec.structs.replace(GREEDY, **more))
    assert included.token_ids == stopped.token_ids
    assert included.text.startswith(stopped.text)
    assert plain.text.startswith(included.text)
    assert len(stopped.text) < len(included.text), "the stop token is part of the text only on request"


def test_an_end_token_of_ordinary_text_is_in_the_text_only_on_request(llm, random_checkpoint, tmp_path):
    """generation_config.json may name an end token that is not special."""
    (plain,) = llm.generate(["Hello"], GREEDY)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": plain.token_ids[2]}))
    with LLM(config=WorkerConfig(model=random_checkpoint, generation_config=str(tmp_path))) as ending:
        params = msgspec.structs.replace(GREEDY, ignore_eos=False)
        (ended,) = ending.generate(["Hello"], params)
        (included,) = ending.generate(["Hello"], msgspec.structs.replace(params, include_stop_str_in_output=True))
    assert ended.token_ids == included.token_ids == plain.token_ids[: len(ended.token_ids)]
    assert ended.token_ids[-1] == plain.token_ids[2]
    assert plain.text.startswith(included.text)
    assert included.text.startswith(ended.text)
    assert len(ended.text) < len(included.text)


def test_tokens_are_excluded_allowed_and_scored_on_request(llm):
    plain, *others = (
        llm.generate(["Hello"], msgspec.structs.replace(GREEDY, **more))[0]
        for more in (
            {},
            {"allowed_token_ids": (64, 65)},
            {"logprobs": 0, "logprob_token_ids": (64, 65)},
            {"logprobs": -1, "max_tokens": 1},
        )
    )
    allowed, scored, every = others
    assert {*allowed.token_ids} <= {64, 65}
    assert scored.token_ids == plain.token_ids
    assert [[token for token, _ in one.top] for one in scored.logprobs] == [[64, 65]] * len(plain.token_ids)
    whole = dict(every.logprobs[0].top)
    assert scored.logprobs[0].top == [(token, pytest.approx(whole[token], abs=1e-4)) for token in (64, 65)]
    word = next(word for word in plain.text.split() if word.isascii())
    (without,) = llm.generate(["Hello"], msgspec.structs.replace(GREEDY, bad_words=(word,)))
    assert word not in without.text.split()


def test_a_chat_passes_template_options_except_reserved_names(llm):
    messages = [{"role": "user", "content": "Hello"}]
    plain = llm.chat(messages, GREEDY).token_ids
    for change in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        assert llm.chat(messages, GREEDY, **change).token_ids != plain
    with pytest.raises(InputError, match="must not contain 'messages'"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"messages": []})


def test_a_chat_returns_logprobs(llm):
    output = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    assert len(output.logprobs) == len(output.token_ids)


def test_a_list_of_conversations_gets_a_list_of_outputs(llm, image):
    one = [{"role": "user", "content": "Hello"}]
    other = [{"role": "user", "content": [{"image": image}, {"text": "What?"}]}]
    bad = [{"role": "user", "content": [{"image": "/no/such/file.png"}]}]
    outputs = llm.chat([one, bad, tuple(other)], GREEDY, on_error="return")
    assert [type(output.error) for output in outputs] == [type(None), MediaError, type(None)]
    assert [outputs[0].token_ids, outputs[2].token_ids] == [llm.chat(chat, GREEDY).token_ids for chat in (one, other)]
    assert isinstance(llm.chat([one], GREEDY), list)
    with pytest.raises(MediaError):
        llm.chat([one, bad], GREEDY)
    with pytest.raises(InputError):
        llm.chat([], GREEDY)


def test_a_prompt_that_is_too_long_is_refused_or_optionally_truncated(random_checkpoint, image):
    long = [[{"text": "old words " * 300}, {"image": image}, {"text": "What?"}]]
    engine = EngineConfig(max_model_len=128)
    with LLM(config=WorkerConfig(model=random_checkpoint, engine=engine)) as llm:
        with pytest.raises(ContextLengthExceeded, match="122"):
            llm.generate(long, GREEDY)
        with pytest.raises(ContextLengthExceeded, match="200"):
            llm.generate(["Hello"], SamplingParams(max_tokens=200))
        with pytest.raises(ContextLengthExceeded, match="tokens; the limit is 128"):
            llm.encode([{"image": image}] * 50)
    with LLM(config=WorkerConfig(model=random_checkpoint, engine=engine, truncate=True)) as llm:
        assert len(llm.generate(long, GREEDY)[0].token_ids) == 6


def test_inputs_wait_for_a_small_arena_and_a_removed_arena_is_replaced(random_checkpoint, monkeypatch):
    inputs = [[{"image": Image.new("RGB", (200, 200), (i, i, i))}, {"text": "What?"}] for i in range(12)]
    others = {arena.file for arena in arenas_of([os.getpid()])}
    with LLM(random_checkpoint, WorkerConfig(arena_bytes=300_000)) as llm:
        first = llm.generate(inputs, GREEDY)
        assert all(output.finish_reason == "length" for output in first)
        remove_arenas_but(others)
        assert llm.generate(inputs, GREEDY)[-1].token_ids == first[-1].token_ids

        own, left = llm._worker.tokenizer_stage.tokenize_together, iter([True])

        async def tokenize(requests):
            prompts = await own(requests)
            if next(left, False):
                remove_arenas_but(others)
            return prompts

        monkeypatch.setattr(llm._worker.tokenizer_stage, "tokenize_together", tokenize)
        assert llm.generate(inputs[:1], GREEDY)[0].token_ids == first[0].token_ids, (
            "an arena may be removed before the engine has mapped it"
        )


def remove_arenas_but(others):
    """Remove all arenas of this process except `others`, as systemd-logind does when the user logs out (RemoveIPC)."""
    for arena in arenas_of([os.getpid()]):
        if arena.file not in others:
            Path(arena.file).unlink()


def test_relative_paths_are_resolved_at_the_call(llm, image, tmp_path, monkeypatch):
    own = llm._answer

    async def answer(request, params):
        os.chdir("/")
        return await own(request, params)

    image.save(tmp_path / "a.png")
    monkeypatch.setattr(llm, "_answer", answer)
    monkeypatch.chdir(tmp_path)
    (named,) = llm.generate([[{"image": "a.png"}, {"text": "What?"}]], GREEDY)
    monkeypatch.chdir(tmp_path)
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    chat = llm.chat([{"role": "user", "content": parts}], GREEDY)
    (given,) = llm.generate([[{"image": image}, {"text": "What?"}]], GREEDY)
    assert named.token_ids == chat.token_ids == given.token_ids
    constrained = SamplingParams(max_tokens=20, json_schema='{"type": "boolean"}')
    assert llm.generate(["Yes?"], constrained)[0].text in ("true", "false")


def test_a_structured_output_may_begin_after_the_reasoning(llm):
    """The logit bias makes the model produce five dots, which end the reasoning.

    From then on, the mask overrides the bias.
    """
    dot = llm._worker.tokenizer.token_to_id(".")
    wanted = StructuredOutputs(regex="[xyz]{3}", after=".....")
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=wanted, logit_bias={dot: 100})
    found = llm.generate(["Hello"] * 3, params)
    assert all(re.fullmatch(r"\.{5}[xyz]{3}", output.text) for output in found)
    assert {output.finish_reason for output in found} == {"stop"}
    assert llm.generate(["Hello"], GREEDY)[0].text != found[0].text


def test_an_engine_that_dies_between_two_calls_is_restarted(llm, image):
    inputs = [[{"image": image}, {"text": "What?"}]]
    (before,) = llm.generate(inputs, GREEDY)
    os.kill(llm._worker.engine.pid, signal.SIGKILL)
    (features,) = llm.encode([{"image": image}])
    (after, embedded) = llm.generate([*inputs, [{"image_embeds": features}, {"text": "What?"}]], GREEDY)
    assert after.token_ids == embedded.token_ids == before.token_ids


def test_a_tuple_works_like_a_list(llm, image):
    inputs = [[{"image": image}, {"text": "What?"}], "Hello"]
    listed, tuples = (llm.generate(given, GREEDY) for given in (inputs, (tuple(inputs[0]), inputs[1])))
    assert [output.token_ids for output in tuples] == [output.token_ids for output in listed]
    (stopped,) = llm.generate(("Hello",), msgspec.structs.replace(GREEDY, stop=listed[1].text[:1]))
    assert (stopped.text, stopped.stop_reason) == ("", listed[1].text[:1])


def test_a_single_input_need_not_be_in_a_list(llm, image):
    items = [{"image": image}, {"text": "What?"}]
    listed = llm.generate(["Hello", items, [5, 6, 7]], GREEDY)
    singles = [llm.generate(one, GREEDY) for one in ("Hello", items, [5, 6, 7])]
    arrays = [llm.generate(one, GREEDY) for one in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]))]
    assert [output.token_ids for (output,) in singles] == [output.token_ids for output in listed]
    assert all(output.token_ids == listed[2].token_ids for (output,) in arrays)
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    (single,), (first, _) = (llm.beam_search(prompts, beams) for prompts in ("Hello", ["Hello", items]))
    assert [one.tokens for one in single.sequences] == [one.tokens for one in first.sequences]


def test_each_input_may_have_its_own_params(llm):
    """As in vLLM, `params` may be a list, and its first element belongs to the first input."""
    lengths = [2, 6, 1]
    params = [msgspec.structs.replace(GREEDY, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate(["Hello!"] * 3, params)
    assert [len(output.token_ids) for output in outputs] == lengths
    chat = [{"role": "user", "content": "Hello!"}]
    assert [len(output.token_ids) for output in llm.chat([chat] * 3, tuple(params))] == lengths
    assert len(llm.chat(chat, params[1:2]).token_ids) == len(llm.generate("Hello!", params[1:2])[0].token_ids) == 6
    assert llm.generate([], []) == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "params has 1 element for 2 inputs; give one for each input, or the same"),
        ([GREEDY] * 3, "params has 3 elements for 2 inputs"),
        ([], "params has 0 elements for 2 inputs"),
        ([GREEDY, None], "params is missing; it must be SamplingParams, or a list of them"),
        ({"temperature": 0}, "params is of type dict; it must be SamplingParams"),
        (BeamSearchParams(beam_width=1, max_tokens=1), "params is of type BeamSearchParams; it must be SamplingParams"),
    ],
)
def test_params_that_do_not_fit_the_inputs_are_refused(llm, params, message):
    with pytest.raises(InputError, match=message):
        llm.generate(["Hello!", "Hello!"], params)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text": "What?"}, "inputs is of type dict; give a string, a list of items"),
        ([[{"text": "a"}], 5], r"inputs\[1\] is of type int; give a string, a list of items"),
        (["a", {"text": "b"}], r"inputs\[1\] is one item of a prompt; put the items of a prompt in a list"),
        (b"Hello", "inputs is of type bytes; give a string"),
        ((one for one in "ab"), "inputs is of type generator; give a string"),
    ],
)
def test_inputs_that_are_not_prompts_are_refused(llm, inputs, message):
    with pytest.raises(InputError, match=message):
        llm.generate(inputs, GREEDY)


@pytest.mark.parametrize("inputs", [[[]], [[{"image": "a.png", "text": "b"}]], [{"image": "a.png", "text": "b"}]])
def test_an_invalid_input_is_refused(llm, inputs):
    with pytest.raises(InputError):
        llm.generate(inputs, GREEDY)


def test_a_closed_llm_refuses_calls(random_checkpoint):
    with LLM(random_checkpoint) as llm:
        pass
    closed = (
        lambda: llm.encode([{"image": "a.png"}]),
        lambda: llm.generate(["Hello"]),
        lambda: llm.chat([{"role": "user", "content": "Hello"}]),
    )
    for use in closed:
        with pytest.raises(InputError, match="the LLM is closed"):
            use()
    llm.close()


def test_closing_ends_calls_of_other_threads(random_checkpoint):
    """The call has more inputs than the engine runs at a time. It ends as a whole, and no input fails on its own."""
    config = WorkerConfig(engine=EngineConfig(max_num_seqs=2))
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with LLM(random_checkpoint, config) as llm, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(llm.generate, ["Hello"] * 20, long, on_error="return")
        while not llm._worker.engine.stats.num_running:
            assert not waiting.done()
            time.sleep(0.01)
        llm.close()
        with pytest.raises(InputError, match="the LLM is closed"):
            waiting.result(timeout=300)


def test_a_forked_process_cannot_use_the_llm(llm):
    if (child := os.fork()) == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            with pytest.raises(InputError, match=f"process {os.getppid()}, from which this process was forked"):
                llm.generate(["Hello"], GREEDY)
            llm.close()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert llm.generate(["Hello"], GREEDY)[0].text


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_canceled_start_leaves_no_process(random_checkpoint, stopped_workers, in_process):
    """Worker processes are killed, because they could take a long time to end."""
    config, num_workers = WorkerConfig(model=random_checkpoint, decoders=0), 1 if in_process else 2
    starting = asyncio.create_task(Worker.start(config, in_process=in_process))
    workers = [await stopped_workers.get() for _ in range(num_workers)]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL] * num_workers


async def test_a_start_that_fails_late_leaves_no_process(random_checkpoint, monkeypatch):
    def fail(*_):
        raise OSError("Too many open files")

    children = psutil.Process().children()
    monkeypatch.setattr(worker_module, "load_tokenizer", fail)
    with pytest.raises(OSError, match="Too many open files"):
        await Worker.start(WorkerConfig(model=random_checkpoint), in_process=True)
    assert psutil.Process().children() == children


def test_an_embedded_python_without_an_executable_is_refused(random_checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(ProcessDied, match=r"no worker process can be started: sys.executable is None"):
        LLM(random_checkpoint)
    with Tokenizer.from_pretrained(random_checkpoint) as tokenizer:
        assert len(tokenizer.tokenize([{"text": "Hello"}])) > 0, "a tokenizer in this process starts no worker process"


SCRIPT = """
import atexit, threading

def ask(when):
    try:
        print(when, len(llm.generate([[{{"text": "Hello"}}, {{"image": Image.new("RGB", (60, 90))}}]] * 3, PARAMS)))
    except MindieMMError as error:
        print(when, error)

def work():
    threading.main_thread().join()
    ask("late")

atexit.register(ask, "last")
from PIL import Image
from mindie_mm import LLM, MindieMMError, SamplingParams
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
llm = LLM({path!r}, decoders={decoders})
ask("first")
atexit.register(ask, "at exit")
threading.Thread(target=work).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("decoders", [0, 2])
def test_a_script_on_standard_input_gets_answers_until_it_ends(random_checkpoint, decoders):
    """The script has no main guard and closes nothing. Workers do not import `__main__` again.

    A thread of the script outlives the main thread and still gets answers. An exit handler that was registered before
    the LLM runs after the LLM has been closed.
    """
    script = SCRIPT.format(path=str(random_checkpoint), decoders=decoders)
    ended = subprocess.run([sys.executable], input=script, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ["first 3", "late 3", "at exit 3", "last the LLM is closed: the interpreter is shutting down"]
    assert ended.stdout.splitlines() == lines
    assert "Traceback" not in ended.stderr
