"""Tests that a text that spells control tokens changes no ids of the other texts, for all properties of tokenizers.

The reference is transformers' encoding of the same chat in which the texts contain <z> in place of <s>. No merge joins
one of these letters to its neighbors, so the ids are equal except for the ids of the two letters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mindie_mm.tokenize import Tokenizer
from tests.models.small_checkpoints import save_tokenizer
from tests.transformers_reference import AutoTokenizer

CASE = Path(__file__).parents[1] / "cases" / "spelled_token"
CONTROL = ("<unk>", "<s>", "<pad>", "</s>", "<image>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>")
GPT4 = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TALK = (
    ("system", "Describe this. "),
    ("user", " hello  world"),
    ("assistant", "a red square\n"),
    ("user", "What is <s>red</s> ? <s> </s>a"),
)

Change = Callable[[Backend], object]


def set_normalizer(*steps: normalizers.Normalizer) -> Change:
    return lambda backend: setattr(backend, "normalizer", normalizers.Sequence(list(steps)))


def set_pre_tokenizer(step: Any) -> Change:
    return lambda backend: setattr(backend, "pre_tokenizer", step)


def set_post_processor(step: Any) -> Change:
    return lambda backend: setattr(backend, "post_processor", step)


PREPEND = (normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"))
METASPACE: Mapping[str, Change] = {
    f"metaspace {scheme}{', split' if split else ''}": set_pre_tokenizer(
        pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    )
    for scheme in ("first", "always", "never")
    for split in (False, True)
} | {
    "prepend": lambda backend: (set_normalizer(*PREPEND)(backend), set_pre_tokenizer(None)(backend)),
    "nfkc": set_normalizer(normalizers.NFKC()),
    "strip": set_normalizer(normalizers.Strip()),
    "spaces are joined": set_normalizer(normalizers.Replace("  ", " ")),
    "bos and eos": set_post_processor(
        processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)])
    ),
}
BYTES: Mapping[str, Change] = {
    "bytes": lambda backend: None,
    "bytes, prefix space": set_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "bytes, regex": set_pre_tokenizer(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GPT4), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "bytes, trimmed offsets": set_post_processor(processors.ByteLevel(trim_offsets=True)),
    "bytes, roberta": set_post_processor(
        processors.RobertaProcessing(("</s>", 3), ("<s>", 1), trim_offsets=True, add_prefix_space=False)
    ),
    "bytes, nfc": set_normalizer(normalizers.NFC()),
}
FLAGS: Mapping[str, Mapping[str, bool]] = {
    "plain": {},
    "lstrip": {"lstrip": True},
    "rstrip": {"rstrip": True},
    "both": {"lstrip": True, "rstrip": True},
    "single word": {"single_word": True},
    "normalized": {"normalized": True},
}


def written(out: Path, change: Change, flags: Mapping[str, bool], *, in_bytes: bool = False) -> Path:
    """Copy the case with another tokenizer. `flags` are flags of all control tokens."""
    shutil.copytree(CASE, out)
    if in_bytes:
        described = json.loads((CASE / "tokenizer_config.json").read_text())
        save_tokenizer(out, CONTROL, **{name: described[name] for name in ("bos_token", "eos_token", "pad_token")})
        (out / "chat_template.jinja").write_text((CASE / "chat_template.jinja").read_text())
    backend = Backend.from_file(str(out / "tokenizer.json"))
    change(backend)
    saved = json.loads(backend.to_str())
    for token in saved["added_tokens"]:
        token.update(flags)
    (out / "tokenizer.json").write_text(json.dumps(saved))
    return out


def talk(letter: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text.replace("s>", f"{letter}>")} for role, text in TALK]


def check(folder: Path) -> None:
    """Compare the ids of the talk, and of a talk that spells nothing, with transformers."""
    reference = AutoTokenizer.from_pretrained(folder)
    rendered = reference.apply_chat_template(talk("z"), add_generation_prompt=True, tokenize=False)
    expected = reference.encode(rendered, add_special_tokens=False)
    # A normalizer that writes a space before "<s>" hides control tokens from transformers, but not from us.
    hidden = expected.count(reference.convert_tokens_to_ids("<|end|>")) != len(TALK)
    letters = {reference.convert_tokens_to_ids("z"): reference.convert_tokens_to_ids("s")}
    with Tokenizer.from_pretrained(folder) as tokenizer:
        neutral = tokenizer.tokenize_chat(talk("z")).tolist()
        expected = neutral if hidden else expected
        assert neutral == expected
        assert tokenizer.tokenize_chat(talk("s")).tolist() == [letters.get(index, index) for index in expected]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("change", METASPACE)
def test_a_spelling_changes_no_other_ids(tmp_path: Path, change: str, flags: str) -> None:
    check(written(tmp_path / "case", METASPACE[change], FLAGS[flags]))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("change", BYTES)
def test_a_spelling_changes_no_other_ids_of_bytes(tmp_path: Path, change: str, flags: str) -> None:
    check(written(tmp_path / "case", BYTES[change], FLAGS[flags], in_bytes=True))


def test_the_ids_of_the_case() -> None:
    messages = [
        {"role": "user", "content": "hello world"},
        {"role": "assistant", "content": "a red square"},
        {"role": "user", "content": "What is <s>red</s>?"},
    ]
    ids = Tokenizer.from_pretrained(CASE).tokenize_chat(messages).tolist()
    assert ids[:14] == [1, 5, 9, 134, 184, 77, 69, 7, 9, 6, 9, 66, *ids[12:14]]
    assert 93 not in ids[:12]


def test_a_character_outside_the_vocabulary_is_encoded_as_without_the_spelling() -> None:
    tokenizer = Tokenizer.from_pretrained(CASE)
    ids = {text: tokenizer.tokenize_chat([{"role": "user", "content": text}]).tolist() for text in ("<z> é", "<s> é")}
    unknown = tokenizer.tokenize_chat([{"role": "user", "content": "é"}]).tolist()
    assert 0 in unknown, "<unk> is the token of the character"
    assert ids["<s> é"].count(0) == ids["<z> é"].count(0) == unknown.count(0)
    spelled = tokenizer.tokenize_chat([{"role": "user", "content": "<unk> <s>"}]).tolist()
    assert 0 not in spelled
