"""mindie-mm ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH, READABLE_FILE, TEXT
from mindie_mm.cli.settings import configured
from mindie_mm.errors import InputError
from mindie_mm.processes.interrupts import importing
from mindie_mm.settings.config import WorkerConfig


@click.command("ask", short_help="Ask one question and print the answer.")
@click.argument("question", type=TEXT)
@click.option("--image", "images", multiple=True, type=READABLE_FILE, help="Image to ask about. Repeatable.")
@click.option("--video", "videos", multiple=True, type=READABLE_FILE, help="Video to ask about. Repeatable.")
@click.option("--audio", "sounds", multiple=True, type=READABLE_FILE, help="Audio clip to ask about. Repeatable.")
@click.option("--webui-images", is_flag=True,
              help="Read pictures in QUESTION, in the format of text-generation-webui: "
              '<img src="data:image/jpeg;base64,...">.')  # fmt: skip
@click.option("--model", type=PATH, help="Checkpoint directory.  [default: the embedded checkpoint]")
@click.option(
    "--family", help="Model family to use instead of the one that config.json names.  [default: the one in config.json]"
)
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Maximum number of tokens of the answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True,
              help="Sampling temperature. 0 always gives the same answer.")  # fmt: skip
@click.option("--generation-config", metavar="auto|vllm|FOLDER",
              help="Source of the other sampling parameters: the checkpoint's generation_config.json, "
              "neutral values, or a folder with such a file. --json prints the values that were "
              "used.  [default: auto]")  # fmt: skip
@click.option(
    "--device",
    help="Device that runs the model: auto, npu, cuda or cpu, or one of several, such as cuda:1.  [default: auto]",
)
@click.option("--tensor-parallel", type=click.IntRange(1),
              help="Number of devices that share the model's weights.  [default: 1]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print text, token ids, finish reason, timings and "
              "the sampling parameters that were used, as JSON.")  # fmt: skip
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
    generation_config: str | None,
    device: str | None,
    tensor_parallel: int | None,
    webui_images: bool,
    as_json: bool,
) -> None:
    """Ask QUESTION about pictures, videos and sounds, and print the answer.

    This command loads the model for one question. To ask several questions, start `mindie-mm serve`.
    """
    media = {"image": images, "video": videos, "audio": sounds}
    with importing():
        import math

        import msgspec
        from rich.console import Console

        from mindie_mm import logs
        from mindie_mm.engine.requests.default_sampling import defaults_of, effective
        from mindie_mm.engine.requests.sampling_params import SamplingParams

    flags = {
        "device": device,
        "family": family,
        "tensor_parallel": tensor_parallel,
        "generation_config": generation_config,
    }
    settings = configured(model, flags)
    SamplingParams(max_tokens=max_tokens, temperature=temperature).check(math.inf)  # needs no checkpoint
    default = defaults_of(settings.worker.model, settings.worker.family, settings.worker.generation_config)
    params = default.stating(max_tokens=max_tokens, temperature=temperature).check(math.inf)
    level = settings.service.log_level if "log_level" in settings.origins else "warning"
    logs.configure(logs.LogSettings(settings.service.log_format, level), "ask")
    status = Console(stderr=True)
    with status.status("loading the model"):
        with importing():
            from mindie_mm.worker.llm import LLM

            _require_kinds(settings.worker, [kind for kind, paths in media.items() if paths])
        llm = LLM(settings.worker.model, settings.worker)
    items: list[dict[str, Any]] = [{kind: str(path)} for kind, paths in media.items() for path in paths]
    with llm, status.status("thinking"):
        (output,) = llm.generate([[*items, {"text": question}]], params, webui=webui_images)
    if as_json:
        answer = {name: getattr(output, name) for name in ("text", "token_ids", "finish_reason", "timings")}
        click.echo(msgspec.json.encode(answer | {"sampling": effective(params)}).decode())
    else:
        click.echo(output.text)


def _require_kinds(config: WorkerConfig, given: list[str]) -> None:
    """Raise InputError if the checkpoint does not support a given kind of media. Do not load weights."""
    from mindie_mm.models import family_of
    from mindie_mm.nn.checkpoint.directory import Checkpoint

    checkpoint = Checkpoint.open(config.model)
    kinds = family_of(checkpoint, config.family).kinds
    for kind in given:
        if kind not in kinds:
            raise InputError(
                f"--{kind}: {checkpoint.path} does not accept {kind} inputs; it accepts {', '.join(kinds)}"
            )
