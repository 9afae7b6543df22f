"""Tests for /v1/embeddings. tests/engine/test_embed.py compares the values with transformers."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from mindie_mm import LLM, EngineConfig, PoolingParams, WorkerConfig
from service.schemas.embedding_types import MAX_INPUTS
from tests.service.conftest import TINY
from tests.warm import running_service
from tests.watching import metric, process, wait_until

SIZE = 128
TEXTS = ["Hello!", "What is in the image?", "A red square."]
TEXT = {"input": "Hello!"}
CHAT = [{"role": "user", "content": "Hello!"}]


def post(http: httpx2.Client, **body: Any) -> list[Any]:
    """Return the embeddings of a request."""
    answer = http.post("/v1/embeddings", json=body).raise_for_status().json()
    assert [one["index"] for one in answer["data"]] == [*range(len(answer["data"]))]
    return [one["embedding"] for one in answer["data"]]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_openai_client_gets_normalized_embeddings(client: openai.OpenAI, encoding: Any) -> None:
    """Without `encoding_format`, the client asks for base64 and decodes it."""
    given = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input=TEXTS, **given)
    vectors = [one.embedding for one in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(one), "<f4") for one in vectors]
    assert np.shape(vectors) == (3, SIZE)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 3
    assert answer.model == "tiny"


def test_all_forms_of_an_input_have_the_same_embedding(http: httpx2.Client, device: str) -> None:
    ids = http.post("/tokenize", json={"prompt": TEXTS[1]}).json()["tokens"]
    (whole,) = post(http, input=TEXTS[1])
    for form in ([TEXTS[1]], ids, [ids]):
        np.testing.assert_allclose(post(http, input=form), [whole], atol=1e-5)
    batch = post(http, input=TEXTS)
    alone = [post(http, input=text)[0] for text in TEXTS]
    np.testing.assert_allclose(batch, alone, atol=1e-5)
    (short,) = post(http, input=TEXTS[1], dimensions=16)
    np.testing.assert_allclose(short, np.array(whole[:16]) / np.linalg.norm(whole[:16]), atol=1e-5)
    (raw,) = post(http, input=TEXTS[1], normalize=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), whole, atol=1e-5)


def test_chats_may_contain_images(http: httpx2.Client, red_square: str) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": red_square}}]}
    (of_image,) = post(http, messages=[image])
    of_several = post(http, messages=[CHAT, [image]])
    np.testing.assert_allclose(of_several[1], of_image, atol=1e-5)
    np.testing.assert_allclose(post(http, input=[CHAT, [image]]), of_several, atol=1e-5)
    assert abs(np.array(of_several[0]) - of_image).max() > 0.01
    (opened,) = post(http, messages=CHAT, add_generation_prompt=True)
    assert abs(np.array(of_several[0]) - opened).max() > 0.01


@pytest.mark.usefixtures("copied_workers")
def test_the_service_and_the_library_agree(http: httpx2.Client, device: str) -> None:
    with LLM(TINY, WorkerConfig(pooling="last", engine=EngineConfig(device=device))) as llm:
        outputs = llm.embed(TEXTS, PoolingParams(dimensions=32))
    np.testing.assert_allclose(post(http, input=TEXTS, dimensions=32), [one.embedding for one in outputs], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "exactly one of input and messages"),
        ({**TEXT, "messages": CHAT}, "exactly one of input and messages"),
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": ["a", ""]}, "contains an empty input"),
        ({"input": [[]]}, "contains an empty input"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [CHAT, []]}, "contains an empty input"),
        ({"input": 5}, "must be a string, token ids, messages of a chat, or a list of one of these"),
        ({"input": ["a", 5]}, "must be a string, token ids"),
        ({"input": [[1], "a"]}, "must be a string, token ids"),
        ({"input": [1.5]}, "must be a string, token ids"),
        ({"input": [-1]}, "token id -1 is outside the vocabulary"),
        ({"input": [10**30]}, "is outside the vocabulary"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, f"has {MAX_INPUTS + 1} inputs; the limit is {MAX_INPUTS}"),
        ({"input": "a" * 50_000}, "maximum context length is 4096 tokens"),
        ({"input": [5] * 5000}, "maximum context length is 4096 tokens"),
        ({"messages": [{"role": "user"}]}, "has no content"),
        ({**TEXT, "dimensions": 0}, "dimensions: Input should be greater than or equal to 1"),
        ({**TEXT, "dimensions": SIZE + 1}, rf"dimensions={SIZE + 1} must be in [1, {SIZE}]"),
        ({**TEXT, "encoding_format": "int8"}, "encoding_format: Input should be 'float' or 'base64'"),
        ({**TEXT, "embed_dtype": "float16"}, 'embed_dtype is not supported, except "float32"'),
        ({**TEXT, "normalize": True, "use_activation": False}, "normalize and use_activation differ"),
        ({**TEXT, "prompt_name": "query"}, "prompt_name is 'query'; the checkpoint's instructions are none"),
        ({**TEXT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({**TEXT, "stream": True}, "stream is not supported"),
        ({**TEXT, "priority": 3}, "priority=3 must be 0"),
        ({"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_a_wrong_request_gets_status_400(http: httpx2.Client, body: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert http.post("/v1/embeddings", json={**TEXT, "model": "gpt"}).status_code == 404


def test_longer_inputs_are_truncated_on_request(http: httpx2.Client) -> None:
    ids = [*range(5, 25)]
    for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
        truncated = post(http, input=ids, truncate_prompt_tokens=4, truncation_side=side)
        np.testing.assert_allclose(truncated, post(http, input=kept), atol=1e-5)


@pytest.mark.slow  # tests/engine/test_embed.py has the same refusal without a service
def test_a_checkpoint_that_does_not_pool_is_refused_with_advice(tmp_path: Path, device: str) -> None:
    with running_service({"spool": tmp_path / "spool", "device": device}, tmp_path / "log") as service:
        answer = httpx2.post(f"{service.url}/v1/embeddings", json=TEXT)
        assert answer.status_code == 400
        assert "Set the option --pooling of the service" in answer.json()["error"]["message"]
        assert service.stop() == 0


@pytest.mark.slow
def test_embeddings_survive_the_death_of_a_process(tmp_path: Path, device: str, red_square: str) -> None:
    """Kill -9 the tokenizer, and then the engine, while a request with images runs. Its answer stays the same."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": red_square}}]}
    body = {"messages": [[image, *CHAT]] * 16, "normalize": False}
    given = {"spool": tmp_path / "spool", "device": device, "pooling": "mean", "max_num_seqs": 2}
    given |= {"encoder_cache_bytes": 0, "prefix_caching": False}
    with (
        running_service(given, tmp_path / "log") as service,
        httpx2.Client(base_url=service.url, timeout=300) as http,
        ThreadPoolExecutor() as threads,
    ):
        alone = post(http, messages=body["messages"][:1], normalize=False) * 16
        for package in ("mindie_mm.tokenize.", "mindie_mm.engine."):
            started = metric(service, "e2e_request_latency_seconds_count")
            answer = threads.submit(post, http, **body)
            wait_until(lambda: service.shm()["blocks"] > 0)
            process(service, package).kill()
            np.testing.assert_allclose(answer.result(), alone, atol=1e-4)
            assert metric(service, "e2e_request_latency_seconds_count") == started + 16
        assert service.wait_until_free()["bytes"] == 0
        assert service.stop() == 0
    assert not list((tmp_path / "spool").iterdir())
