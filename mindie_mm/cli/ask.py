"""mindie-mm ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH
from mindie_mm.cli.settings import configured


@click.command("ask")
@click.argument("question")
@click.option("--image", "images", multiple=True, type=PATH, help="A picture; repeatable.")
@click.option("--video", "videos", multiple=True, type=PATH, help="A video; repeatable.")
@click.option("--audio", "sounds", multiple=True, type=PATH, help="A clip of sound; repeatable.")
@click.option("--model", type=PATH, help="Checkpoint directory; the embedded one if not given.")
@click.option("--family", help="Family that serves it; the one that its config.json names if not given.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens of the answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always gives the same answer.")
@click.option("--device", help="auto, or a device that `doctor` lists.")
@click.option("--tensor-parallel", type=click.IntRange(1), help="Processes, and devices, that share the weights.")
@click.option("--json", "as_json", is_flag=True, help="Text, token ids, finish reason and timings as JSON.")
def command(
    question: str,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    sounds: tuple[Path, ...],
    *,
    model: Path | None,
    family: str | None,
    max_tokens: int,
    temperature: float,
    device: str | None,
    tensor_parallel: int | None,
    as_json: bool,
) -> None:
    """Ask QUESTION about pictures, videos and sound, once."""
    import math

    import msgspec
    from rich.console import Console

    from mindie_mm.engine.llm import LLM  # late: it takes seconds to import
    from mindie_mm.engine.sampling_params import SamplingParams

    items: list[dict[str, Any]] = [{"image": str(path)} for path in images]
    items += [{"video": str(path)} for path in videos]
    items += [{"audio": str(path)} for path in sounds]
    items.append({"text": question})
    flags = {"device": device, "family": family, "tensor_parallel": tensor_parallel}
    config = configured(model, flags).worker
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature).check(math.inf)  # loading may take minutes
    status = Console(stderr=True)
    with status.status("loading the model"):
        llm = LLM(config.model, config)
    with llm, status.status("thinking"):
        (output,) = llm.generate([items], params)
    if as_json:
        answer = {name: getattr(output, name) for name in ("text", "token_ids", "finish_reason", "timings")}
        click.echo(msgspec.json.encode(answer).decode())
    else:
        click.echo(output.text)
