"""Text as it comes equals text decoded at once, up to a stop string."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.tokenize.text.detokenizer import Detokenizer, load_tokenizer
from tests.processor_time import processor_time_below


@pytest.fixture(scope="module")
def tokenizer(random_checkpoint):
    return load_tokenizer(Checkpoint.open(random_checkpoint))


def pushed(tokenizer, ids, stop=(), at_once=1):
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = [detokenizer.push(ids[i : i + at_once]) for i in range(0, len(ids), at_once)]
    return pieces, "".join(pieces) + detokenizer.flush(), detokenizer.stopped_by


@pytest.mark.parametrize("text", ["plain words", "naïve café", "日本語のテキスト", "👩‍👩‍👧 family", "", "a\n\n b"])
def test_pieces_add_up(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for at_once in (1, 3):
        assert pushed(tokenizer, ids, at_once=at_once)[1] == text


def test_any_tokens_give_what_one_decode_gives(tokenizer):
    """Half characters included: a model may say any bytes."""
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(8, tokenizer.get_vocab_size()) for _ in range(draw.randrange(20))]
        assert pushed(tokenizer, ids)[1] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def by_bytes():
    """Llama's kind: what has no token is spelled in bytes, a run of them decoded as one, a first blank dropped."""
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
        (["a", "你", 0xFF, "好"], "a你����"),  # a run of bytes is good or bad as one
        (["a", "你", 0xFF, "好", "b"], "a你����b"),
        (["a", "你", 0xFF], "a你�"),
        (["a", "你", 0xFF, 0x41, 0x0A, "b"], "a你���b"),
    ],
)
def test_bytes_that_spoil_a_character_end_nothing(by_bytes, pieces, text):
    """The character was shown by then; what comes behind it is, too."""
    ids = []
    for piece in pieces:
        known = by_bytes.token_to_id(f"<0x{piece:02X}>" if isinstance(piece, int) else piece)
        ids += [known] if known is not None else by_bytes.encode(piece).ids
    assert pushed(by_bytes, ids)[1] == text


def test_any_bytes_are_borne(by_bytes):
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randrange(by_bytes.get_vocab_size()) for _ in range(60)]
        pieces, whole, _ = pushed(by_bytes, ids)
        assert whole.startswith("".join(pieces))
        assert sum(map(whole.count, "ab")) >= sum(index in (257, 258, 259, 260) for index in ids)


def test_tokens_that_show_nothing_take_no_longer_the_more_they_are(by_bytes):
    """As `ignore_eos` gives them: decoding all of them anew for each took 3.4 s for 8,000, and minutes for these."""
    end, *words = (by_bytes.token_to_id(name) for name in ("</s>", "▁a", "▁b"))
    with processor_time_below(20):
        assert pushed(by_bytes, [*words, *[end] * 60_000, *words])[1] == "a b a b"


def test_bytes_that_never_end_a_character_are_shown_in_the_end(by_bytes):
    part, word = by_bytes.token_to_id("<0x80>"), by_bytes.token_to_id("▁a")
    with processor_time_below(20):
        pieces, whole, _ = pushed(by_bytes, [word, *[part] * 3_000, word])
    assert whole == "a" + "\ufffd" * 3_000 + " a"
    assert any(pieces[1:100])


def test_no_half_character_is_shown(tokenizer):
    ids = tokenizer.encode("日本", add_special_tokens=False).ids
    assert all("�" not in piece for piece in pushed(tokenizer, ids)[0])


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_ends_the_text_before_it(tokenizer, text, stop):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces, whole, stopped_by = pushed(tokenizer, ids, tuple(stop))
    # The reference: the text as it grows, and the first moment at which a stop string is in it.
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
def test_no_more_is_held_back_than_may_begin_a_stop_string(tokenizer, text, stop):
    detokenizer = Detokenizer(tokenizer, tuple(stop))
    told, ids = "", tokenizer.encode(text, add_special_tokens=False).ids
    for count, token in enumerate(ids, 1):
        told += detokenizer.push([token])
        if detokenizer.stopped_by is None:
            grown = tokenizer.decode(ids[:count])
            held = [n for n in range(1, len(grown) + 1) for s in stop if len(s) > n and s.startswith(grown[-n:])]
            assert told == grown[: len(grown) - max(held, default=0)]


def test_a_stop_string_before_the_least_number_of_tokens_ends_nothing_later(by_bytes):
    ids = [by_bytes.token_to_id(name) for name in ("a", "b", "a", "a", "b", "a")]
    detokenizer = Detokenizer(by_bytes, ("b", "aaaaaaaa"), min_tokens=3)
    told = "".join(detokenizer.push([token]) for token in ids)
    assert (told + detokenizer.flush(), detokenizer.stopped_by) == ("abaa", "b")


def test_special_tokens_are_silent(tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("done", add_special_tokens=False).ids, end]
    assert pushed(tokenizer, ids)[1] == "done"


def test_unless_the_family_shows_them(random_checkpoint, tokenizer):
    showing = load_tokenizer(Checkpoint.open(random_checkpoint), shown_tokens=["<|im_start|>"])
    ids = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert pushed(showing, ids)[1] == "<|im_start|>"
    assert pushed(showing, tokenizer.encode("done", add_special_tokens=False).ids)[1] == "done"
