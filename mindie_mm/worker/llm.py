"""A worker for scripts. Example: `LLM().generate([[{"image": path}, {"text": question}]])`."""

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
from mindie_mm.settings.limits import PromptLimits
from mindie_mm.settings.paths import working_directory
from mindie_mm.tokenize.stage.tokenizer_messages import TokenizeRequest
from mindie_mm.worker.worker import Answer, Worker

T = TypeVar("T")

_ONE_LIST_PER_PROMPT = (
    "wrap it in a list: one list per prompt, such as [[{'image': path}, {'text': question}]], or give a string"
)


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one input."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Reason why generation ended, or None if `error` is set."""
    stop_reason: str | int | None = None
    """Stop string or stop token id that ended the output. It is None if the output ended for another reason, such as
    the end-of-sequence token."""
    timings: Timings | None = None
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each token, if requested."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each prompt token except the first, if requested."""
    cached_tokens: int = 0
    """Number of prompt tokens that were in the prefix cache."""
    error: MindieMMError | None = None
    """Error of this input, if `on_error` is "return"."""


class LLM:
    """A worker for scripts and notebooks. A script does not need a `__main__` guard.

    An `LLM` is a context manager. Without `with`, its processes end when `close` is called or the interpreter exits.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: WorkerConfig | None = None,
        *,
        family: str | None = None,
        decoders: int = 0,
        limit_mm_per_prompt: PromptLimits | None = None,
    ) -> None:
        """Start a worker.

        This raises the errors of `Worker.start`.

        Args:
            path: Checkpoint directory. If it is None, `config.model` or the embedded checkpoint is used.
            config: Settings of the worker, or None for defaults.
            family: Family of the checkpoint, by default `config.family`.
            decoders: Number of processes that decode the items of a prompt in parallel, by default `config.decoders`.
                If both are 0, a thread of this process decodes.
            limit_mm_per_prompt: Maximum number of items in one prompt, such as {"image": 4, "video": 1}, by default
                `config.limit_mm_per_prompt`.

        """
        config = config or WorkerConfig()
        if path is not None:
            config = replace(config, model=Path(path))
        if family is not None:
            config = replace(config, family=family)
        if decoders:
            config = replace(config, decoders=decoders)
        if limit_mm_per_prompt is not None:
            config = replace(config, limit_mm_per_prompt=limit_mm_per_prompt)
        self._loop = LoopThread("LLM")
        try:
            self._worker = self._loop.run(Worker.start(config, in_process=True))
        except BaseException:
            self._loop.close()
            raise
        self.close = weakref.finalize(self, self._loop.close, self._worker.close)
        """Function that ends the worker. It may be called repeatedly. Pending and later calls of other methods raise
        InputError.

        In a forked process, this function does nothing, and all other methods raise InputError.
        """

    def generate(
        self,
        inputs: Sequence[Any],
        params: SamplingParams | None = None,
        *,
        chat_template: bool = True,
        webui: bool = False,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[Output]:
        """Generate an output for each input. Inputs are batched, and an input that fails does not affect other inputs.

        Args:
            inputs: Texts, or lists of items (`List[Dict]`). Tuples are treated as lists.
            params: Sampling settings. By default, those of `get_default_sampling_params`.
            chat_template: Whether to format each input as one user turn with the checkpoint's chat template.
            webui: Whether texts may contain pictures in the format of text-generation-webui, `<img
                src="data:image/jpeg;base64,...">`.
            on_error: "raise" raises the first error after all inputs are done. "return" stores the error of an input in
                its `Output`.

        Returns:
            One output per input, in order.

        Raises:
            InputError: `inputs` is not a list of inputs, or a setting in `params` is invalid. This is raised before any
                input is run.

        """
        if not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes):
            raise InputError(f"inputs is a {type(inputs).__name__}; {_ONE_LIST_PER_PROMPT}")
        requests = [_request(i, one, chat_template, webui) for i, one in enumerate(inputs)]
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
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        webui: bool = False,
    ) -> Output:
        """Return the assistant's answer to chat messages, in the format of /v1/chat/completions.

        Args:
            messages: Messages of the conversation.
            params: Sampling settings. By default, those of `get_default_sampling_params`.
            add_generation_prompt: Whether the prompt ends with the header of the assistant's turn.
            continue_final_message: Whether the last message is continued instead of answered. No header is added.
            chat_template_kwargs: Additional variables of the chat template, such as `tools`.
            webui: As in `generate`.

        """
        request = TokenizeRequest(
            messages=messages,
            folder=working_directory(),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs or {},
            webui=webui,
        )
        (output,) = self._loop.run(self._generate([request], self._checked(params)))
        if output.error is not None:
            raise output.error
        return output

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling settings that calls without `params` use.

        The settings come from the checkpoint's generation_config.json, or from `WorkerConfig.generation_config` if that
        is set. Use `msgspec.structs.replace` to change single settings.
        """
        return self._worker.default_sampling

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        return (params or self._worker.default_sampling).check(self._worker.engine.info.vocab_size)

    async def _generate(self, requests: Sequence[TokenizeRequest], params: SamplingParams) -> list[Output]:
        # Submit only as many inputs as the engine can run, because media of other inputs would only fill the arena.
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
                            if running == 1:  # no other input can free memory of the arena
                                raise
                except MindieMMError as error:
                    return Output("", [], None, error=error)
                except Exception as error:  # noqa: BLE001 - one input fails, not all
                    failure = OperationalError(f"the request failed: {type(error).__name__}")
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


def _request(index: int, one: Any, chat_template: bool, webui: bool) -> TokenizeRequest:
    if isinstance(one, str):
        one = [{"text": one}]
    if isinstance(one, Mapping):
        raise InputError(f"inputs[{index}] is one item of a prompt; {_ONE_LIST_PER_PROMPT}")
    if not isinstance(one, list | tuple):
        raise InputError(f"inputs[{index}] is a {type(one).__name__}; {_ONE_LIST_PER_PROMPT}")
    return TokenizeRequest(items=list(one), chat=chat_template, webui=webui, folder=working_directory())
