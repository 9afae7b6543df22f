"""Options of commands, from the settings classes. The help of an option is the docstring of its field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from mindie_mm.cli.paths import PATH, TEXT
from mindie_mm.settings.config import GiB, MiB
from mindie_mm.settings.sources import PARTS, REMOVED, Configuration, configuration

Command = Callable[..., Any]


class _Setting(click.Option):
    """An option that `SettingsCommand` lists under the heading of the option's settings class."""

    def __init__(self, *arguments: Any, heading: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.heading = heading


class SettingsCommand(click.Command):
    """A command whose help lists the command's own options first, and then the settings of each class."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                heading = parameter.heading if isinstance(parameter, _Setting) else "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def settings(*classes: type[Any], without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Return a decorator that adds one option per field of the settings `classes`, and `--config`.

    `without` contains the names of fields that have no effect on the command.
    """

    def decorate(command: Command) -> Command:
        command = click.option(
            "--config",
            type=PATH,
            help="TOML file with settings, such as: port = 8100. Options and environment variables override it.",
        )(command)
        for cls in reversed(classes):
            helps = _field_docs(cls)
            for field in reversed(dataclasses.fields(cls)):
                if field.name not in {*PARTS, "model", *without}:
                    command = _option(cls, field, helps[field.name])(command)
        for name in REMOVED:
            command = click.option(f"--{name.replace('_', '-')}", name, hidden=True, expose_value=False,
                                   callback=_refuse_removed)(command)  # fmt: skip
        return command

    return decorate


def _refuse_removed(_: click.Context, parameter: click.Parameter, value: object) -> None:
    """Refuse an option of an earlier version with the reason why it was removed."""
    if value is not None:
        raise click.UsageError(f"{parameter.opts[0]} was removed: {REMOVED[parameter.name or '']}")


def _option(cls: type[Any], field: dataclasses.Field[Any], text: str) -> Callable[[Command], Command]:
    name, hint = field.name.replace("_", "-"), get_type_hints(cls)[field.name]
    heading = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
    # The value of an option that is not given stays None, so that the environment is used.
    named: dict[str, Any] = {"cls": _Setting, "heading": heading, "default": None}
    text, _, left_open = " ".join(text.split()).partition(" Default: ")
    if default := left_open.rstrip(".") or _shown(field):
        text += f"  [default: {default}]"
    if hint is bool:
        return click.option(f"--{name}/--no-{name}", help=text, **named)
    many = get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis
    return click.option(f"--{name}", type=_parameter(hint), multiple=many, help=text, **named)


def _shown(field: dataclasses.Field[Any]) -> str:
    """Format a field's default for help texts.

    Sizes are given with a unit, flags are "on" or "off", and a missing default is an empty text.
    """
    value = field.default
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if field.name.endswith("_bytes") and isinstance(value, int):
        unit, size = ("GiB", GiB) if value % GiB == 0 else ("MiB", MiB)
        return f"{value}, {value // size} {unit}"
    return str(value)


def _parameter(hint: Any) -> Any:
    """Return the click type of a field.

    For a tuple of any length, this is the type of its elements. For a tuple of a fixed length, it is a tuple of the
    elements' types. For an optional field, it is the type of the value. A mapping is given as text, and so is a field
    that accepts both a number and a word.
    """
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    kind, *further = get_args(hint) or (hint,)
    if any(get_origin(part) is Literal for part in further):  # the settings class parses the value
        return TEXT
    if get_origin(hint) is tuple and further != [Ellipsis]:
        return click.Tuple([_parameter(part) for part in (kind, *further)])
    if get_origin(hint) is dict:
        return TEXT
    return {Path: PATH, str: TEXT}.get(kind, kind)


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for field, below in itertools.pairwise(node.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = text
    return docs


def configured(path: Path | str | None, flags: Mapping[str, Any]) -> Configuration:
    """Return the settings. Given `flags` override the environment, which overrides the file of --config.

    Raises:
        InputError: A setting is invalid. The message says which setting, and where it was set.

    """
    given = dict(flags)
    file = given.pop("config", None)
    return configuration(given | {"model": None if path is None else Path(path)}, file)
