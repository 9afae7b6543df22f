"""The whole line in a plain script: `LLM().generate([[{"image": path}, {"text": question}]])`."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from mindie_mm.engine.requests.engine_messages import FinishReason, Timings, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import ArenaFull, InputError, MindieMMError, OperationalError
from mindie_mm.processes.loop_thread import LoopThread
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.settings.paths import working_directory
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.worker.worker import Answer, Worker

T = TypeVar("T")

_ONE_LIST_PER_PROMPT = (
    "wrap it in a list: one list per prompt, such as [[{'image': path}, {'text': question}]], or a text"
)


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one input."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Why generation ended. None if `error` is set."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for the end-of-sequence token."""
    timings: Timings | None = None
    logprobs: list[TokenLogprob] | None = None
    """One per token, where asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One per token of the prompt but the first, where asked for."""
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    error: MindieMMError | None = None
    """The error of this input, with `on_error="return"`."""


class LLM:
    """A worker for scripts, notebooks and standard input, without a `__main__` guard.

    This is a context manager. Without `with`, its processes end at `close` or with the interpreter.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: WorkerConfig | None = None,
        *,
        family: str | None = None,
        decoders: int = 0,
    ) -> None:
        """Start a worker. Errors are those of `Worker.start`.

        Args:
            path: Checkpoint directory. None: `config.model`, or the embedded checkpoint.
            config: Settings of the worker.
            family: Family that serves the checkpoint, as `config.family`.
            decoders: Number of processes that decode the items of a prompt in parallel, as `config.decoders`. 0:
                decode on a thread of this process.

        """
        config = config or WorkerConfig()
        if path is not None:
            config = replace(config, model=Path(path))
        if family is not None:
            config = replace(config, family=family)
        if decoders:
            config = replace(config, decoders=decoders)
        self._loop = LoopThread("LLM")
        try:
            self._worker = self._loop.run(Worker.start(config, in_process=True))
        except BaseException:
            self._loop.close()
            raise
        self.close = weakref.finalize(self, self._loop.close, self._worker.close)
        """Ends the worker: what other threads wait for, and what comes later, is an InputError. Idempotent.

        A process forked from this one has no part in it: there this does nothing, and input is an InputError.
        """

    def generate(
        self,
        inputs: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        chat_template: bool = True,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[Output]:
        """Run all inputs together, and return one output for each, in order.

        An input that fails does not affect the others.

        Args:
            inputs: Texts, or item lists (`List[Dict]`). Tuples work like lists.
            params: Sampling settings, by default those of `get_default_sampling_params`.
            chat_template: Format each input as one user turn of the checkpoint's chat template.
            on_error: "raise" raises the error of an input when all inputs are done. "return" puts each error into its
                Output.

        Raises:
            InputError: `inputs` is not a list of inputs, or a setting in `params` is wrong. Nothing was run.

        """
        if not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes):
            raise InputError(f"inputs is a {type(inputs).__name__}, {_ONE_LIST_PER_PROMPT}")
        requests = [_request(i, one, chat_template) for i, one in enumerate(inputs)]
        outputs = self._loop.run(self._generate(requests, self._checked(params)))
        if on_error == "raise":
            for output in outputs:
                if output.error is not None:
                    raise output.error
        return outputs

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Output:
        """Return the assistant's answer to chat messages, which have the form of /v1/chat/completions.

        Args:
            messages: Messages of the conversation.
            params: Sampling settings, by default those of `get_default_sampling_params`.
            add_generation_prompt: End the prompt with the head of the assistant's turn.
            chat_template_kwargs: More variables of the chat template, such as `tools`.

        """
        request = TokenizeRequest(
            messages=messages,
            folder=working_directory(),
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs or {},
        )
        (output,) = self._loop.run(self._generate([request], self._checked(params)))
        if output.error is not None:
            raise output.error
        return output

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the settings of calls without `params`: those in the checkpoint's generation_config.json.

        `WorkerConfig.generation_config` names another source. Change single settings by `msgspec.structs.replace`.
        """
        return self._worker.default_sampling

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        return (params or self._worker.default_sampling).check(self._worker.engine.info.vocab_size)

    async def _generate(self, requests: Sequence[TokenizeRequest], params: SamplingParams) -> list[Output]:
        # As many at a time as the engine runs: more would only fill the arena with pictures that wait.
        places = asyncio.Semaphore(self._worker.config.engine.max_num_seqs)
        running = 0

        async def one(request: TokenizeRequest) -> Output:
            nonlocal running
            async with places:
                running += 1
                try:
                    while True:
                        try:
                            return await self._answer(request, params)
                        except ArenaFull:
                            if running == 1:  # nobody is left whose end would make room
                                raise
                except MindieMMError as error:
                    return Output("", [], None, error=error)
                except Exception as error:  # noqa: BLE001 - one input fails, not all
                    failure = OperationalError(f"the answer failed: {type(error).__name__}")
                    failure.__cause__ = error
                    return Output("", [], None, error=failure)
                finally:
                    running -= 1

        async with asyncio.TaskGroup() as group:
            outputs = [group.create_task(one(request)) for request in requests]
        return [output.result() for output in outputs]

    async def _answer(self, request: TokenizeRequest, params: SamplingParams) -> Output:
        answer = await Answer.of(self._worker.answer(request, params, uuid.uuid4().hex, whole=True))
        return Output(
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            timings=answer.timings,
            logprobs=None if params.logprobs is None else answer.logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else answer.prompt_logprobs,
            cached_tokens=answer.cached_tokens,
        )


def _request(index: int, one: Any, chat_template: bool) -> TokenizeRequest:
    if isinstance(one, str):
        one = [{"text": one}]
    if isinstance(one, Mapping):
        raise InputError(f"inputs[{index}] is one item of a prompt, {_ONE_LIST_PER_PROMPT}")
    if not isinstance(one, list | tuple):
        raise InputError(f"inputs[{index}] is a {type(one).__name__}, {_ONE_LIST_PER_PROMPT}")
    return TokenizeRequest(items=list(one), chat=chat_template, folder=working_directory())
