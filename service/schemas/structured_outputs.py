"""The request fields that describe structured outputs. All of them are translated into `StructuredOutputs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mindie_mm.errors import InputError, blaming
from mindie_mm.structured.outputs import StructuredOutputs
from service.schemas.body import Array, Closed, Settings, Structure, must_be
from service.schemas.closed_objects import closed

_ABSENT = BeforeValidator(lambda given: None if given in (False, "", []) else given)
"""Validator that reads false, "" and [] as None. Some clients send these values for unused fields."""

Text = Annotated[str | None, _ABSENT]
Choice = Annotated[Array[str] | None, _ABSENT]
Schema = Annotated[dict[str, Any] | str | None, must_be("a JSON schema, as an object or a string"), _ABSENT]
Tag = Annotated[dict[str, Any] | str | None, must_be("a structural tag, as an object or a string"), _ABSENT]


_OPTIONS = frozenset({"type", "name", "description", "strict"})
_ANY_OBJECT = StructuredOutputs(json_object=True)


class NamedSchema(Closed):
    """The field `json_schema` of `response_format`. The answer fits the schema even if `strict` is false."""

    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored."""
    strict: bool | None = None
    """Allow only properties that the schema lists, even if `--json-additional-properties` allows others."""
    content: dict[str, Any] | None = Field(None, alias="schema")
    """The JSON schema. None allows any JSON object, as in OpenAI and vLLM."""


class ResponseFormat(Closed):
    """The field `response_format`. Clients of different servers put the description into different subfields."""

    places: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": (),
        "json_object": ("schema", "value"),
        "json_schema": ("json_schema", "schema", "value"),
        "json": ("value", "schema"),
        "regex": ("value", "pattern", "regex"),
        "grammar": ("grammar", "value"),
        "structural_tag": ("format", "structures"),
    }

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar", "structural_tag"]
    json_schema: NamedSchema | None = None
    content: dict[str, Any] | None = Field(None, alias="schema")
    """The JSON schema as clients of llama.cpp, Together, Fireworks and OpenAI's responses API send it."""
    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored."""
    strict: bool | None = None
    """Has the same meaning as in `json_schema`, for a schema in another subfield."""
    value: dict[str, Any] | str | None = None
    """The JSON schema or the regular expression as clients of text-generation-inference send it."""
    pattern: str | None = None
    regex: str | None = None
    grammar: str | None = None
    format: dict[str, Any] | None = None
    """Format of a structural tag."""
    structures: Array[dict[str, Any]] | None = None
    """Tags of a structural tag in vLLM's older format."""
    triggers: Array[str] | None = None
    """Triggers of `structures`."""

    def wanted(self, *, close: bool) -> StructuredOutputs | None:
        """Return the structured output, or None if any text is allowed.

        Raises:
            InputError: The description is missing, or belongs to another `type`.

        """
        fields = {"schema" if name == "content" else name: getattr(self, name) for name in type(self).model_fields}
        fields = {name: value for name, value in fields.items() if value is not None and name not in _OPTIONS}
        if self.type == "structural_tag":
            return StructuredOutputs(structural_tag=_tag_text({**fields, "type": self.type}, close=close))
        own = self.places[self.type]
        for name in fields:
            if name not in own or len(fields) > 1:
                raise InputError(
                    f"response_format.type is {self.type!r}, and response_format has {' and '.join(fields)}; with "
                    f"this type, give only {' or '.join(own) or 'type'}"
                )
        ((_, value),) = fields.items() or (("", None),)
        if value is None and self.type not in ("text", "json_object"):
            raise InputError(f"response_format.type is {self.type!r}, which requires the field {' or '.join(own)}")
        return self._of(value, close=close or bool(self.strict))

    def _of(self, value: Any, *, close: bool) -> StructuredOutputs | None:
        if value is None:
            return None if self.type == "text" else _ANY_OBJECT
        if self.type in ("regex", "grammar"):
            if not isinstance(value, str):
                raise InputError(f"response_format.type is {self.type!r}, so response_format.value must be a string")
            return StructuredOutputs(regex=value) if self.type == "regex" else StructuredOutputs(grammar=value)
        if isinstance(value, dict) and isinstance(value.get("schema"), dict):
            value = NamedSchema(schema=value["schema"], strict=value.get("strict") is True)
        if isinstance(value, NamedSchema):
            close = close or bool(value.strict)
            value = value.content
        return _ANY_OBJECT if value is None else StructuredOutputs(json=_schema_text(value, close=close))


class StructuredOutputsBody(Closed):
    """The field `structured_outputs` of vLLM. Exactly one of the fields before the two options must be set."""

    json_: Schema = Field(None, alias="json")
    regex: Text = None
    choice: Choice = None
    grammar: Text = None
    json_object: Annotated[bool | None, _ABSENT] = None
    structural_tag: Tag = None
    disable_any_whitespace: bool | None = None
    """Ignored, because the whitespace between JSON tokens is fixed."""
    disable_additional_properties: bool | None = None
    """Allow only properties that the schema lists."""

    def wanted(self, *, close: bool) -> StructuredOutputs:
        """Return the structured output without checking it. Raise InputError if a schema or tag is not valid JSON."""
        close = close or bool(self.disable_additional_properties)
        return StructuredOutputs(
            json=None if self.json_ is None else _schema_text(self.json_, close=close),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
            json_object=bool(self.json_object),
            structural_tag=None if self.structural_tag is None else _tag_text(self.structural_tag, close=close),
        )


class StructureFields(Settings):
    """Request fields for structured outputs.

    They include the fields that clients of vLLM, SGLang, llama.cpp and text-generation-inference send.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    """vLLM's field."""
    guided_json: Schema = None
    """vLLM's older name of `structured_outputs.json`."""
    guided_regex: Text = None
    guided_choice: Choice = None
    guided_grammar: Text = None
    json_schema: Schema = None
    """JSON schema. A field of llama.cpp and SGLang."""
    regex: Text = None
    """SGLang's field."""
    ebnf: Text = None
    """SGLang's field. The grammar may be written in GBNF or in Lark."""
    grammar: Annotated[dict[str, Any] | str | None, must_be("a grammar or an object with type and value"), _ABSENT] = (
        None
    )
    """llama.cpp's GBNF, or text-generation-inference's `{"type": "json" or "regex", "value": ...}`."""
    structural_tag: Tag = None
    """SGLang's field."""

    def structure(self, *, close: bool) -> Structure | None:
        structures: list[Structure] = []
        for name, wanted in self._forms(close=close):
            with blaming(name):
                if (outputs := wanted()) is not None:
                    outputs.check()
                    structures.append(Structure(outputs, name))
        for other in structures[1:]:
            if other.wanted != structures[0].wanted:
                message = f"{structures[0].field} and {other.field} describe different outputs; give one of them"
                raise InputError(message, param=other.field)
        return structures[0] if structures else None

    def _forms(self, *, close: bool) -> Iterator[tuple[str, Callable[[], StructuredOutputs | None]]]:
        """Yield the name of each field that is set, and a function that returns its structured output."""
        kinds: dict[str, Callable[[Any], StructuredOutputs | None]] = {
            "response_format": lambda given: given.wanted(close=close),
            "structured_outputs": lambda given: given.wanted(close=close),
            **dict.fromkeys(
                ("guided_json", "json_schema"),
                lambda given: StructuredOutputs(json=_schema_text(given, close=close)),
            ),
            **dict.fromkeys(("guided_regex", "regex"), lambda given: StructuredOutputs(regex=given)),
            "guided_choice": lambda given: StructuredOutputs(choice=tuple(given)),
            **dict.fromkeys(("guided_grammar", "ebnf"), lambda given: StructuredOutputs(grammar=given)),
            "grammar": lambda given: _of_grammar(given, close=close),
            "structural_tag": lambda given: StructuredOutputs(structural_tag=_tag_text(given, close=close)),
        }
        for name, kind in kinds.items():
            if (given := getattr(self, name)) is not None:
                yield name, lambda kind=kind, given=given: kind(given)  # type: ignore[misc]


def _of_grammar(given: str | dict[str, Any], *, close: bool) -> StructuredOutputs | None:
    """Return the structured output for a grammar, or for the object that text-generation-inference calls `grammar`."""
    if isinstance(given, str):
        return StructuredOutputs(grammar=given)
    if not given:
        return None
    kind, value = given.get("type"), given.get("value")
    if kind not in ("json", "json_object", "json_schema", "regex") or not isinstance(value, dict | str):
        raise InputError('grammar must be a string, or an object with a "value" and the "type" "json" or "regex"')
    return ResponseFormat.model_validate({"type": kind, "value": value}).wanted(close=close)


def _schema_text(given: dict[str, Any] | str, *, close: bool) -> str:
    """Return a JSON schema as text. Raise InputError if it is not JSON, is too large or is nested too deeply."""
    return _text(given, lambda text: StructuredOutputs(json=text), closed if close else None)


def _tag_text(given: dict[str, Any] | str, *, close: bool) -> str:
    """Return a structural tag as text. Raise InputError as in `_schema_text`."""
    return _text(given, lambda text: StructuredOutputs(structural_tag=text), _closed_tag if close else None)


def _text(
    given: dict[str, Any] | str, described: Callable[[str], StructuredOutputs], change: Callable[[Any], Any] | None
) -> str:
    noun = described("").noun
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        described(text).check()  # the size is checked first, because changing a large text takes long
        return text if change is None else json.dumps(change(json.loads(text)))
    except RecursionError as error:
        raise InputError(f"{noun} is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{noun} is not valid JSON: {error}") from error


def _closed_tag(tag: Any) -> Any:
    """Return a structural tag whose JSON schemas have been changed by `closed`."""
    if isinstance(tag, list):
        return [_closed_tag(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    schema = "json_schema" if tag.get("type") == "json_schema" else "schema"
    return {name: closed(part) if name == schema else _closed_tag(part) for name, part in tag.items()}
