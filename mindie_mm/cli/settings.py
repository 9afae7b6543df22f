"""Options of commands, made from the settings classes: one for each field, with its docstring as help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from mindie_mm.cli.paths import PATH
from mindie_mm.sources import PARTS, Configuration, configuration

Command = Callable[..., Any]


def settings(*classes: type[Any], without: Collection[str] = ()) -> Callable[[Command], Command]:
    """One option for each field of the settings `classes`, with its docstring as help; and one for a file of them.

    `without` names fields that mean nothing to the command.
    """

    def decorate(command: Command) -> Command:
        command = click.option(
            "--config",
            type=PATH,
            help="TOML file of settings, each by its name: port = 8100. Flags and the environment go first.",
        )(command)
        for cls in reversed(classes):
            helps = _field_docs(cls)
            for field in reversed(dataclasses.fields(cls)):
                if field.name not in {*PARTS, "model", *without}:
                    command = _option(field, get_type_hints(cls)[field.name], helps[field.name])(command)
        return command

    return decorate


def _option(field: dataclasses.Field[Any], hint: Any, text: str) -> Callable[[Command], Command]:
    name = field.name.replace("_", "-")
    # A flag that was not given stays None, so that the environment counts; the default shown is the class's own.
    text += "" if field.default is None or field.default == () else f"  [default: {field.default}]"
    if hint is bool:
        return click.option(f"--{name}/--no-{name}", default=None, help=text)
    many = get_origin(hint) is tuple
    return click.option(f"--{name}", type=_parameter(hint), multiple=many, default=None, help=text)


def _parameter(hint: Any) -> Any:
    """What click reads: of a tuple its elements, of an optional value the value."""
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    kind, *_ = get_args(hint) or (hint,)
    return PATH if kind is Path else kind


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring under each field of a class, by the field's name."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for field, below in itertools.pairwise(node.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = text
    return docs


def configured(path: Path | None, flags: Mapping[str, Any]) -> Configuration:
    """The settings of the flags that were given, under them the environment's, under those the file's; InputError."""
    given = dict(flags)
    file = given.pop("config", None)
    return configuration(given | {"model": path}, file)
