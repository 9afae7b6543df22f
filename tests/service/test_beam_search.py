"""Tests for `use_beam_search`. tests/engine/test_beam_search.py compares the outputs with transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.service.test_early_release import SETTINGS, TOKEN_BYTES
from tests.service.test_early_release import body as two_images
from tests.service.test_lifetime import endless_chat, post
from tests.warm import running_service
from tests.watching import metric, process, wait_until
from tools.serving import RunningService

END = 779


def ask(client: openai.OpenAI, red_square: str, n: int, **changes: Any) -> Any:
    content: Any = [
        {"type": "image_url", "image_url": {"url": red_square}},
        {"type": "text", "text": "What is in the image?"},
    ]
    settings = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2} | changes
    known = {name: settings.pop(name) for name in ("max_tokens", "logprobs", "top_logprobs")}
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        n=n,
        extra_body={"use_beam_search": True, "return_token_ids": True, **settings},
        **known,
    )


def scores(answer: Any, length_penalty: float = 1.0) -> list[float]:
    totals = [[one.logprob for one in choice.logprobs.content] for choice in answer.choices]
    return [sum(total) / len(total) ** length_penalty for total in totals]


def test_a_chat_about_an_image_has_distinct_answers_and_the_best_is_first(
    client: openai.OpenAI, red_square: str
) -> None:
    answer = ask(client, red_square, 3)
    ids = [choice.model_dump()["token_ids"] for choice in answer.choices]
    assert len({*map(tuple, ids)}) == 3
    assert answer.choices[0].message.content == "red square"
    assert scores(answer) == sorted(scores(answer), reverse=True)
    assert answer.usage.completion_tokens == sum(map(len, ids))
    for choice, tokens in zip(answer.choices, ids, strict=True):
        assert len(choice.logprobs.content) == len(tokens)
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
        assert (choice.finish_reason == "stop") == (tokens[-1] == END)
        assert END not in tokens[:-1]


def test_a_length_penalty_changes_the_order(client: openai.OpenAI, red_square: str) -> None:
    seconds = []
    for length_penalty in (-2.0, 10.0):
        answer = ask(client, red_square, 3, length_penalty=length_penalty)
        assert scores(answer, length_penalty) == sorted(scores(answer, length_penalty), reverse=True)
        seconds.append(answer.choices[1].finish_reason)
    assert seconds == ["stop", "length"], "a high length penalty favors long answers"


@pytest.mark.parametrize("prompt", ["Hello", [64, 65, 66]])
def test_each_prompt_of_a_completion_has_its_own_beams(http: Any, prompt: Any) -> None:
    given = {"prompt": [prompt, prompt], "n": 2, "max_tokens": 5, "use_beam_search": True}
    answer = http.post("/v1/completions", json=given | {"ignore_eos": True, "return_token_ids": True}).json()
    first, second, *others = [choice["token_ids"] for choice in answer["choices"]]
    assert first != second
    assert [first, second] == others
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert {len(ids) for ids in (first, second)} == {5}


def test_a_special_token_that_ends_an_answer_is_shown_on_request(client: openai.OpenAI, red_square: str) -> None:
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert ask(client, red_square, 1, **shown).choices[0].message.content == "red square<|im_end|>"
    shown["include_stop_str_in_output"] = False
    assert ask(client, red_square, 1, **shown).choices[0].message.content == "red square"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 11}, "n"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"logprobs": 1, "echo": True}, "echo"),
        ({"stream": True}, "stream"),
        ({"stop": "a"}, "stop"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
    ],
)
def test_settings_that_a_beam_search_does_not_support_are_named(http: Any, changes: dict[str, Any], param: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "use_beam_search": True, **changes}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], param in error["message"] or param == "structured_outputs") == (param, True), error


def test_harmless_settings_are_accepted(http: Any) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "use_beam_search": True, "echo": True}
    plain = http.post("/v1/completions", json=body).json()["choices"]
    harmless = {"temperature": 2, "top_p": 0.5, "top_k": 1, "seed": 1, "stop": [], "repetition_penalty": 1.0}
    assert http.post("/v1/completions", json=body | harmless | {"stream": False}).json()["choices"] == plain
    assert plain[0]["text"].startswith("Hello")


def test_a_prompt_and_an_answer_that_exceed_the_context_are_refused(http: Any) -> None:
    for prompt in ("Hello", [64, 65]):
        body = {"prompt": prompt, "max_tokens": 10**6, "use_beam_search": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "maximum context length" in answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_all_beams(service: RunningService, red_square: str) -> None:
    aborted = metric(service, "request_success_total", finished_reason="abort")
    hits = metric(service, "prefix_cache_hits_total")
    body = endless_chat(service, red_square, n=3, use_beam_search=True)
    with post(service, "/v1/chat/completions", body):
        wait_until(lambda: metric(service, "prefix_cache_hits_total") > hits + 500)
        assert service.shm()["blocks"] == 1, "later beams may need the image again"
    wait_until(lambda: metric(service, "request_success_total", finished_reason="abort") == aborted + 3)
    assert service.wait_until_free()["blocks"] == 0
    assert metric(service, "num_requests_running") + metric(service, "num_requests_waiting") == 0


BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 30}


def ids_of(service: RunningService, colour: str, **changes: Any) -> list[list[int]]:
    body = two_images(colour, **changes) | {"return_token_ids": True}
    answer = httpx2.post(f"{service.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


@pytest.mark.slow
def test_beams_survive_preemption_and_dead_processes(tmp_path: Path, device: str) -> None:
    given = SETTINGS | {"max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_cache_bytes": 400 * TOKEN_BYTES}
    given |= {"spool": tmp_path / "spool", "device": device}
    with running_service(given, tmp_path / "log") as service, ThreadPoolExecutor() as threads:
        alone = {colour: ids_of(service, colour, **BEAMS) for colour in ("red", "green")}
        long = [threads.submit(ids_of, service, "blue", max_tokens=200) for _ in range(2)]
        beams = {colour: threads.submit(ids_of, service, colour, **BEAMS) for colour in alone}
        assert {colour: ids.result() for colour, ids in beams.items()} == alone
        assert all(len(one.result()[0]) == 200 for one in long)
        assert metric(service, "media_remade_total") > 0, "beams were preempted, and needed the images again"
        for package in ("mindie_mm.tokenize.", "mindie_mm.engine."):
            started = metric(service, "e2e_request_latency_seconds_count")
            answer = threads.submit(ids_of, service, "red", **BEAMS)
            wait_until(lambda: service.shm()["blocks"] == 2)
            process(service, package).kill()
            assert answer.result() == alone["red"]
            assert metric(service, "e2e_request_latency_seconds_count") == started + 3
        assert service.wait_until_free()["bytes"] == 0
        assert service.stop() == 0
    assert not list((tmp_path / "spool").iterdir())
