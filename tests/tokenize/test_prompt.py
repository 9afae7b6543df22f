"""Tests for prompts: placeholders, handle words, references and truncation."""

import numpy as np
import pytest

from mindie_mm.decode.decoder_messages import Planned
from mindie_mm.errors import ContextLengthExceeded, CorruptReference, InputError
from mindie_mm.nn.family import Placeholder, Spelling
from mindie_mm.shm import Ref
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.tokenize.placeholders import expand, insert
from mindie_mm.tokenize.planning import PlannedItem
from mindie_mm.tokenize.prompt import MediaSpan, Prompt, put_words
from mindie_mm.tokenize.truncate import cut, truncate

IMAGE, VIDEO = Placeholder((3,), 6, (4,)), Placeholder((3,), 7, (4,))
TOKENS = {6, 7}


def item(kind, placeholder, num_features, runs=None):
    shape = MediaShape(kind, placeholder.token, num_features)
    return PlannedItem("media item 0", shape, placeholder, Planned(num_features, {}, ""), Spelling(runs=runs), {})


def test_expand_repeats_the_placeholder_of_each_item():
    items = [item("image", IMAGE, 2), item("image", IMAGE, 1), item("video", VIDEO, 3)]
    prompt = expand([1, 3, 6, 4, 2, 6, 3, 7, 4], items, TOKENS)
    assert prompt.ids.tolist() == [1, 3, 6, 6, 4, 2, 6, 3, 7, 7, 7, 4]
    assert prompt.ids.dtype == np.int64
    assert prompt.spans == (
        MediaSpan(2, 4, "image", 6, lead=1, tail=1),
        MediaSpan(6, 7, "image", 6, lead=0, tail=0),
        MediaSpan(8, 11, "video", 7, lead=1, tail=1),
    )
    assert expand([1, 2], [], TOKENS).ids.tolist() == [1, 2]
    assert expand([], [], TOKENS).ids.tolist() == []


@pytest.mark.parametrize("ids", [[1], [6, 6], [7], [6, 7]])
def test_expand_refuses_placeholders_that_do_not_match_the_items(ids):
    with pytest.raises(InputError, match="1 media items"):
        expand(ids, [item("image", IMAGE, 2)], TOKENS)


def test_rows_of_features_may_end_in_a_separate_token():
    rows = item("image", IMAGE, 4, runs=([6, 6, 9, 6, 6, 9],))
    prompt = expand([1, 3, 6, 4, 2], [rows], TOKENS)
    assert prompt.ids.tolist() == [1, 3, 6, 6, 9, 6, 6, 9, 4, 2]
    worded = put_words(prompt, [(-5, -6)])
    assert worded.ids.tolist() == [1, 3, -5, -6, 9, 6, 6, 9, 4, 2]
    assert worded.plain_ids.tolist() == prompt.ids.tolist()


def test_handle_words_replace_only_placeholders():
    prompt = expand([6], [item("image", IMAGE, 2, runs=([6, 9, 6],))], TOKENS)
    assert put_words(prompt, [(-5, -6)]).ids.tolist() == [-5, 9, -6]


def test_an_item_may_have_several_runs():
    frames = item("video", VIDEO, 4, runs=([7, 7], [7, 7]))
    prompt = expand([1, 8, 3, 7, 4, 8, 3, 7, 4, 2], [frames], TOKENS)
    assert prompt.ids.tolist() == [1, 8, 3, 7, 7, 4, 8, 3, 7, 7, 4, 2]
    assert prompt.spans == (MediaSpan(3, 10, "video", 7, lead=1, tail=1),)


def test_ids_that_spell_an_item_belong_to_its_span():
    """A span includes the ids of the prompt that frame the item, and the framing tokens of its placeholder."""
    items = [item("image", IMAGE, 2), item("image", IMAGE, 1)]
    prompt = expand([1, 3, 9, 6, 8, 4, 2, 9, 6, 8], items, TOKENS, around=[(1, 1), (1, 1)])
    assert prompt.ids.tolist() == [1, 3, 9, 6, 6, 8, 4, 2, 9, 6, 8]
    assert [(span.lead, span.tail) for span in prompt.spans] == [(2, 2), (1, 1)]


def test_an_id_shared_by_two_spellings_belongs_to_the_first_item():
    items = [item("image", IMAGE, 1) for _ in range(2)]
    prompt = expand([9, 6, 9, 6, 9], items, TOKENS, around=[(1, 1), (1, 1)])
    assert [(span.lead, span.tail) for span in prompt.spans] == [(1, 1), (0, 1)]


def test_insert_puts_items_at_a_position():
    prompt = insert([1, 2, 2], 1, [item("image", IMAGE, 2), item("image", IMAGE, 1)], TOKENS)
    assert prompt.ids.tolist() == [1, 3, 6, 6, 4, 3, 6, 4, 2, 2]
    assert prompt.spans == (MediaSpan(2, 4, "image", 6, lead=1, tail=1), MediaSpan(6, 7, "image", 6, lead=1, tail=1))
    assert insert([1, 2], 1, [], TOKENS).ids.tolist() == [1, 2]


def test_put_words_keeps_the_plain_ids():
    prompt = Prompt(np.array([1, 6, 6, 6, 2, 6], np.int64), (MediaSpan(1, 4, "image", 6), MediaSpan(5, 6, "image", 6)))
    worded = put_words(prompt, [(-5, -6), (-7, -8)])
    assert worded.ids.tolist() == [1, -5, -6, 6, 2, -7]
    assert worded.plain_ids.tolist() == [1, 6, 6, 6, 2, 6]
    assert prompt.ids.tolist() == [1, 6, 6, 6, 2, 6]
    assert len(worded) == 6


def test_refs_reads_the_words_of_each_item():
    """One item's placeholders follow a separator token. The other item has a single placeholder for its first word."""
    refs = [Ref(3, 7, 1, "uint8", (4,)), Ref(3, 8, 2, "float32", (2, 3))]
    items = [item("image", IMAGE, 2, runs=([9, 6, 6, 8],)), item("image", IMAGE, 1, runs=([9, 6, 8],))]
    prompt = expand([1, 6, 2, 6], items, TOKENS)
    found = [*put_words(prompt, [ref.to_words() for ref in refs]).refs()]
    assert found == [refs[0], Ref(3, 8, 2)]
    assert [*Prompt(np.array([1, 2], np.int64)).refs()] == []
    with pytest.raises(CorruptReference, match="the image at token 1 has no handle words"):
        next(prompt.refs())


def test_truncate_never_cuts_an_item():
    ids = np.array([1, 1, 3, 6, 6, 4, 2, 2], np.int64)
    prompt = Prompt(ids, (MediaSpan(3, 5, "image", 6, lead=1, tail=1),))
    kept = {limit: truncate(prompt, limit) for limit in range(1, 9)}
    assert [len(kept[limit]) for limit in range(1, 9)] == [1, 2, 2, 2, 2, 6, 7, 8]
    assert kept[6].spans == (MediaSpan(1, 3, "image", 6, lead=1, tail=1),)
    assert kept[7].ids.tolist() == [1, 3, 6, 6, 4, 2, 2]
    assert kept[5].spans == ()


@pytest.mark.parametrize("front", [[], [5, 5]], ids=["opening first", "item first"])
def test_truncate_keeps_the_opening(front):
    """The opening is kept if items follow it, and if items were inserted before it."""
    items = [item("image", IMAGE, 2)]
    at = 0 if front else 2
    prompt = insert([8, 9, 1, 1, 2], at, items, TOKENS, opening=2)
    assert prompt.opening == ((4, 6) if front else (0, 2))
    for limit in range(1, 9):
        if limit < 3:
            with pytest.raises(ContextLengthExceeded, match=f"truncated to {limit} tokens"):
                truncate(prompt, limit)
            continue
        kept = truncate(prompt, limit)
        left = kept.ids[kept.opening[0] : kept.opening[1]].tolist()
        assert left == [8, 9]
        assert len(kept) == min(limit, 5)
        assert kept.spans == ()
        assert kept.ids.tolist() == [8, 9, *[1, 1, 2][5 - len(kept) :]]
    assert truncate(prompt, 9).ids.tolist() == prompt.ids.tolist()
    assert truncate(prompt, 9).spans == prompt.spans


def test_cut_keeps_exactly_the_tokens_of_one_side():
    """A cut at any place is accepted, except inside the item, which begins and ends with framing ids."""
    ids = np.array([8, 1, 3, 6, 6, 4, 2, 2], np.int64)
    prompt = Prompt(ids, (MediaSpan(3, 5, "image", 6, lead=1, tail=1),), opening=(0, 1))
    for side in ("left", "right"):
        for count in range(1, 9):
            edge = count if side == "right" else len(ids) - count
            if edge in (3, 4, 5):
                with pytest.raises(InputError, match="tokens 2 to 6 of 8; keep the whole item, or none of it"):
                    cut(prompt, count, side)
                continue
            kept = cut(prompt, count, side)
            assert kept.ids.tolist() == (ids[:count] if side == "right" else ids[-count:]).tolist()
            has_item = edge >= 6 if side == "right" else edge <= 2
            assert [kept.ids[span.start : span.stop].tolist() for span in kept.spans] == [[6, 6]] * has_item
            assert kept.ids[slice(*kept.opening)].tolist() == [8] * (side == "right" or count == 8)


def test_truncating_to_nothing_is_refused():
    prompt = Prompt(np.array([1, 6, 6], np.int64), (MediaSpan(1, 3, "image", 6),))
    with pytest.raises(ContextLengthExceeded, match="truncated to 1 tokens"):
        truncate(prompt, 1)
