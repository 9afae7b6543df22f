"""The whole line in a plain script: `LLM().generate([[{"image": path}, {"text": question}]])`."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from mindie_mm.config import WorkerConfig
from mindie_mm.engine.messages import FinishReason, Timings, TokenLogprob
from mindie_mm.engine.sampling_params import SamplingParams
from mindie_mm.engine.worker import Answer, Worker
from mindie_mm.errors import ArenaFull, InputError, MindieMMError, WorldError
from mindie_mm.paths import working_directory
from mindie_mm.tokenize.messages import TokenizeRequest

T = TypeVar("T")

_ONE_LIST_PER_PROMPT = (
    "wrap it in a list: one list per prompt, such as [[{'image': path}, {'text': question}]], or a text"
)
_THREADS = "mindie_mm"
"""What the names of an LLM's threads begin with."""


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one input."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """None where `error` says why there is none."""
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
    """What ended this input, where `on_error="return"` was asked for."""


class LLM:
    """A worker for a plain script, a notebook, standard input: no `__main__` guard is needed.

    A context manager; without `with`, everything ends at `close` or with the interpreter.
    """

    def __init__(
        self, path: str | Path | None = None, config: WorkerConfig | None = None, *, family: str | None = None
    ) -> None:
        """Serves the checkpoint directory `path`, or `config.model`, or the embedded one. Errors as Worker.start.

        `family` names the family that serves it, as `config.family` does.
        """
        config = config or WorkerConfig()
        if path is not None:
            config = replace(config, model=Path(path))
        if family is not None:
            config = replace(config, family=family)
        self._loop = _Loop()
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
        """Return one output for each of `inputs`, in order; they run together.

        An input is a text, or a `List[Dict]`, one user turn through the checkpoint's chat template
        (`chat_template=False`: as it stands); tuples are as good as lists. One that fails leaves the others alone: its
        error is raised once they are done, or returned in its Output. InputError before anything is made of any for
        what is no list of inputs, or a setting in `params` that is none.
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
        """The assistant's answer to chat messages, as /v1/chat/completions takes them.

        `chat_template_kwargs` holds further variables of the chat template, such as `tools`; without
        `add_generation_prompt` the prompt does not end with the head of the assistant's turn.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        return (params or SamplingParams()).check(self._worker.engine.info.vocab_size)

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
                    failure = WorldError(f"the answer failed: {type(error).__name__}")
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


class _Loop:
    """An event loop on a thread of its own, for callers that have none, or are in one."""

    def __init__(self) -> None:
        """Start the thread. WorldError where the interpreter ends, and starts none."""
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may ask, too
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=_THREADS, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise WorldError(f"an LLM takes a thread, and none can be started: {error}") from error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. An interrupt cancels it, and is raised again once it has cleaned up.

        InputError once the loop is closed, which cancels what runs, and in a forked process, which has no such thread.
        """
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: ended.set())

        if self._forked:
            work.close()
            raise InputError(f"the LLM is that of process {self._pid}, which this one was forked from")
        if not self._call(begin):
            work.close()
            raise _closed()
        try:
            ended.wait()
        except BaseException:
            self._call(lambda: tasks[0].cancel())  # noqa: PLW0108 - the task is born on that thread
            ended.wait()
            raise
        if tasks[0].cancelled():
            raise _closed()
        return tasks[0].result()

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel what runs, do `last`, and end the thread, also if this is interrupted. Nothing if forked.

        The garbage collector may call this on any thread. Those of an LLM do not wait for the end: it may be their own.
        """
        if self._forked:
            return
        with self._lock:  # what was called before has begun before the end does
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        ending.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if not threading.current_thread().name.startswith(_THREADS):
            self._thread.join()
            ending.result()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _call(self, function: Callable[[], object]) -> bool:
        """Has it called on the loop's thread, unless that ends: whether it is."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function)
            return not self._closed

    async def _end(self, last: Callable[[], Awaitable[None]] | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if last is not None:
            await last()


def _closed() -> InputError:
    """What is said to whoever asks a closed LLM. The interpreter closes those that nobody did, at its exit."""
    ends = "" if threading.main_thread().is_alive() else ": the interpreter ends"
    return InputError(f"the LLM is closed{ends}")


def _request(index: int, one: Any, chat_template: bool) -> TokenizeRequest:
    if isinstance(one, str):
        one = [{"text": one}]
    if isinstance(one, Mapping):
        raise InputError(f"inputs[{index}] is one item of a prompt, {_ONE_LIST_PER_PROMPT}")
    if not isinstance(one, list | tuple):
        raise InputError(f"inputs[{index}] is a {type(one).__name__}, {_ONE_LIST_PER_PROMPT}")
    return TokenizeRequest(items=list(one), chat=chat_template, folder=working_directory())
