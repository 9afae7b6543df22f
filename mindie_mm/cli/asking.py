"""Common parts of `ask` and `chat`: their options, the check of media files, and the worker that streams answers."""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from mindie_mm.cli.hub import with_local_model
from mindie_mm.cli.paths import PATH
from mindie_mm.cli.settings import configured
from mindie_mm.errors import InputError, naming
from mindie_mm.processes.interrupts import importing
from mindie_mm.processes.progress import loading_shown, progress_shown
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.settings.paths import absolute

if TYPE_CHECKING:
    from mindie_mm.engine.requests.sampling_params import SamplingParams
    from mindie_mm.tokenize.requests import TokenizeRequest
    from mindie_mm.worker.deltas import Answer

Command = Callable[..., Any]
Source = Path | str | bytes
"""A media file, a URL, or the contents of standard input."""

_OPTIONS = (
    click.option("--model", type=PATH, help="Checkpoint directory, or the name of a repository on the Hugging Face "
                 "Hub.  [default: the embedded checkpoint]"),
    click.option("--revision", help="Branch, tag or commit of the repository.  [default: main]"),
    click.option("--download", is_flag=True, default=None,
                 help="Download the repository without a question. A terminal is asked otherwise."),
    click.option(
        "--family",
        help="Model family.  [default: the family in config.json]",
    ),
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Maximum number of tokens."),
    click.option("--temperature", type=float, default=0.0, show_default=True,
                 help="Sampling temperature. 0 always gives the same answer."),
    click.option("--generation-config", metavar="auto|vllm|FOLDER",
                 help="Source of the other sampling parameters: the checkpoint's generation_config.json (auto), "
                 "neutral values (vllm), or a folder with a generation_config.json.  [default: auto]"),
    click.option(
        "--device",
        help="Device that runs the model: auto, npu, cuda, cpu, or a single device, such as cuda:1.  [default: auto]",
    ),
    click.option("--lora", type=PATH, help="Folder of a LoRA adapter of the model, which computes the answers."),
    click.option("--tensor-parallel", type=click.IntRange(1),
                 help="Number of devices that share the model's weights.  [default: 1]"),
    click.option("--limit-mm-per-prompt", metavar="LIMITS",
                 help="Maximum number of media items in one prompt, such as image=4,video=1 or, as JSON, "
                 '{"image": 4, "video": 1}.  [default: no limit other than the model\'s]'),
)  # fmt: skip
webui_option = click.option(
    "--webui-images", is_flag=True,
    help='Read images in texts, in the format of text-generation-webui: <img src="data:image/jpeg;base64,...">.',
)  # fmt: skip
_KEPT_CONTROLS = "\n\t"
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in _KEPT_CONTROLS}
"""Characters that a terminal would interpret, such as the beginning of an escape sequence."""


def model_options(command: Command) -> Command:
    """Add the options of the model and of sampling to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def prepared(
    process: str, *, model: Path | None, max_tokens: int, temperature: float, lora: Path | None, **flags: Any
) -> tuple[WorkerConfig, SamplingParams]:
    """Return the settings of the worker and of sampling, and set up logging. No weights are loaded.

    Args:
        process: Name of this process in its log.
        model: Value of --model.
        max_tokens: Value of --max-tokens.
        temperature: Value of --temperature.
        lora: Value of --lora.
        flags: Values of the other options of `model_options`.

    Raises:
        InputError: A setting is invalid.

    """
    with importing():
        from mindie_mm import logs
        from mindie_mm.worker.one_lora import with_one_lora
        from mindie_mm.worker.preflight import check_before_loading

    settings = with_local_model(configured(model, flags))
    config, name = with_one_lora(settings.worker, None if lora is None else absolute(lora))
    check_before_loading(config)
    with importing():
        from mindie_mm.engine.requests.default_sampling import defaults_of
        from mindie_mm.engine.requests.sampling_params import SamplingParams

    SamplingParams(max_tokens=max_tokens, temperature=temperature).check(math.inf)  # needs no checkpoint
    default = defaults_of(settings.worker.model, settings.worker.family, settings.worker.generation_config)
    params = default.stating(max_tokens=max_tokens, temperature=temperature, lora=name).check(math.inf)
    level = settings.service.log_level if "log_level" in settings.origins else "warning"
    logs.configure(logs.LogSettings(settings.service.log_format, level), process)
    return config, params


def items_of(given: Mapping[str, Sequence[Source]]) -> list[dict[str, Any]]:
    """Return media as items of a `List[Dict]`."""
    return [
        {kind: str(source) if isinstance(source, Path) else source}
        for kind, sources in given.items()
        for source in sources
    ]


def check_media(
    config: WorkerConfig, given: Mapping[str, Sequence[Source]], sign: str = "--", *, earlier: Sequence[Any] = ()
) -> None:
    """Check media files by their headers, without loading weights.

    Args:
        config: Settings of the worker.
        given: Media of each kind. URLs are not fetched.
        sign: Text before the kind in the option or command, such as `--` in `--image`.
        earlier: Other items of the same prompt, which have been checked.

    Raises:
        InputError: The checkpoint does not support a kind, or a file is of another kind, damaged or too large.
        LimitExceeded: The prompt has more media than the checkpoint supports, or than the limits allow.

    """
    with importing():
        from mindie_mm.inputs import media_of, parse_inputs, require_within
        from mindie_mm.models import family_of
        from mindie_mm.nn.checkpoint.directory import Checkpoint
        from mindie_mm.tokenize import Tokenizer
        from mindie_mm.tokenize.media_stage import RequestMedia

    checkpoint = Checkpoint.open(config.model)
    kinds = family_of(checkpoint, config.family).kinds
    for kind in (kind for kind, sources in given.items() if sources):
        if kind not in kinds:
            raise InputError(
                f"{sign}{kind}: {checkpoint.path} does not accept {kind} inputs; it accepts {', '.join(kinds)}"
            )
    own = items_of(given)
    items = [*earlier, *own]
    if not items:
        return
    require_within(media_of(parse_inputs(items)), config.limit_mm_per_prompt)
    if not any(map(_is_readable_again, own)):
        return

    async def plan(items: Sequence[Any]) -> None:
        with closing(RequestMedia(tokenizer.prompts.stage)) as media:
            await media.plan([(media_of(parse_inputs(items)), "")])

    with Tokenizer.from_pretrained(config.model, family=config.family, caps=config.media) as tokenizer:
        for item in filter(_is_readable_again, own):
            ((kind, source),) = item.items()
            with naming(f"{sign}{kind} {'-' if isinstance(source, bytes) else source}"):
                tokenizer.run(plan([item]))
        together = list(filter(_is_readable_again, items))
        if len(together) > 1:  # the model may limit their number, or mix no kinds
            tokenizer.run(plan(together))


def _is_readable_again(item: Mapping[str, str | bytes]) -> bool:
    """Return whether an item can be checked in advance. A pipe can be read only once, and a URL would be fetched."""
    (source,) = item.values()
    return isinstance(source, bytes) or Path(source).is_file()


class Session:
    """A worker that streams answers to standard output. Use it as a context manager."""

    def __init__(self, config: WorkerConfig) -> None:
        """Load the model, and show the progress on standard error. Raise the errors of `Worker.start`."""
        with importing():
            from mindie_mm.processes.loop_thread import LoopThread
            from mindie_mm.worker.worker import Worker

        self._loop = LoopThread("session")
        try:
            with loading_shown() as loading:
                self.worker = self._loop.run(Worker.start(config, in_process=True, loading=loading))
        except BaseException:
            self._loop.close()
            raise

    def answer(self, request: TokenizeRequest, params: SamplingParams, answer: Answer) -> None:
        """Answer a request. Write the text, and add the pieces to `answer`, as they arrive.

        If this call is interrupted, `answer` contains the pieces that arrived before.
        """
        self._loop.run(self._answer(request, params, answer))

    def whole_answer(self, request: TokenizeRequest, params: SamplingParams) -> Answer:
        """Return the answer to a request. If the weights are replaced meanwhile, the answer starts again."""
        with progress_shown(lambda: "thinking"):
            return self._loop.run(self.worker.whole_answer(request, params, uuid.uuid4().hex))

    async def _answer(self, request: TokenizeRequest, params: SamplingParams, answer: Answer) -> None:
        deltas = self.worker.answer(request, params, uuid.uuid4().hex)
        with ExitStack() as waiting:
            waiting.enter_context(progress_shown(lambda: "thinking"))
            async with aclosing(deltas):
                async for delta in deltas:
                    waiting.close()
                    answer.add(delta)
                    write(delta.text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close(self.worker.close)


def write(text: str) -> None:
    """Write a part of an answer to standard output. If this is a terminal, leave control characters out."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
