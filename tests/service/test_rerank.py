"""Tests for /rerank and /score. tests/engine/test_score.py compares the scores with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.engine.test_score import write_reranker
from tests.models import test_qwen3_vl as qwen3_vl
from tests.warm import running_service

QUERY, DOCUMENTS = "What is in the image?", ["a red square", "a blue circle", "a"]
RERANK = {"query": QUERY, "documents": DOCUMENTS}
SCORE = {"text_1": QUERY, "text_2": DOCUMENTS}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("reranker")
    checkpoint = folder / "model"
    checkpoint.mkdir()
    qwen3_vl.TestQwen3VL.write_checkpoint(checkpoint)
    write_reranker(checkpoint, None)
    given = {"spool": folder / "spool", "device": device}
    with (
        running_service(given, folder / "log", checkpoint) as service,
        httpx2.Client(base_url=service.url, timeout=300) as client,
    ):
        yield client
        assert service.wait_until_free()["bytes"] == 0
        assert service.stop() == 0


def scores(http: httpx2.Client, **body: Any) -> list[float]:
    data = http.post("/score", json=body).raise_for_status().json()["data"]
    assert [one["index"] for one in data] == [*range(len(data))]
    return [one["score"] for one in data]


def test_documents_are_sorted_by_their_scores(reranker: httpx2.Client) -> None:
    found = scores(reranker, **SCORE)
    assert all(0 < one < 1 for one in found), "without an activation in the checkpoint's files, a score is a sigmoid"
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = reranker.post(path, json=RERANK).raise_for_status().json()
        results = answer["results"]
        order = [one["index"] for one in results]
        assert order == sorted(range(3), key=lambda index: -found[index])
        np.testing.assert_allclose([one["relevance_score"] for one in results], [found[i] for i in order], atol=1e-5)
        assert [one["document"] for one in results] == [{"text": DOCUMENTS[i]} for i in order]
        assert answer["usage"]["prompt_tokens"] > 100
        assert answer["model"] == "model"
    (best,) = reranker.post("/rerank", json={**RERANK, "top_n": 1, "return_documents": False}).json()["results"]
    assert (best["index"], best["document"]) == (order[0], None)
    whole = reranker.post("/rerank", json={**RERANK, "top_n": 0}).json()["results"]
    assert len(whole) == 3


def test_all_names_of_the_sides_give_the_same_scores(reranker: httpx2.Client) -> None:
    found = scores(reranker, **SCORE)
    for first, second in (("queries", "documents"), ("data_1", "data_2"), ("queries", "items")):
        np.testing.assert_allclose(scores(reranker, **{first: QUERY, second: DOCUMENTS}), found, atol=1e-5)
    np.testing.assert_allclose(scores(reranker, text_1=[QUERY] * 3, text_2=DOCUMENTS), found, atol=1e-5)
    raw = scores(reranker, **SCORE, use_activation=False)
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(raw))), found, atol=1e-5)
    assert abs(np.array(scores(reranker, **SCORE, instruction="Another.")) - found).max() > 1e-4
    assert reranker.post("/v1/score", json=SCORE).json()["object"] == "list"


def test_documents_may_have_images_and_be_cut(reranker: httpx2.Client, red_square: str) -> None:
    image = {"content": [{"type": "image_url", "image_url": {"url": red_square}}, {"type": "text", "text": "a"}]}
    answer = reranker.post("/rerank", json={"query": QUERY, "documents": [image, "a"]}).raise_for_status().json()
    results = {one["index"]: one for one in answer["results"]}
    assert results[0]["document"] == {"multi_modal": image["content"]}
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert abs(results[0]["relevance_score"] - results[1]["relevance_score"]) > 1e-4
    cut = reranker.post("/rerank", json={"query": QUERY, "documents": ["a red square"], "max_tokens_per_doc": 1})
    (first,) = scores(reranker, text_1=QUERY, text_2="a")
    assert abs(cut.json()["results"][0]["relevance_score"] - first) < 1e-5


def test_an_embedding_model_ranks_by_the_cosine(http: httpx2.Client) -> None:
    inputs = [QUERY, *DOCUMENTS]
    data = http.post("/v1/embeddings", json={"input": inputs}).json()["data"]
    query, *documents = (np.array(one["embedding"]) for one in data)
    np.testing.assert_allclose(scores(http, **SCORE), [query @ one for one in documents], atol=1e-5)
    answer = http.post("/rerank", json=RERANK).raise_for_status().json()
    ranked = [one["relevance_score"] for one in answer["results"]]
    assert ranked == sorted(ranked, reverse=True)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/rerank", {}, "query: Field required"),
        ("/rerank", {**RERANK, "query": ""}, "query is empty"),
        ("/rerank", {**RERANK, "query": 5}, "query: must be a string, or an object"),
        ("/rerank", {**RERANK, "documents": []}, "documents is empty"),
        ("/rerank", {**RERANK, "documents": ["a", ""]}, "documents[1] is empty"),
        ("/rerank", {**RERANK, "documents": "a"}, "documents: Input should be a valid list"),
        ("/rerank", {**RERANK, "documents": [{}]}, "documents[0].content is missing"),
        ("/rerank", {**RERANK, "documents": [{"content": []}]}, "documents[0] is empty"),
        ("/rerank", {**RERANK, "documents": [{"content": [{"type": "x"}]}]}, "content"),
        ("/rerank", {**RERANK, "documents": ["a"] * 2049}, "the request has 2049 pairs; the limit is 2048"),
        ("/rerank", {"query": "a" * 20_000, "documents": ["a"] * 1000}, "characters, with the query in each"),
        ("/rerank", {**RERANK, "documents": ["a" * 50_000]}, "maximum context length is"),
        ("/rerank", {**RERANK, "top_n": -1}, "top_n: Input should be greater than or equal to 0"),
        ("/rerank", {**RERANK, "rank_fields": ["title"]}, "rank_fields is not supported"),
        ("/score", {}, "exactly one of text_1, queries, data_1"),
        ("/score", {"text_1": "a"}, "exactly one of text_2, documents, data_2, items"),
        ("/score", {**SCORE, "queries": "a"}, "exactly one of text_1, queries, data_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "there are 2 queries for 1 documents"),
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1 is empty"),
        ("/score", {"text_1": "a", "text_2": ["a", 5]}, "text_2: must be a string, or an object"),
    ],
)
def test_a_wrong_request_gets_status_400(http: httpx2.Client, path: str, body: dict[str, Any], message: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert http.post(path, json={**(RERANK if path == "/rerank" else SCORE), "model": "gpt"}).status_code == 404
