"""mindie-mm: serve | ask | models | shm | doctor."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindie_mm.config import EngineConfig, MiB, ServiceConfig, WorkerConfig, default_spool, environment
from mindie_mm.errors import MindieMMError
from mindie_mm.models import family_named, family_names
from mindie_mm.shm import Ref, collect, free, release, survey

Command = Callable[..., Any]
SETTINGS = (WorkerConfig, EngineConfig, ServiceConfig)


class _Group(click.Group):
    """Shows our own errors as one line, without a trace."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except MindieMMError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mindie_mm")
def main() -> None:
    """A multimodal serving worker: token ids carry references to pixels in shared memory."""


def settings(*classes: type[Any]) -> Callable[[Command], Command]:
    """One option for each field of the settings `classes`, with its docstring as help."""

    def decorate(command: Command) -> Command:
        for cls in reversed(classes):
            helps = _field_docs(cls)
            for field in reversed(dataclasses.fields(cls)):
                if field.name not in ("model", "engine"):
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
    worker, engine, service = (
        environment(cls) | {field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given}
        for cls in SETTINGS
    )
    if path is not None:
        worker["model"] = path
    return WorkerConfig(**worker | {"engine": EngineConfig(**engine)}), ServiceConfig(**service)


@main.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@settings(ServiceConfig, WorkerConfig, EngineConfig)
def serve(path: Path | None, **flags: Any) -> None:
    """Serve the checkpoint directory PATH, or the embedded one, over HTTP.

    Each option can also be set by the environment, as MINDIE_MM_<OPTION>.
    """
    from service.server import serve as run  # late: the other commands start without a web framework

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(*configured(path, flags))


@main.command()
@click.argument("question")
@click.option("--image", "images", multiple=True, type=click.Path(path_type=Path), help="A picture; repeatable.")
@click.option("--video", "videos", multiple=True, type=click.Path(path_type=Path), help="A video; repeatable.")
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint directory; the embedded one if not given.")
@click.option("--max-tokens", type=int, default=256, help="Most tokens of the answer.")
@click.option("--temperature", type=float, default=0.0, help="0 always gives the same answer.")
@click.option("--device", help="auto, or a device that `doctor` lists.")
@click.option("--json", "as_json", is_flag=True, help="Text, token ids, finish reason and timings as JSON.")
def ask(
    question: str,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    *,
    model: Path | None,
    max_tokens: int,
    temperature: float,
    device: str | None,
    as_json: bool,
) -> None:
    """Ask QUESTION about pictures and videos, once."""
    from mindie_mm.engine.llm import LLM  # late: it takes seconds to import
    from mindie_mm.engine.sampling_params import SamplingParams

    items: list[dict[str, Any]] = [{"image": str(path)} for path in images]
    items += [{"video": str(path)} for path in videos]
    items.append({"text": question})
    config, _ = configured(model, {"device": device})
    status = Console(stderr=True)
    with status.status("loading the model"):
        llm = LLM(config.model, config)
    with llm, status.status("thinking"):
        (output,) = llm.generate([items], SamplingParams(max_tokens=max_tokens, temperature=temperature))
    if as_json:
        answer = {name: getattr(output, name) for name in ("text", "token_ids", "finish_reason", "timings")}
        click.echo(msgspec.json.encode(answer).decode())
    else:
        click.echo(output.text)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def models(as_json: bool) -> None:
    """List the model families that are served."""
    if as_json:
        click.echo(json.dumps([_family(name) for name in family_names()]))
        return
    table = Table("family", "model_type", "media")
    for family in map(_family, family_names()):
        table.add_row(family["name"], ", ".join(family["model_types"]), ", ".join(family["kinds"]))
    Console().print(table)


def _family(name: str) -> dict[str, Any]:
    family = family_named(name)
    return {"name": name, "model_types": list(family.model_types), "kinds": list(family.kinds)}


@main.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@settings(WorkerConfig, EngineConfig)
def doctor(path: Path | None, *, as_json: bool, **flags: Any) -> None:
    """Say what of this machine is fine for serving PATH, and what to do about what is not.

    Exits with 1 if something would keep the service from starting.
    """
    from mindie_mm.doctor import examine

    findings = list(examine(configured(path, flags)[0]))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        table = Table("", "", "found", "what to do", show_header=False, box=None)
        marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}
        for finding in findings:
            table.add_row(marks[finding.status], finding.subject, escape(finding.found), escape(finding.advice))
        Console().print(table)
    sys.exit(any(finding.status == "error" for finding in findings))


@main.group()
def shm() -> None:
    """Show, free and reclaim shared memory of mindie_mm."""


@shm.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_(as_json: bool) -> None:
    """List the arenas in /dev/shm and the blocks in them."""
    arenas = survey()
    if as_json:
        click.echo(msgspec.json.encode(arenas).decode())
        return
    table = Table("arena", "owner", "block", "state", "MiB", "age", "arrays", "request")
    for arena in arenas:
        name, pid = Path(arena.file).name, "?" if arena.owner is None else arena.owner.pid
        owner = f"pid {pid}" if arena.alive else f"[red]dead[/] (pid {pid})"
        room = f"{arena.used_bytes / MiB:.1f} of {arena.capacity_bytes / MiB:.0f}"
        table.add_row(name, owner, f"{len(arena.blocks)} blocks", "", room, _age(arena.age_s), "", "")
        for block in arena.blocks:
            arrays = ", ".join(f"{array} {spec.dtype}{list(spec.shape)}" for array, spec in block.arrays.items())
            size, request = f"{block.num_bytes / MiB:.1f}", escape(block.request)
            table.add_row(
                "", "", f"{name}:{block.block}", block.state, size, _age(block.age_s), escape(arrays), request
            )
    Console().print(table)


@shm.command("free")
@click.argument("targets", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def free_(targets: tuple[str, ...], as_json: bool) -> None:
    """Free each of TARGETS: a request's path file, or a block as `shm list` names it (mindie_mm-1f2a:17).

    A request that still needs what is freed fails, with an error that says so; no other does.
    """
    blocks = {f"{Path(arena.file).name}:{block.block}": (arena, block) for arena in survey() for block in arena.blocks}
    freed = 0
    for target in targets:
        if target in blocks:
            arena, block = blocks[target]
            free(Ref(arena.number, block.block, block.generation))
            freed += 1
        elif Path(target).is_file():
            freed += release(Path(target))
        else:
            raise click.UsageError(f"{target} is neither a path file nor a block of `mindie-mm shm list`")
    click.echo(json.dumps({"freed": freed}) if as_json else f"freed {freed} blocks")


@shm.command()
@click.option("--spool", type=click.Path(path_type=Path), help="Folder of request directories; the service's own one.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def gc(spool: Path | None, as_json: bool) -> None:
    """Reclaim what belongs to the dead: arenas without an owner, requests and blocks without a process.

    What a living process uses, and what other users and programs have there, stays.
    """
    collected = collect([spool or default_spool()])
    if as_json:
        click.echo(msgspec.json.encode(collected, enc_hook=str).decode())
        return
    click.echo(
        f"removed {len(collected.arenas)} arenas ({collected.arena_bytes / MiB:.1f} MiB), "
        f"freed {len(collected.blocks)} blocks, released {len(collected.requests)} requests"
    )


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    main()
