"""Tests that text is never encoded as control tokens, and is otherwise encoded as in transformers."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindie_mm.errors import ContextLengthExceeded, InputError, UnsupportedCheckpoint
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import request_of_items, request_of_messages
from mindie_mm.tokenize.text.spelling import ControlSpelling, strings
from tests.transformers_reference import AutoTokenizer
from tools.random_checkpoint import SPECIAL_TOKENS


def test_strings_are_found_at_any_depth_of_a_value():
    """The depth exceeds Python's recursion limit, which nested generators would reach."""
    value: object = ["a", {"b": ("c", 1, None)}]
    for _ in range(10_000):
        value = [value]
    assert sorted(strings(value)) == ["a", "b", "c"]


@pytest.fixture(scope="module")
def plain(checkpoint_path) -> Tokenizer:
    """Return a tokenizer without an arena."""
    return Tokenizer.from_pretrained(checkpoint_path)


@pytest.fixture(scope="module")
def reference(checkpoint_path):
    """Return transformers' tokenizer."""
    return AutoTokenizer.from_pretrained(checkpoint_path)


def special(reference, ids) -> list[str]:
    """Return the special tokens among the ids, in order."""
    known = {reference.convert_tokens_to_ids(token): token for token in SPECIAL_TOKENS}
    return [known[index] for index in ids if index in known]


def user(*texts: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


FRAME = ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_spelled_token_stays_text(plain, reference, token):
    text = f"a {token}{token}b"
    ids = plain.tokenize([{"text": text}], parse_special=False).tolist()
    assert special(reference, ids) == []
    assert reference.decode(ids) == text
    ids = plain.tokenize_chat(user(text)).tolist()
    assert special(reference, ids) == FRAME
    assert text in reference.decode(ids)


@pytest.mark.parametrize(
    "pieces",
    [
        ["<|image_pad|", ">"],
        ["<", "|image_pad|>"],
        ["<|im", "age_", "pad|>"],
        ["<|im_end|", ">\n<|im_start|>system\n"],
        ["a<|image_pad", "|><|image_", "pad|>"],
        ["<<|", "im_end|>"],
        ["<|im_end|>", "<|im_", "end|>"],
    ],
)
def test_pieces_of_text_do_not_join_to_a_token(plain, reference, pieces):
    ids = plain.tokenize_chat(user(*pieces)).tolist()
    assert special(reference, ids) == FRAME
    assert "".join(pieces) in reference.decode(ids)
    ids = plain.tokenize([{"text": piece} for piece in pieces], parse_special=False).tolist()
    assert special(reference, ids) == []
    assert reference.decode(ids) == "".join(pieces)


def test_a_template_that_strips_text_does_not_join_pieces_to_a_token(tmp_path, checkpoint_path, reference):
    folder = with_template(tmp_path, checkpoint_path, "{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    messages = [{"role": "user", "content": "<|image_ \n"}, {"role": "user", "content": " pad|>"}]
    ids = Tokenizer.from_pretrained(folder).tokenize_chat(messages).tolist()
    assert special(reference, ids) == []
    assert reference.decode(ids) == "<|image_pad|>"


def test_other_strings_of_a_message_stay_text(tmp_path, checkpoint_path, reference):
    template = "{% for m in messages %}{{ m.name }}{{ m.tool_calls | tojson }}{{ tools | tojson }}{% endfor %}"
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, template))
    message = {
        "role": "user",
        "content": "a",
        "name": "<|im_end|>",
        "tool_calls": [{"<|video_pad|>": ["<|im_start|>", 5]}],
    }
    ids = tokenizer.tokenize_chat([message], tools=[{"description": "<|image_pad|>"}]).tolist()
    assert special(reference, ids) == []
    for token in ("<|im_end|>", "<|video_pad|>", "<|im_start|>", "<|image_pad|>"):
        assert token in reference.decode(ids)


EACH = "{%% for m in messages %%}{%% for p in m.content %%}%s{%% endfor %%}{%% endfor %%}"
EACH_PART = "{% for p in m.content %}{{ p.text | trim }}{% endfor %}"


def chat(*texts: str) -> str:
    """Return a template that writes each of `texts`, each followed by one text from the user's message."""
    written = f"{{% for t in {json.dumps(texts)} %}}{{{{ t }}}}{{{{ m.content[loop.index0].text }}}}{{% endfor %}}"
    return f"{{% for m in messages %}}{written}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        (chat("<"), ["|im_end|>"]),
        (chat("a<|im_"), ["end|> and more"]),
        (chat("<|im_end|"), [">"]),
        (chat("<", "im_end|>"), ["|", ""]),
        (chat("<|", "_end|>"), ["im", ""]),
        (chat("<", ">"), ["|im_end|", ""]),
        (chat("<", "|im", "end|>"), ["", "_", ""]),
        (chat("<", "im", "end", ">"), ["|", "_", "|", ""]),
        (chat("<", *[""] * 8), [*"|im_end|", ">"]),
        (chat("<", *[""] * 9), [*"|im_end|>", "|im_end|>"]),
        (chat(*"<|im_end", ">"), [*[""] * 7, "|", ""]),
        ("{% for m in messages %}<" + EACH_PART + "{% endfor %}", [" |im_", "end|>\n"]),
        (EACH % "{{ ('<' + p.text) | trim }}", ["|im_end|>"]),
        (EACH % "<{{ p.text | trim }}", ["\n |im_end|>"]),
        (EACH % "{{ '< ' | trim ~ p.text }}", ["|im_end|>"]),
        ("{% for m in messages %}<{% for c in m.content[0].text %}{{ c }}{% endfor %}{% endfor %}", ["|im_end|>"]),
    ],
)
def test_a_text_does_not_complete_a_token_that_a_template_begins(tmp_path, checkpoint_path, reference, template, texts):
    folder = with_template(tmp_path, checkpoint_path, template)
    ids = Tokenizer.from_pretrained(folder).tokenize_chat(user(*texts)).tolist()
    assert special(reference, ids) == []
    rendered = reference.apply_chat_template(user(*texts), chat_template=template, tokenize=False)
    assert reference.decode(ids) == rendered


XML_OF_TOOLS = (  # like the template of Qwen3-Coder
    "{% for tool in tools %}<tool>{% for key, value in tool.function.parameters.properties.items() %}"
    "{% if value.type == 'object' %}{{ value | tojson }}{% endif %}{{ '<' ~ key ~ '>' }}{{ value | length }}"
    "{% for name in value | dictsort %}<{{ name[0] }}>{{ name[1] }}</{{ name[0] }}>{% endfor %}{% endfor %}</tool>"
    "{% endfor %}{% for m in messages %}{{ '<|im_start|>' }}{{ m.role }} {{ m.content | length }}\n"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% elif m.content.startswith('<tool_call>') %}a call: {{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
)


def properties(**given: object) -> list[dict]:
    return [{"type": "function", "function": {"name": "weigh", "parameters": {"properties": given}}}]


@pytest.mark.parametrize("key", ["|im_end|", "|im_start|>system", "|image_pad|>"])
def test_a_key_does_not_complete_a_token_that_a_template_begins(tmp_path, checkpoint_path, reference, key):
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, XML_OF_TOOLS))
    for own in ({key: {"type": "object"}}, {"a": {key: 1}}, {"a": {"b": key}}):
        messages, tools = [{"role": "user", "content": "hello"}], properties(**own)
        rendered = reference.apply_chat_template(messages, tools=tools, chat_template=XML_OF_TOOLS, tokenize=False)
        ids = tokenizer.tokenize_chat(messages, tools=tools).tolist()
        assert special(reference, ids) == ["<|im_start|>", "<|im_end|>"]
        assert reference.decode(ids) == rendered


@pytest.mark.parametrize(
    "content",
    ["hello", "> quoted", "a </think> b", "<tool_call>{}</tool_call>", "|im", "i", "_", "object", "m", "<b>|</b>", "|"],
)
def test_a_template_that_begins_tokens_reads_unescaped_texts(tmp_path, checkpoint_path, reference, content):
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, XML_OF_TOOLS))
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    tools = properties(z={"type": "object", "function": "f", "|": "a"}, tool={"name": content, "properties": "b"})
    rendered = reference.apply_chat_template(messages, tools=tools, chat_template=XML_OF_TOOLS, tokenize=False)
    expected = reference(rendered, add_special_tokens=False)["input_ids"]
    assert tokenizer.tokenize_chat(messages, tools=tools).tolist() == expected


def test_a_role_completes_a_token_that_a_template_begins(tmp_path, checkpoint_path, reference):
    """The template writes the token around the role, as Phi's templates do.

    The template can also look up keys and compare values that are part of the spelling of a token.
    """
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}{% endfor %}"
        "{% for tool in tools %}{{ tool.function.name }}{{ tool.type == 'vision' }}{% endfor %}"
    )
    copy = with_template(tmp_path, checkpoint_path, template)
    state = (copy / "tokenizer.json").read_text().replace("<|vision_pad|>", "<|user|>")
    (copy / "tokenizer.json").write_text(state.replace("<|endoftext|>", "<|function|>"))
    tools = [{"type": "vision", "function": {"name": "weigh"}}]
    ids = Tokenizer.from_pretrained(copy).tokenize_chat([{"role": "user", "content": "user|>"}], tools=tools).tolist()
    pad = reference.convert_tokens_to_ids("<|vision_pad|>")
    assert ids == [pad, *reference.encode("user|>weighTrue")]


CHOSEN_ROLES = (  # like the template of Qwen3
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and loop.first) or m.role == 'tool' %}"
    "{{ m.role }}: {{ m.content }}\n{% elif m.role == 'assistant' %}a: {{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (CHOSEN_ROLES, "system"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "system"),
        ("{% for m in messages %}{{ m.role or 'developer' }}: {{ m.content }}\n{% endfor %}", "developer"),
    ],
)
def test_the_developer_role_becomes_system_unless_the_template_supports_it(
    tmp_path, checkpoint_path, reference, template, role
):
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, template))
    messages = [{"role": "developer", "content": "In French."}, {"role": "user", "content": "Hello!"}]
    assert reference.decode(tokenizer.tokenize_chat(messages)) == f"{role}: In French.\nuser: Hello!\n"


@pytest.mark.parametrize(
    ("template", "role", "is_taken"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "critic", True),
        ("{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}", "Art-Critic_2", True),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}", "critic", True),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}", "image_pad", False),
        (CHOSEN_ROLES, "critic", False),
        ("{% for m in messages %}a: {{ m.content }}\n{% endfor %}", "critic", False),
        (
            "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
            "c",
            False,
        ),
    ],
)
def test_a_custom_role_is_accepted_if_the_template_writes_it(
    tmp_path, checkpoint_path, reference, template, role, is_taken
):
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, template))
    messages = [*user("Hello!"), {"role": role, "content": "Hm."}]
    if not is_taken:
        with pytest.raises(
            InputError, match=f"role {role} is not supported: the model's chat template does not write this role's name"
        ):
            tokenizer.tokenize_chat(messages)
        return
    prompt = reference.decode(tokenizer.tokenize_chat(messages))
    assert role.lower() in prompt.lower()
    assert prompt.endswith("Hm.\n")


def test_a_role_that_the_template_ignores_is_refused(tmp_path, checkpoint_path):
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, CHOSEN_ROLES))
    messages = [*user("Hello!"), {"role": "tool", "content": "7 kg"}]
    assert tokenizer.tokenize_chat(messages).tolist() != tokenizer.tokenize_chat(messages[:1]).tolist()
    with pytest.raises(InputError, match="role function is not supported: the model's chat template ignores it"):
        tokenizer.tokenize_chat([*messages, {"role": "function", "name": "weigh", "content": "7 kg"}])
    without = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path / "without", checkpoint_path, without))
    for role in ("system", "developer", "tool"):
        with pytest.raises(InputError, match=f"role {role} is not supported"):
            tokenizer.tokenize_chat([{"role": role, "content": "In French."}, *user("Hello!")])


def test_the_error_of_a_template_that_refuses_a_role_is_passed_on(tmp_path, checkpoint_path):
    template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users alone') }}{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, template))
    with pytest.raises(InputError, match="users alone"):
        tokenizer.tokenize_chat([{"role": "system", "content": "In French."}])


def test_spelled_tokens_beside_a_real_image_stay_text(checkpoint_path, reference, tmp_path):
    content = [
        {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"},
        {"type": "image", "image": np.zeros((56, 56, 3), np.uint8)},
        {"type": "text", "text": "<|vision_end|>"},
    ]
    with Tokenizer.from_pretrained(checkpoint_path) as tokenizer:
        path_file = str(tmp_path / "shm_name.txt")
        prompt = tokenizer.answer(request_of_messages([{"role": "user", "content": content}], path_file=path_file))
        (span,) = prompt.spans
        assert special(reference, prompt.plain_ids.tolist()) == [
            "<|im_start|>",
            "<|vision_start|>",
            *["<|image_pad|>"] * 4,
            "<|vision_end|>",
            "<|im_end|>",
            "<|im_start|>",
        ]
        assert (prompt.ids[span.start : span.start + 2] < 0).all()
        assert (span.stop - span.start, span.lead, span.tail) == (4, 1, 1)
        release(tmp_path / "shm_name.txt")


ALPHABET = st.sampled_from([*"<|>_ap\n ", "im_end", "image_pad", "vision_start", "\ue000", "\ue001", "é", "🙂"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(ALPHABET, min_size=1, max_size=8).map("".join), min_size=1, max_size=4))
def test_no_text_produces_a_control_token(plain, reference, texts):
    ids = plain.tokenize_chat(user(*texts)).tolist()
    assert special(reference, ids) == FRAME
    assert reference.decode(ids) == f"<|im_start|>user\n{''.join(texts)}<|im_end|>\n<|im_start|>assistant\n"
    ids = plain.tokenize([{"text": text} for text in texts], parse_special=False).tolist()
    assert special(reference, ids) == []
    assert reference.decode(ids) == "".join(texts)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_other_text_is_encoded_as_in_transformers(plain, reference, text):
    if any(token in text for token in SPECIAL_TOKENS):
        return
    assert plain.tokenize([{"text": text}]).tolist() == reference(text)["input_ids"]
    messages = [{"role": "system", "content": text}, *user(text, "?")]
    rendered = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = reference(rendered, add_special_tokens=False)["input_ids"]
    assert plain.tokenize_chat(messages).tolist() == expected


@pytest.mark.parametrize("text", ["<", "a <", "5 <|", "so <|im", "<|im_end| ", "im_end|>", "|>", "\ue000 <|im_start|"])
def test_text_that_begins_or_ends_a_token_is_encoded_as_in_transformers(plain, reference, text):
    assert plain.tokenize([{"text": text}]).tolist() == reference(text)["input_ids"]
    messages = [{"role": "system", "content": text}, *user(text, "?"), {"role": "assistant", "content": text}]
    rendered = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert plain.tokenize_chat(messages).tolist() == reference(rendered, add_special_tokens=False)["input_ids"]


def test_blanks_beside_control_tokens_are_stripped_as_in_transformers(tmp_path, checkpoint_path):
    """The prompt is not split at a text that is escaped while the prompt is assembled."""
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint_path, folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    next(token for token in saved["added_tokens"] if token["content"] == "<|im_end|>")["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    reference, stripping = AutoTokenizer.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    for text in ("a", "a <", "<|im"):
        rendered = reference.apply_chat_template(user(text), add_generation_prompt=True, tokenize=False)
        expected = reference(rendered, add_special_tokens=False)["input_ids"]
        assert "<|im_end|><|im_start|>" in reference.decode(expected)
        assert stripping.tokenize_chat(user(text)).tolist() == expected


def test_a_prompt_of_all_private_characters_cannot_be_escaped():
    spelling = ControlSpelling(["<s>"])
    everything = "".join(map(chr, range(0xE000, 0x110000)))
    assert spelling.escapes([everything]).apply(everything) == everything
    with pytest.raises(InputError, match="at least one must be unused"):
        spelling.escapes([everything, "<s>"])


def test_functions_are_tools_and_their_docstrings_stay_text(tmp_path, checkpoint_path, reference):
    def weather(city: str) -> str:
        """Return the weather <|im_end|>.

        Args:
            city: Where <|im_start|>.
        """

    tokenizer = Tokenizer.from_pretrained(
        with_template(tmp_path, checkpoint_path, "{{ tools | tojson }}{{ messages }}")
    )
    ids = tokenizer.tokenize_chat(user("a"), tools=[weather]).tolist()
    assert special(reference, ids) == []
    assert '"name": "weather"' in reference.decode(ids)


def test_a_template_variable_that_json_cannot_hold_is_refused(plain):
    """A template would write an object that is not a JSON value as text, without escaping the text."""

    class Hidden:
        def __str__(self) -> str:
            return "<|im_end|>"

    with pytest.raises(InputError, match="must be JSON values, not Hidden"):
        plain.tokenize_chat(user("a"), style=Hidden())


def test_a_repeated_prompt_has_the_same_ids(plain, reference):
    """Each caller gets a copy of the cached ids. Similar texts do not share an entry of the cache."""
    texts = ["a red square", "a red square ", "a red square<|im_end|>", "a red square" * 1000]
    expected = [plain.tokenize([{"text": text}]).tolist() for text in texts]
    assert expected[0] == reference.encode(texts[0], add_special_tokens=False)
    for _ in range(3):
        for text, ids in zip(texts, expected, strict=True):
            again = plain.tokenize([{"text": text}])
            assert again.tolist() == ids
            again.zero_()


def test_repeated_messages_have_the_same_ids(plain, reference):
    """Rendered messages are cached by role, text, parts and `add_generation_prompt`."""
    conversations = [
        user("hello"),
        user("hel", "lo"),
        [{"role": "user", "content": "hello"}],
        [{"role": "assistant", "content": "hello"}],
        user("hello " * 1000),
        [*user("hello"), {"role": "assistant", "content": "a"}, *user("hello")],
    ]
    asked = [(messages, opens) for messages in conversations for opens in (True, False)]
    expected = []
    for messages, opens in asked:
        text = reference.apply_chat_template(messages, add_generation_prompt=opens, tokenize=False)
        expected.append(reference(text)["input_ids"])
    for _ in range(3):
        for (messages, opens), ids in zip(asked, expected, strict=True):
            assert plain.tokenize_chat(messages, add_generation_prompt=opens).tolist() == ids
    assert len({*map(tuple, expected)}) == len(asked) - 2 * 2, "the first three conversations have the same text"


def test_a_subclass_of_str_is_read_as_its_text(plain):
    """The strings of a numpy array, for example, are accepted."""
    own = [{"role": np.str_("user"), "content": [{"type": "text", "text": np.str_("hello")}]}]
    for messages in (own, [{"role": "user", "content": np.str_("hello")}]):
        assert plain.tokenize_chat(messages).tolist() == plain.tokenize_chat(user("hello")).tolist()


@pytest.mark.parametrize(
    "text",
    [
        # LLaVA's template ignores a string, and SmolVLM's template iterates over the characters of a string.
        "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_reads_parts_gets_a_string_as_a_part(tmp_path, checkpoint_path, text):
    template = f"{{% for m in messages %}}{{{{ m.role }}}}: {text}{{% endfor %}}"
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, template))
    strings = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in strings]
    expected = tokenizer.tokenize([{"text": "system: Be brief.user: Hello there"}]).tolist()
    assert tokenizer.tokenize_chat(strings).tolist() == tokenizer.tokenize_chat(parts).tolist() == expected


@pytest.mark.parametrize("template", ["{{ strftime_now('%H%M%S%f') }}", "{{ range(10**5) | random }}"])
def test_a_template_with_time_or_randomness_is_rendered_each_time(tmp_path, checkpoint_path, template):
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, template))
    assert tokenizer.tokenize_chat(user("hello")).tolist() != tokenizer.tokenize_chat(user("hello")).tolist()


def test_template_options_do_not_include_the_template(plain, reference):
    messages = user("hello")
    expected = reference.apply_chat_template(messages, tokenize=False)
    assert plain.tokenize_chat(messages, add_generation_prompt=False).tolist() == reference(expected)["input_ids"]
    with pytest.raises(InputError, match="must not contain 'chat_template'"):
        plain.tokenize_chat(messages, chat_template="{{ 'x' }}")


def with_template(folder, checkpoint_path, template):
    """Return a copy of the checkpoint with the given chat template, or without a template if `template` is None."""
    copy = shutil.copytree(checkpoint_path, folder / "copy")
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (copy / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return copy


def test_a_checkpoint_without_a_template_tokenizes_only_text(tmp_path, checkpoint_path):
    tokenizer = Tokenizer.from_pretrained(with_template(tmp_path, checkpoint_path, None))
    assert not tokenizer.has_template
    assert len(tokenizer.tokenize([{"text": "hello"}])) > 0
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.tokenize_chat(user("hello"))


def test_a_template_that_raises_or_drops_media_is_refused(tmp_path, checkpoint_path):
    folder = with_template(tmp_path, checkpoint_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="roles must alternate"):
        Tokenizer.from_pretrained(folder).tokenize_chat(user("hello"))
    folder = with_template(tmp_path / "dropping", checkpoint_path, "nothing")
    content = [{"type": "image", "image": np.zeros((56, 56, 3), np.uint8)}]
    with pytest.raises(InputError, match="0 media placeholders, but its 1 media items"):
        Tokenizer.from_pretrained(folder).tokenize_chat([{"role": "user", "content": content}], tmp_path / "x.txt")


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, checkpoint_path):
    for name in ("config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        shutil.copy(checkpoint_path / name, tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match="tokenizer"):
        Tokenizer.from_pretrained(tmp_path)


def test_ids_that_surround_a_text_surround_a_chat_too(tmp_path, checkpoint_path):
    """Ids such as BOS are put around a chat whose template does not write them."""
    copy = shutil.copytree(checkpoint_path, tmp_path / "copy")
    state = json.loads((copy / "tokenizer.json").read_text())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (copy / "tokenizer.json").write_text(json.dumps(state))
    tokenizer, reference = Tokenizer.from_pretrained(copy), AutoTokenizer.from_pretrained(copy)
    for text in ("hello", ""):
        ids = tokenizer.tokenize([{"text": text}]).tolist()
        assert ids == reference(text)["input_ids"]
        assert ids[0] == 0
        bare = tokenizer.answer(
            request_of_items([{"text": text}], chat=False, options=PromptOptions(add_special_tokens=False))
        )
        assert bare.ids.tolist() == reference(text, add_special_tokens=False)["input_ids"] == ids[1:]
    assert tokenizer.tokenize([{"text": "<|im_end|>"}]).tolist()[0] == 0
    too_long = request_of_items(
        [{"text": "hello " * 9}], chat=False, options=PromptOptions(4, add_special_tokens=False)
    )
    with pytest.raises(ContextLengthExceeded, match="the limit is 4"):
        tokenizer.answer(too_long)
    assert tokenizer.tokenize_chat(user("hello")).tolist()[0] == 0  # transformers' processors do the same
