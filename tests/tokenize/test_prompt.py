import numpy as np
import pytest

from mindie_mm.errors import ContextLengthExceeded, InputError
from mindie_mm.nn.family import Placeholder
from mindie_mm.tokenize.placeholders import Run, expand
from mindie_mm.tokenize.prompt import Prompt, Span, put_words
from mindie_mm.tokenize.truncate import truncate

IMAGE, VIDEO = Placeholder((3,), 6, (4,)), Placeholder((3,), 7, (4,))


def test_expand():
    prompt = expand(
        [1, 3, 6, 4, 2, 6, 3, 7, 4], [Run("image", IMAGE, 2), Run("image", IMAGE, 1), Run("video", VIDEO, 3)]
    )
    assert prompt.ids.tolist() == [1, 3, 6, 6, 4, 2, 6, 3, 7, 7, 7, 4]
    assert prompt.ids.dtype == np.int64
    assert prompt.spans == (
        Span(2, 4, "image", 6, lead=1, tail=1),
        Span(6, 7, "image", 6, lead=0, tail=0),
        Span(8, 11, "video", 7, lead=1, tail=1),
    )
    assert expand([1, 2], []).ids.tolist() == [1, 2]
    assert expand([], []).ids.tolist() == []


@pytest.mark.parametrize("ids", [[1], [6, 6], [7]])
def test_expand_refuses_other_placeholders(ids):
    with pytest.raises(InputError, match="1 media items"):
        expand(ids, [Run("image", IMAGE, 2)])


def test_words_and_plain_ids():
    prompt = Prompt(np.array([1, 6, 6, 6, 2, 6], np.int64), (Span(1, 4, "image", 6), Span(5, 6, "image", 6)))
    worded = put_words(prompt, [(-5, -6), (-7, -8)])
    assert worded.ids.tolist() == [1, -5, -6, 6, 2, -7]
    assert worded.plain_ids.tolist() == [1, 6, 6, 6, 2, 6]
    assert prompt.ids.tolist() == [1, 6, 6, 6, 2, 6]
    assert len(worded) == 6


def test_truncate_never_cuts_an_item():
    ids = np.array([1, 1, 3, 6, 6, 4, 2, 2], np.int64)
    prompt = Prompt(ids, (Span(3, 5, "image", 6, lead=1, tail=1),))
    kept = {limit: truncate(prompt, limit) for limit in range(1, 9)}
    assert [len(kept[limit]) for limit in range(1, 9)] == [1, 2, 2, 2, 2, 6, 7, 8]
    assert kept[6].spans == (Span(1, 3, "image", 6, lead=1, tail=1),)
    assert kept[7].ids.tolist() == [1, 3, 6, 6, 4, 2, 2]
    assert kept[5].spans == ()


def test_truncate_to_nothing():
    prompt = Prompt(np.array([1, 6, 6], np.int64), (Span(1, 3, "image", 6),))
    with pytest.raises(ContextLengthExceeded, match="limit of 1 tokens"):
        truncate(prompt, 1)
