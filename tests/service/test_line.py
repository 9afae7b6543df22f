"""Tests that media are taken out of a request before the request is checked."""

import tracemalloc
from collections.abc import Iterator

import pytest

from mindie_mm.errors import InputError
from mindie_mm.settings.config import ServiceConfig
from mindie_mm.tokenize.requests import TokenizeRequest
from service.request.kept_media import KeptMedia
from service.request.prompts import Parse, PromptReader, _checked

MiB = 2**20


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


READER = PromptReader(ServiceConfig(), KeptMedia(0), b"", "")


@pytest.mark.usefixtures("traced")
def test_the_check_of_a_request_does_not_copy_its_media() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 8 * MiB}}, {"text": "What is it?"}]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    request = _checked(lambda: TokenizeRequest(messages=READER.messages([{"role": "user", "content": parts}], {})))
    assert tracemalloc.get_traced_memory()[1] - before < MiB
    assert len(request.media) == 1


@pytest.mark.parametrize(
    "parse",
    [
        lambda: TokenizeRequest(items=READER.text("\ud800")),
        lambda: TokenizeRequest(messages=READER.messages([{"role": "user", "content": "x", "name": "\ud800"}], {})),
        lambda: TokenizeRequest(
            messages=READER.messages([{"role": "user", "content": [{"image": "AAAA"}], "weight": 2**64}], {})
        ),
        lambda: TokenizeRequest(items=READER.items([{"text": "x"}]), chat_template_kwargs={"x": -(2**63) - 1}),
    ],
    ids=["text", "surrogate", "beside-media", "variable"],
)
def test_values_that_msgpack_cannot_encode_are_refused(parse: Parse) -> None:
    with pytest.raises(InputError, match=r"^the (request|prompt) contains an? .*lone surrogate"):
        _checked(parse)
