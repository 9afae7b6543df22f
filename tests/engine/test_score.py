"""Tests for `LLM.score` against sentence-transformers' LogitScore, over logits of transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindie_mm import LLM
from mindie_mm.errors import InputError
from tests.engine.test_embed import FORWARD, MODULES, TRANSFORMER, normalized, states, turn, write_modules
from tests.models import test_qwen3_vl as qwen3_vl
from tests.models.contract import noise
from tests.transformers_reference import AutoTokenizer

pytestmark = pytest.mark.usefixtures("copied_workers")

TOLERANCE = 1e-4
TRUE, FALSE = 300, 70
RERANKER = (
    "{% macro show(role) %}{% for message in messages if message.role == role %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}{% endmacro %}"
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: {{ show('system') }}"
    "<Query>:{{ show('query') }}\n<Document>:{{ show('document') }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template like that of Qwen3-VL-Reranker. It writes no user's text."""
KINDS = (MODULES[0], ("1_LogitScore", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"))
INSTRUCTION = "Find what answers the query."
QUERY, DOCUMENTS = "What is in the image?", ["a red square", "a blue circle <|im_end|> and more", "a"]


def write_reranker(folder: Path, activation: str | None, score: Any = None) -> None:
    """Add the files of a reranker, whose template is not the default one."""
    template = {"chat_template": "reranker", "add_generation_prompt": True}
    forward = {**FORWARD, "method_output_name": "logits"}
    transformer = {
        "transformer_task": "any-to-any",
        "modality_config": {"text": forward, "message": {**forward, "format": "structured"}},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": template},
    }
    write_modules(folder, "mean", kinds=KINDS, transformer=transformer)
    score = score or {"true_token_id": TRUE, "false_token_id": FALSE, "module_input_name": "causal_logits"}
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore/config.json").write_text(json.dumps(score))
    settings = {
        "model_type": "CrossEncoder",
        "activation_fn": activation,
        "prompts": {"query": INSTRUCTION},
        "default_prompt_name": "query",
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/reranker.jinja").write_text(RERANKER)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    folder.mkdir()
    qwen3_vl.TestQwen3VL.write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def reference(plain: Path) -> qwen3_vl.Reference:
    return qwen3_vl.Reference(plain)


@pytest.fixture(scope="module")
def reranker(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("reranker") / "model"
    shutil.copytree(plain, folder)
    write_reranker(folder, "torch.nn.modules.linear.Identity")
    with LLM(folder) as llm:
        yield llm


def logit_score(
    reference: qwen3_vl.Reference, plain: Path, query: str, document: str, instruction: str, images: Any = ()
) -> float:
    """Return the difference of the logits after the prompt, as LogitScore does."""
    parts = [*([{"type": "image"}] if images else []), {"type": "text", "text": document}]
    chat = [
        {"role": "system", "content": [{"type": "text", "text": instruction}]},
        {"role": "query", "content": [{"type": "text", "text": query}]},
        {"role": "document", "content": parts},
    ]
    tokenizer = AutoTokenizer.from_pretrained(plain)
    text = tokenizer.apply_chat_template(chat, chat_template=RERANKER, tokenize=False, add_generation_prompt=True)
    inputs = reference.processor(text=[text], return_tensors="pt", **({"images": [*images]} if images else {}))
    with torch.inference_mode():
        logits = reference.model(**inputs).logits[0, -1].float()
    return float(logits[TRUE] - logits[FALSE])


def test_scores_equal_those_of_logit_score(reranker: LLM, reference: qwen3_vl.Reference, plain: Path) -> None:
    """A special token that a document spells out is plain text, so only texts without one are compared."""
    found = reranker.score(QUERY, [DOCUMENTS[0], DOCUMENTS[2]])
    expected = [logit_score(reference, plain, QUERY, one, INSTRUCTION) for one in (DOCUMENTS[0], DOCUMENTS[2])]
    np.testing.assert_allclose([one.score for one in found], expected, atol=TOLERANCE)
    assert abs(expected[0] - expected[1]) > 0.01
    (other,) = reranker.score([QUERY], [DOCUMENTS[0]], instruction="Another.", use_activation=True)
    difference = logit_score(reference, plain, QUERY, DOCUMENTS[0], "Another.")
    assert abs(other.score - 1 / (1 + math.exp(-difference))) <= TOLERANCE


def test_a_document_may_have_an_image(reranker: LLM, reference: qwen3_vl.Reference, plain: Path) -> None:
    image = Image.fromarray(noise(90, 140))
    (found,) = reranker.score(QUERY, [[{"image": image}, {"text": "a picture"}]])
    expected = logit_score(reference, plain, QUERY, "a picture", INSTRUCTION, [image])
    assert abs(found.score - expected) <= TOLERANCE


def test_wrong_pairs_are_refused(reranker: LLM) -> None:
    for pair, message in (
        ((["a", "b"], ["c", "d", "e"]), "data_1 has 2 queries for 3 documents"),
        (("a", []), r"data_2 is of type list; give a string"),
        (("a", [5]), r"data_2\[0\] is of type int"),
        ((None, "a"), "data_1 is missing"),
    ):
        with pytest.raises(InputError, match=message):
            reranker.score(*pair)
    with pytest.raises(InputError, match="scores pairs of texts, and computes no embeddings"):
        reranker.embed("a")


def test_an_embedding_model_scores_by_the_cosine(plain: Path, reference: qwen3_vl.Reference, tmp_path: Path) -> None:
    """The instructions for queries and documents are those that encode_query and encode_document apply."""
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    write_modules(folder, "lasttoken", transformer=TRANSFORMER, prompts={"query": "Find it.", "document": "Kept."})
    with LLM(folder) as llm:
        found = llm.score(QUERY, DOCUMENTS[::2])
    query = normalized(states(reference, plain, turn(QUERY, "Find it."))[-1])
    documents = [normalized(states(reference, plain, turn(one, "Kept."))[-1]) for one in DOCUMENTS[::2]]
    expected = [float(query @ document) for document in documents]
    np.testing.assert_allclose([one.score for one in found], expected, atol=TOLERANCE)
