"""Tests that locate the assistant's turns in the tokens of a conversation, for training."""

import shutil

import numpy as np
import pytest

from mindie_mm.errors import InputError
from mindie_mm.models import family_named
from mindie_mm.nn.checkpoint.directory import EMBEDDED, Checkpoint
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import request_of_messages

IMAGE = np.zeros((60, 40, 3), np.uint8)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "image", "image": np.zeros((60, 40, 3), np.uint8)}, {"type": "text", "text": "?"}],
    },
    {"role": "assistant", "content": "A red square."},
    {"role": "user", "content": "And <|im_start|> here?"},
    {"role": "assistant", "content": "Blue."},
]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
)
FORGETTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}..."
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(out, template):
    shutil.copytree(EMBEDDED, out)
    for file in out.glob("chat_template*"):
        file.unlink()
    (out / "chat_template.jinja").write_text(template)
    return out


def turns(path, messages, path_file=None):
    """Return the texts of the assistant's turns."""
    decode = family_named("qwen2_5_omni").tokenizer(Checkpoint.open(path)).decode
    with Tokenizer.from_pretrained(path) as tokenizer:
        prompt = tokenizer.answer(
            request_of_messages(
                messages,
                add_generation_prompt=False,
                options=PromptOptions(marks_assistant=True),
                path_file=str(path_file or ""),
            )
        )
        if path_file is not None:
            release(path_file)
    return [decode(prompt.plain_ids[start:stop]) for start, stop in prompt.assistant]


def test_turns_are_found_by_rendering_the_conversation_up_to_them(tmp_path):
    found = turns(None, MESSAGES, tmp_path / "shm_name.txt")
    assert found == ["A red square.<|im_end|>\n", "Blue.<|im_end|>\n"]
    assert turns(None, MESSAGES[:2], tmp_path / "shm_name.txt") == []


def test_turns_may_be_stated_by_the_template(tmp_path):
    path = with_template(tmp_path / "other", MARKED)
    assert turns(path, MESSAGES, tmp_path / "shm_name.txt") == ["A red square.<|im_end|>", "Blue.<|im_end|>"]


def test_a_conversation_whose_turns_cannot_be_located_is_refused(tmp_path):
    """This template leaves out all answers but the last, so that the tokens before a turn depend on later turns."""
    path = with_template(tmp_path / "other", FORGETTING)
    texts = [message for message in MESSAGES if isinstance(message["content"], str)]
    with pytest.raises(
        InputError, match=r"turn 1 cannot be located, .* change the tokens from token \d+ on, before its end"
    ):
        turns(path, texts, None)


def test_a_conversation_may_begin_with_the_assistant(tmp_path):
    answer = {"role": "assistant", "content": "Hello <|im_start|>!"}
    assert turns(None, [answer, *MESSAGES[3:]]) == ["Hello <|im_start|>!<|im_end|>\n", "Blue.<|im_end|>\n"]
    assert turns(None, [answer]) == ["Hello <|im_start|>!<|im_end|>\n"]
    greeting = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    path = with_template(tmp_path / "greeting", greeting + PLAIN)
    assert turns(path, [answer]) == ["Hello <|im_start|>!<|im_end|>\n"], "a default system prompt comes first"
    thinking = PLAIN.replace(
        "\n{{ m.content }}", "\n{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    )
    path = with_template(tmp_path / "thinking", thinking)
    assert turns(path, [answer, *MESSAGES[3:]])[0].startswith("<think></think>Hello"), "as in later turns"


UNLOCATED = {
    "another header": (
        "<|im_start|>{{ m.role }}",
        "<|im_start|>{{ 'bot' if loop.first else m.role }}",
        "is the first message, and",
    ),
    "no text": (
        "{{ m.content }}",
        "{% if not loop.first or m.role == 'user' %}{{ m.content }}{% endif %}",
        "is the first message, and",
    ),
    "refused": (
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('Begin with a user') }}{% endif %}",
        "the chat template refuses these messages: Begin with a user",
    ),
}


@pytest.mark.parametrize("case", UNLOCATED)
def test_a_first_turn_that_cannot_be_located_is_refused_with_the_reason(case, tmp_path):
    old, new, why = UNLOCATED[case]
    path = with_template(tmp_path / "other", PLAIN.replace(old, new))
    with pytest.raises(InputError, match=why):
        turns(path, [{"role": "assistant", "content": "Hello!"}])
