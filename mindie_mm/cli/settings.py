"""Options of commands, made from the settings classes: one for each field, with its docstring as help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import click

from mindie_mm.config import EngineConfig, MediaCaps, ServiceConfig, WorkerConfig, environment

Command = Callable[..., Any]
SETTINGS = (WorkerConfig, EngineConfig, MediaCaps, ServiceConfig)


def settings(*classes: type[Any]) -> Callable[[Command], Command]:
    """One option for each field of the settings `classes`, with its docstring as help."""

    def decorate(command: Command) -> Command:
        for cls in reversed(classes):
            helps = _field_docs(cls)
            for field in reversed(dataclasses.fields(cls)):
                if field.name not in ("model", "engine", "media"):
                    command = _option(field, get_type_hints(cls)[field.name], helps[field.name])(command)
        return command

    return decorate


def _option(field: dataclasses.Field[Any], hint: Any, text: str) -> Callable[[Command], Command]:
    kinds = [kind for kind in getattr(hint, "__args__", (hint,)) if kind not in (type(None), ...)]
    many = getattr(hint, "__origin__", None) is tuple
    name = field.name.replace("_", "-")
    # A flag that was not given stays None, so that the environment counts; the default shown is the class's own.
    text += "" if field.default is None or field.default == () else f"  [default: {field.default}]"
    if kinds[0] is bool:
        return click.option(f"--{name}/--no-{name}", default=None, help=text)
    kind = click.Path(path_type=Path) if kinds[0] is Path else kinds[0]
    return click.option(f"--{name}", type=kind, multiple=many, default=None, help=text)


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


def configured(path: Path | None, flags: dict[str, Any]) -> tuple[WorkerConfig, ServiceConfig]:
    """The settings of the environment, and over them those of the flags that were given."""
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    worker, engine, media, service = (
        environment(cls) | {field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given}
        for cls in SETTINGS
    )
    if path is not None:
        worker["model"] = path
    parts = {"engine": EngineConfig(**engine), "media": MediaCaps(**media)}
    return WorkerConfig(**worker | parts), ServiceConfig(**service)
