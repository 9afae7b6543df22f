"""Tests that every kind of msgspec error is translated, because users must not see msgspec's own messages."""

from typing import Annotated, Any, Literal

import msgspec
import pytest

from mindie_mm.msgspec_errors import in_words


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    name: Literal["a"] = "a"
    count: Annotated[int, msgspec.Meta(ge=3)] = 3
    parts: list[dict[str, bool | None]] = []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the JSON is incomplete"),
        (b"{", "the JSON is incomplete"),
        (b'{"number": 1}x', "byte 14 is not valid JSON"),
        (b"{'number': 1}", "byte 1 is not valid JSON"),
        (b'{"number": NaN}', "byte 11 is not valid JSON"),
        (b"5", "the value must be an object, not an integer"),
        (b'{"number": "1"}', "number must be an integer, not a string"),
        (b'{"number": 1.5}', "number must be an integer, not a number with a fraction"),
        (b"{}", "the value lacks the field 'number'"),
        (b'{"number": 1, "colour": 2}', "the value has the unknown field 'colour'"),
        (b'{"number": 1, "name": "b"}', "name is not one of the allowed values"),
        (b'{"number": 1, "count": 2}', "count is outside its range"),
        (b'{"number": 1, "parts": [{"a": []}]}', "parts[0][...] must be true or false, not a list"),
        (b'{"number": null}', "number must be an integer, not null"),
    ],
)
def test_an_error_of_json_is_described(text: bytes, message: str) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text, type=Thing)
    assert in_words(caught.value) == message


def test_an_error_of_a_value_is_described() -> None:
    def described(value: Any, kind: Any) -> str:
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.convert(value, kind)
        return in_words(caught.value)

    assert described({"a": 1}, dict[int, int]) == "a key of the value must be an integer, not a string"
    assert described({"x": {"a": 1}}, dict[str, dict[int, int]]) == "a key of [...] must be an integer, not a string"
    assert described(10**400, float) == "the value is outside its range"


def test_bytes_that_are_not_utf8_are_described() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"a\xff".decode()
    assert in_words(caught.value) == "byte 1 is not UTF-8"
