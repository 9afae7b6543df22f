"""Tests for incremental detokenization. Up to a stop string, the text is the same as if decoded at once."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.tokenize.text.detokenizer import Detokenizer, StopScope, load_tokenizer
from tests.processor_time import processor_time_below


@pytest.fixture(scope="module")
def tokenizer(random_checkpoint):
    return load_tokenizer(Checkpoint.open(random_checkpoint))


def pushed(tokenizer, ids, stop=(), at_once=1):
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = [detokenizer.push(ids[i : i + at_once]) for i in range(0, len(ids), at_once)]
    return pieces, "".join(pieces) + detokenizer.flush(), detokenizer.stopped_by


@pytest.mark.parametrize("text", ["plain words", "naïve café", "日本語のテキスト", "👩‍👩‍👧 family", "", "a\n\n b"])
def test_the_pieces_add_up_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for at_once in (1, 3):
        assert pushed(tokenizer, ids, at_once=at_once)[1] == text


def test_any_tokens_give_the_text_of_one_decode(tokenizer):
    """The tokens include incomplete characters, because a model may generate any bytes."""
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(8, tokenizer.get_vocab_size()) for _ in range(draw.randrange(20))]
        assert pushed(tokenizer, ids)[1] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def by_bytes():
    """Return a tokenizer with byte fallback, like Llama's.

    Characters without a token are encoded as byte tokens. Adjacent byte tokens are decoded together, and a leading
    space is dropped.
    """
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁a", "▁b"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["▁a", "你", 0xFF, "▁b", "▁a"], "a你� b a"),
        (["a", "你", 0xFF, "ab你b"], "a你�ab你b"),
        (["a", "你", 0xFF, "好"], "a你����"),  # adjacent byte tokens are valid or invalid as a whole
        (["a", "你", 0xFF, "好", "b"], "a你����b"),
        (["a", "你", 0xFF], "a你�"),
        (["a", "你", 0xFF, 0x41, 0x0A, "b"], "a你���b"),
    ],
)
def test_invalid_bytes_do_not_stop_the_output(by_bytes, pieces, text):
    """Characters that were complete before the invalid bytes are shown, and so is the text after these bytes."""
    ids = []
    for piece in pieces:
        known = by_bytes.token_to_id(f"<0x{piece:02X}>" if isinstance(piece, int) else piece)
        ids += [known] if known is not None else by_bytes.encode(piece).ids
    assert pushed(by_bytes, ids)[1] == text


def test_any_bytes_are_accepted(by_bytes):
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randrange(by_bytes.get_vocab_size()) for _ in range(60)]
        pieces, whole, _ = pushed(by_bytes, ids)
        assert whole.startswith("".join(pieces))
        assert sum(map(whole.count, "ab")) >= sum(index in (257, 258, 259, 260) for index in ids)


def test_many_tokens_without_text_take_linear_time(by_bytes):
    """With `ignore_eos`, an answer may contain many end tokens. In quadratic time, this test would take minutes."""
    end, *words = (by_bytes.token_to_id(name) for name in ("</s>", "▁a", "▁b"))
    with processor_time_below(20):
        assert pushed(by_bytes, [*words, *[end] * 60_000, *words])[1] == "a b a b"


def test_bytes_that_never_complete_a_character_are_shown_after_a_limit(by_bytes):
    part, word = by_bytes.token_to_id("<0x80>"), by_bytes.token_to_id("▁a")
    with processor_time_below(20):
        pieces, whole, _ = pushed(by_bytes, [word, *[part] * 3_000, word])
    assert whole == "a" + "\ufffd" * 3_000 + " a"
    assert any(pieces[1:100])


def test_an_incomplete_character_is_held_back(tokenizer):
    ids = tokenizer.encode("日本", add_special_tokens=False).ids
    assert all("�" not in piece for piece in pushed(tokenizer, ids)[0])


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_ends_the_text_before_it(tokenizer, text, stop):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces, whole, stopped_by = pushed(tokenizer, ids, tuple(stop))
    # As a reference, find the first prefix of the text that contains a stop string.
    grown = ["".join(text[:i]) for i in range(len(text) + 1)]
    hits = next(([(g.find(s), s) for s in stop if s in g] for g in grown if any(s in g for s in stop)), None)
    if hits is None:
        assert (whole, stopped_by) == (text, None)
    else:
        assert not any(s in whole for s in stop)
        assert text.startswith(whole)
        assert stopped_by in stop
    assert "".join(pieces) == whole[: len("".join(pieces))]


@given(st.text("ab", max_size=12), st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_only_text_that_may_begin_a_stop_string_is_held_back(tokenizer, text, stop):
    detokenizer = Detokenizer(tokenizer, tuple(stop))
    shown, ids = "", tokenizer.encode(text, add_special_tokens=False).ids
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push([token])
        if detokenizer.stopped_by is None:
            grown = tokenizer.decode(ids[:count])
            held = [n for n in range(1, len(grown) + 1) for s in stop if len(s) > n and s.startswith(grown[-n:])]
            assert shown == grown[: len(grown) - max(held, default=0)]


def test_a_stop_string_within_min_tokens_does_not_stop_the_text_later(by_bytes):
    ids = [by_bytes.token_to_id(name) for name in ("a", "b", "a", "a", "b", "a")]
    detokenizer = Detokenizer(by_bytes, ("b", "aaaaaaaa"), min_tokens=3)
    shown = "".join(detokenizer.push([token]) for token in ids)
    assert (shown + detokenizer.flush(), detokenizer.stopped_by) == ("abaa", "b")


@example(pieces=["</t>", "<t>", "a"], stop=["t>a", ">"], opened=True)
@given(
    st.lists(st.sampled_from(["<t", ">", "<t>", "</t", "</t>", "a", "b", " ", "\n"]), max_size=12),
    st.lists(st.sampled_from(["a", "ab", "\n", "t>a", ">", "</t>"]), min_size=1, max_size=2),
    st.booleans(),
)
def test_stop_strings_have_no_effect_in_reasoning(tokenizer, pieces, stop, opened):
    ids = tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    text = tokenizer.decode(ids)
    is_open = opened or text.lstrip().startswith("<t>")
    begin = 0 if opened else text.find("<t>") + len("<t>")
    end = text.find("</t>", begin)
    content = 0 if not is_open else len(text) if end < 0 else end + len("</t>")
    if not is_open and "<t>".startswith(text.lstrip()):
        content = len(text)  # a text that is only the beginning of the start text is not searched
    # The stop string that is complete first ends the text, even if another one would begin before it.
    texts = (tokenizer.decode(ids[: count + 1]) for count in range(len(ids)))
    places = ([at for one in stop if (at := begun.find(one, content)) >= 0] for begun in texts)
    found = next(filter(None, places), [])
    detokenizer = Detokenizer(tokenizer, tuple(stop), scope=StopScope(("<t>\n", "</t>"), opened))
    shown = ""
    for token in ids:
        shown += detokenizer.push([token])
        assert (text[: min(found)] if found else text).startswith(shown)
    shown += detokenizer.flush()
    assert (detokenizer.stopped_by is not None) == bool(found)
    assert shown == (text[: min(found)] if found else text)


@example(pieces=["a", "<c>", "b"], stop=["<"])
@given(
    st.lists(st.sampled_from(["<c", "<c>", "{", "a", "b", " "]), max_size=12),
    st.lists(st.sampled_from(["b", "ab", "<", ">a", " a"]), min_size=1, max_size=2),
)
def test_stop_strings_have_no_effect_in_tool_calls(tokenizer, pieces, stop):
    ids = tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    scope = StopScope(openings=("<c>",), starts=("{",))
    found, known = [], None
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if text.lstrip().startswith("{"):
            known = text.index("{")
        elif "<c>" in text:
            known = text.index("<c>")
        found = [at for one in stop if (at := text.find(one)) >= 0 and (known is None or at <= known)]
        if found:
            break
    detokenizer = Detokenizer(tokenizer, tuple(stop), scope=scope)
    shown = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    text = tokenizer.decode(ids)
    assert (detokenizer.stopped_by is not None) == bool(found)
    assert shown == (text[: min(found)] if found else text)


def test_special_tokens_are_hidden(tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("done", add_special_tokens=False).ids, end]
    assert pushed(tokenizer, ids)[1] == "done"


def test_special_tokens_that_the_family_shows_are_shown(random_checkpoint, tokenizer):
    showing = load_tokenizer(Checkpoint.open(random_checkpoint), shown_tokens=["<|im_start|>"])
    ids = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert pushed(showing, ids)[1] == "<|im_start|>"
    assert pushed(showing, tokenizer.encode("done", add_special_tokens=False).ids)[1] == "done"
