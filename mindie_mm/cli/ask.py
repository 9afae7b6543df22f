"""mindie-mm ask."""

from __future__ import annotations

from typing import Any

import click

from mindie_mm.cli.asking import Session, Source, check_media, items_of, model_options, prepared, webui_option
from mindie_mm.cli.paths import MEDIA_FILE, TEXT
from mindie_mm.processes.interrupts import importing


@click.command("ask")
@click.argument("question", type=TEXT)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=MEDIA_FILE,
    help="Image to ask about: a file, a URL, or - for standard input. Repeatable.",
)
@click.option("--video", "videos", multiple=True, type=MEDIA_FILE, help="Video to ask about. Repeatable.")
@click.option("--audio", "clips", multiple=True, type=MEDIA_FILE, help="Audio clip to ask about. Repeatable.")
@webui_option
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print text, token ids, finish reason, timings and "
              "the sampling parameters that were used, as JSON.")  # fmt: skip
def command(
    question: str,
    images: tuple[Source, ...],
    videos: tuple[Source, ...],
    clips: tuple[Source, ...],
    *,
    webui_images: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Ask QUESTION about images, videos and audio clips, and print the answer while it is generated.

    This command loads the model for one question. To ask several questions, start `mindie-mm chat` or `mindie-mm
    serve`.
    """
    media = {"image": images, "video": videos, "audio": clips}
    config, params = prepared("ask", **flags)
    check_media(config, media)
    with importing():
        import msgspec

        from mindie_mm.engine.requests.default_sampling import effective
        from mindie_mm.nn.checkpoint.demo import demo_note
        from mindie_mm.tokenize.requests import request_of_items
        from mindie_mm.worker.deltas import Answer

    request = request_of_items([*items_of(media), {"text": question}], webui=webui_images)
    if note := demo_note(config.model, "mindie-mm ask --model"):
        click.echo(note, err=True)
    with Session(config) as session:
        if not as_json:
            session.answer(request, params, Answer())
            click.echo()
            return
        answer = session.whole_answer(request, params)
    printed = {name: getattr(answer, name) for name in ("text", "token_ids", "finish_reason", "timings")}
    click.echo(msgspec.json.encode(printed | {"sampling": effective(params)}).decode())
