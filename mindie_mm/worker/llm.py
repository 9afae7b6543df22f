"""A worker for scripts. Example: `LLM().generate([[{"image": path}, {"text": question}]])`."""

from __future__ import annotations

import asyncio
import sys
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.engine.requests.engine_messages import FinishReason, Timings, TokenLogprob
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import ArenaFull, InputError, MindieMMError, OperationalError
from mindie_mm.inputs import Embeddings, require_switches, type_of
from mindie_mm.nn.checkpoint.hub import downloaded, repository_name
from mindie_mm.processes.loop_thread import LoopThread
from mindie_mm.processes.progress import loading_shown
from mindie_mm.settings.config import WorkerConfig, lora_name
from mindie_mm.settings.limits import PromptLimits
from mindie_mm.settings.paths import absolute, working_directory
from mindie_mm.tokenize.requests import TokenizeRequest, request_of_items, request_of_messages
from mindie_mm.worker.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from mindie_mm.worker.deltas import Answer, Delta
from mindie_mm.worker.embedding import PoolingParams
from mindie_mm.worker.llm_arguments import Lora, Params, Parse, pairs_of, params_of, request_of, requests_of, with_loras
from mindie_mm.worker.scoring import Scorer
from mindie_mm.worker.worker import Worker

T = TypeVar("T")
OnError = Literal["raise", "return"]


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


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one input."""

    embedding: NDArray[np.float32]
    """float32 [dimensions]. Empty if `error` is set."""
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that were in the prefix cache."""
    timings: Timings | None = None
    error: MindieMMError | None = None
    """Error of this input, if `on_error` is "return"."""


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The score of a pair of a query and a document."""

    score: float
    num_prompt_tokens: int
    """Number of tokens of the pair's prompts."""


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
        download: bool = False,
        loras: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Start a worker.

        This method raises the same errors as `Worker.start`.

        Args:
            path: Checkpoint directory, or the name of a repository on the Hugging Face Hub, of which the revision
                `config.revision` is used. If it is None, `config.model` or the embedded checkpoint is used.
            config: Settings of the worker, or None for defaults.
            family: Family of the checkpoint, by default `config.family`.
            decoders: Number of processes that decode the items of a prompt in parallel, by default `config.decoders`.
                If both are 0, a thread of this process decodes.
            limit_mm_per_prompt: Maximum number of items in one prompt, such as {"image": 4, "video": 1}, by default
                `config.limit_mm_per_prompt`.
            download: Whether to download the files of a repository that the Hugging Face cache lacks, by default
                `config.download`.
            loras: Folders of LoRA adapters by name, in addition to `config.lora`. The argument `lora` of other methods
                selects one of them.

        """
        config = WorkerConfig() if config is None else config
        if not isinstance(config, WorkerConfig):
            raise InputError(f"config is {type_of(config)}; it must be a WorkerConfig")
        given: dict[str, Any] = {"family": family, "limit_mm_per_prompt": limit_mm_per_prompt}
        given |= {"model": None if path is None else absolute(path)}
        if not isinstance(loras, Mapping | None):
            raise InputError(f"loras is {type_of(loras)}; it must be a dict from names to folders")
        adapters = tuple(f"{lora_name(name)}={absolute(folder)}" for name, folder in (loras or {}).items())
        given |= {"lora": (*config.lora, *adapters) if adapters else None}
        given |= {"decoders": None if type(decoders) is int and decoders == 0 else decoders}
        config = replace(config, **{name: value for name, value in given.items() if value is not None})
        if config.model is not None and (name := repository_name(config.model)) is not None:
            agrees = (lambda _: True) if download or config.download else None
            config = replace(config, model=downloaded(name, config.revision, agrees))
        self._loop = LoopThread("LLM")
        try:
            # A terminal shows how much is loaded. The standard error of other scripts is theirs.
            with loading_shown() if sys.stderr.isatty() else nullcontext() as loading:
                self._worker = self._loop.run(Worker.start(config, in_process=True, loading=loading))
        except BaseException:
            self._loop.close()
            raise
        self.close = weakref.finalize(self, self._loop.close, self._worker.close)
        """Function that ends the worker. It may be called repeatedly. Pending and later calls to other methods raise
        InputError.

        In a forked process, this function does nothing, and all other methods raise InputError.
        """

    def generate(
        self,
        inputs: Any,
        params: Params | None = None,
        *,
        chat_template: bool = True,
        parse_special: bool | None = None,
        webui: bool = False,
        on_error: OnError = "raise",
        lora: Lora = None,
    ) -> list[Output]:
        """Generate an output for each input. Inputs are batched, and an input that fails does not affect other inputs.

        Args:
            inputs: A list of texts, lists of items (`List[Dict]`), or token ids with handle words, as `Tokenizer`
                returns them in any process of this user: an int64 tensor, an array or a list of integers. A single
                input need not be in a list. Tuples are treated as lists. The media of token ids belong to the caller,
                who releases their path file after this call. If they were released earlier, the input fails with a
                BadReference.
            params: Sampling settings, or a list with the settings of each input. By default, those of
                `get_default_sampling_params`.
            chat_template: Whether to format each input as one user turn with the checkpoint's chat template. Token ids
                are not changed.
            parse_special: Whether the spelling of a control token in a text, such as `<|im_start|>`, becomes the token,
                except for tokens of media items. If not, it is encoded as plain text, as with a template. By default,
                the setting `WorkerConfig.parse_special`. True requires `chat_template=False`.
            webui: Whether texts may contain images in the format of text-generation-webui, `<img
                src="data:image/jpeg;base64,...">`.
            on_error: "raise" raises the first error after all inputs are done. "return" stores the error of an input in
                its `Output`.
            lora: Name of the LoRA adapter that computes the outputs, or a list with a name or None for each input. None
                means the adapter in `params`, or else the model alone.

        Returns:
            One output per input, in order.

        Raises:
            InputError: `inputs` is neither an input nor a list of inputs, `params` has another length, or a setting in
                `params` is invalid. This is raised before any input is run.

        """
        requests = requests_of("inputs", inputs, chat_template, parse_special, webui)
        return self._outputs(requests, params, on_error, lora)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        *,
        chat_template: bool = True,
        parse_special: bool | None = None,
        webui: bool = False,
        lora: str | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most likely outputs for each prompt. Prompts are batched.

        Args:
            prompts: A prompt or a list of prompts, as in `generate`.
            params: Settings of the beam search.
            chat_template: Whether to format each prompt as one user turn with the checkpoint's chat template.
            parse_special: Same as in `generate`.
            webui: Same as in `generate`.
            lora: Name of the LoRA adapter that computes the outputs, or None for the model alone.

        Returns:
            The outputs for each prompt, in order.

        Raises:
            InputError: `prompts` is neither a prompt nor a list of prompts, a setting in `params` is invalid, or the
                model is an encoder-decoder.
            MindieMMError: A prompt failed. The first error is raised after all prompts are done.

        """
        if not isinstance(params, BeamSearchParams):
            raise InputError(f"params is {type_of(params)}; it must be BeamSearchParams")
        checked = params.sampling_params(self._worker.engine.info.vocab_size)
        (checked,) = with_loras([checked], lora)
        width, length_penalty = params.beam_width, params.length_penalty

        async def search(parse: Parse) -> BeamSearchOutput:
            async with self._worker.prompt(parse(), checked) as source:
                found = beam_search(self._worker, source, checked, width, length_penalty, uuid.uuid4().hex)
                return BeamSearchOutput(await found)

        requests = requests_of("prompts", prompts, chat_template, parse_special, webui)
        return _successful(self._run([partial(search, request) for request in requests]))

    def stream(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        chat_template: bool = True,
        parse_special: bool | None = None,
        webui: bool = False,
        lora: str | None = None,
    ) -> Generator[Delta, None, None]:
        """Yield the output for one prompt in parts, as the engine generates it.

        Generation starts with the first part. If the iterator is closed or garbage-collected earlier than the last
        part, generation is aborted.

        Args:
            prompt: A string, a list of items or token ids, as in `generate`.
            params: Sampling settings. By default, those of `get_default_sampling_params`.
            chat_template: Same as in `generate`.
            parse_special: Same as in `generate`.
            webui: Same as in `generate`.
            lora: Name of the LoRA adapter that computes the output. None means the adapter in `params`, or else the
                model alone.

        Raises:
            InputError: `prompt` is not a prompt, or a setting in `params` is invalid.
            MindieMMError: The prompt failed. This is raised by the iterator.

        """
        parse = request_of("prompt", prompt, chat_template, parse_special, webui)
        (checked,) = with_loras(self._checked(params, 1), lora)
        return self._parts(lambda: self._worker.answer(parse(), checked, uuid.uuid4().hex))

    @overload
    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: Params | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        webui: bool = False,
        on_error: OnError = "raise",
        lora: Lora = None,
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[dict[str, Any]]],
        params: Params | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        webui: bool = False,
        on_error: OnError = "raise",
        lora: Lora = None,
    ) -> list[Output]: ...

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: Params | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        webui: bool = False,
        on_error: OnError = "raise",
        lora: Lora = None,
    ) -> Output | list[Output]:
        """Return the assistant's answer to a conversation, or to each of several conversations.

        Args:
            messages: Messages of the conversation, in the format of /v1/chat/completions, or a list of conversations.
                Conversations are batched, and a conversation that fails does not affect the others.
            params: Sampling settings, or a list with the settings of each conversation. By default, those of
                `get_default_sampling_params`.
            add_generation_prompt: Whether the prompt ends with the header of the assistant's turn.
            continue_final_message: Whether the last message is continued instead of answered. No header is added.
            chat_template_kwargs: Additional variables of the chat template, such as `tools`.
            webui: Same as in `generate`.
            on_error: Same as in `generate`.
            lora: Same as in `generate`, with a name for each conversation.

        Returns:
            An output if `messages` is one conversation, or a list of outputs, in order, for a list of conversations.

        """
        if not isinstance(messages, list | tuple):
            raise InputError(f"messages is {type_of(messages)}; it must be a list of messages or conversations")
        require_switches(
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, webui=webui
        )
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise InputError(f"chat_template_kwargs is {type_of(chat_template_kwargs)}; it must be a dict")
        several = len(messages) > 0 and isinstance(messages[0], list | tuple)
        requests: list[Parse] = [
            partial(
                request_of_messages,
                cast("list[dict[str, Any]]", conversation),
                folder=working_directory(),
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template_kwargs=dict(chat_template_kwargs or {}),
                webui=webui,
            )
            for conversation in (messages if several else [messages])
        ]
        outputs = self._outputs(requests, params, on_error, lora)
        return outputs if several else outputs[0]

    def encode(self, items: Sequence[Any]) -> list[Embeddings]:
        """Return the features and the grid of each image, video and audio clip among the items of one prompt.

        Only the model's tower runs. `{"image_embeds": features}` then takes the place of `{"image": ...}` in any call,
        with the same result. If a family treats several images in a prompt differently from a single one, encode them
        together.

        Args:
            items: Items as in `generate`. Texts are skipped.

        Returns:
            Features in the order of the items, one per page for a document. Those of a bfloat16 model are float32.

        Raises:
            InputError: An item is invalid, or the items do not fit in the context together.
            ArenaFull: Requests of other threads use the shared memory.

        """
        if not isinstance(items, list | tuple):
            raise InputError(f"items is {type_of(items)}; it must be a list, such as [{{'image': path}}]")
        media = [item for item in items if not (isinstance(item, Mapping) and "text" in item)]
        if not media:
            return []
        request = request_of_items(media, chat=False)
        return self._loop.run(self._worker.encode(request, uuid.uuid4().hex))

    def embed(
        self,
        prompts: Any,
        params: PoolingParams | None = None,
        *,
        chat_template: bool | None = None,
        parse_special: bool | None = None,
        on_error: OnError = "raise",
        lora: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Compute the embedding of each prompt. Prompts are batched.

        The checkpoint's files for sentence-transformers (modules.json) specify which hidden states become the
        embedding, and `WorkerConfig.pooling` overrides this. The results equal those of sentence-transformers.

        Args:
            prompts: A prompt or a list of prompts, as in `generate`.
            params: Settings of the embeddings.
            chat_template: Whether to format each prompt as one user turn with the checkpoint's chat template. None
                means that the checkpoint's files decide, as in sentence-transformers: if they describe an embedding
                model with a chat template, it is used.
            parse_special: Same as in `generate`.
            on_error: Same as in `generate`.
            lora: Name of the LoRA adapter that computes the embeddings, or None for the model alone.

        Returns:
            One embedding per prompt, in order.

        Raises:
            InputError: The checkpoint does not compute embeddings, `prompts` is neither a prompt nor a list of prompts,
                or a setting in `params` is invalid.

        """
        embedder = self._worker.embedder
        (sampling,) = with_loras([embedder.sampling_params()], lora)
        checked = embedder.check(PoolingParams() if params is None else params)
        if chat_template is not None:
            require_switches(chat_template=chat_template)
            embedder = replace(embedder, chat=chat_template)

        async def embed(parse: Parse) -> EmbeddingOutput:
            request = parse()
            if isinstance(request, TokenizeRequest):
                options = request.options
                request = embedder.request(request.items or (), checked.prompt_name)
                request = msgspec.structs.replace(request, options=options)
            async with self._worker.prompt(request, sampling) as source:
                embedder.check_length(source.prompt)
                answer = await self._worker.generate_whole(source, sampling, uuid.uuid4().hex)
            embedding = embedder.embedding(answer.pooled, checked)
            return EmbeddingOutput(embedding, len(source.prompt), answer.cached_tokens, answer.timings)

        _require_on_error(on_error)
        requests = requests_of("prompts", prompts, chat_template is not False, parse_special, webui=False)
        outputs = self._run([partial(embed, request) for request in requests])
        if on_error == "raise":
            return _successful(outputs)
        return [
            EmbeddingOutput(np.zeros(0, np.float32), error=one) if isinstance(one, MindieMMError) else one
            for one in outputs
        ]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        *,
        instruction: str | None = None,
        use_activation: bool | None = None,
        lora: str | None = None,
    ) -> list[ScoreOutput]:
        """Score pairs of a query and a document. Pairs are batched.

        A reranker gets a prompt for each pair, in the chat template that its files for sentence-transformers name, and
        the score is that of their module LogitScore. With an embedding model, the score is the cosine of the
        embeddings.

        Args:
            data_1: A query or a list of queries. A query is a string, or a list of items (`List[Dict]`).
            data_2: A document or a list of documents. There must be one query, or one for each document.
            instruction: Instruction in place of the checkpoint's own.
            use_activation: Whether the score of a reranker is the sigmoid of the difference of logits. None means the
                checkpoint's own setting.
            lora: Name of the LoRA adapter that computes the scores, or None for the model alone.

        Returns:
            One score per document, in order.

        Raises:
            InputError: The checkpoint computes no scores, an argument has a wrong type, or the numbers of queries and
                documents do not fit together.
            MindieMMError: A pair failed. The first error is raised after all pairs are done.

        """
        scorer = Scorer(self._worker.embedder)
        (sampling,) = with_loras([scorer.sampling_params()], lora)
        if not isinstance(instruction, str | None):
            raise InputError(f"instruction is {type_of(instruction)}; it must be a string")
        if use_activation is not None:
            require_switches(use_activation=use_activation)
        requests, indices = scorer.requests(pairs_of(data_1, data_2), instruction)

        async def answer(request: TokenizeRequest) -> tuple[Answer, int]:
            async with self._worker.prompt(request, sampling) as source:
                scorer.embedder.check_length(source.prompt)
                found = await self._worker.generate_whole(source, sampling, uuid.uuid4().hex)
            return found, len(source.prompt)

        found = _successful(self._run([partial(answer, request) for request in requests]))
        return [
            ScoreOutput(
                scorer.score((found[a][0], found[b][0]), use_activation), sum(found[place][1] for place in {a, b})
            )
            for a, b in indices
        ]

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

    def _checked(self, params: Params | None, num_inputs: int) -> list[SamplingParams]:
        default = self._worker.default_sampling
        return params_of(default if params is None else params, num_inputs, self._worker.engine.info.vocab_size)

    def _outputs(self, requests: Sequence[Parse], params: Params | None, on_error: OnError, lora: Lora) -> list[Output]:
        _require_on_error(on_error)
        checked = with_loras(self._checked(params, len(requests)), lora)
        outputs = self._run([partial(self._answer, *one) for one in zip(requests, checked, strict=True)])
        if on_error == "raise":
            return _successful(outputs)
        return [Output("", [], None, error=one) if isinstance(one, MindieMMError) else one for one in outputs]

    def _run(self, answers: Sequence[Callable[[], Awaitable[T]]]) -> list[T | MindieMMError]:
        """Return the result or the error of each answer."""
        return self._loop.run(self._run_all(answers))

    async def _run_all(self, answers: Sequence[Callable[[], Awaitable[T]]]) -> list[T | MindieMMError]:
        # Submit only as many inputs as the engine can run, because media of other inputs would only fill the arena.
        places = asyncio.Semaphore(self._worker.config.engine.max_num_seqs)
        running = 0

        async def one(answer: Callable[[], Awaitable[T]]) -> T | MindieMMError:
            nonlocal running
            async with places:
                running += 1
                try:
                    while True:
                        try:
                            return await answer()
                        except ArenaFull:
                            if running == 1:  # no other input can free memory of the arena
                                raise
                except MindieMMError as error:
                    return error
                except Exception as error:  # noqa: BLE001 - one input fails, not all
                    failure = OperationalError(f"the request failed: {type(error).__name__}")
                    failure.__cause__ = error
                    return failure
                finally:
                    running -= 1

        async with asyncio.TaskGroup() as group:
            outputs = [group.create_task(one(answer)) for answer in answers]
        return [output.result() for output in outputs]

    def _parts(self, deltas: Callable[[], AsyncGenerator[Delta, None]]) -> Generator[Delta, None, None]:
        yield from self._loop.iterate(deltas())  # in a method, so that the iterator keeps this LLM from being collected

    async def _answer(self, parse: Parse, params: SamplingParams) -> Output:
        answer = await self._worker.whole_answer(parse(), params, uuid.uuid4().hex)
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


def _require_on_error(on_error: Any) -> None:
    if not isinstance(on_error, str) or on_error not in get_args(OnError):
        raise InputError(f"on_error={on_error!r} must be 'raise' or 'return'")


def _successful(outputs: Sequence[T | MindieMMError]) -> list[T]:
    """Return `outputs`. If there are errors among them, raise the first one."""
    found: list[T] = []
    for output in outputs:
        if isinstance(output, MindieMMError):
            raise output
        found.append(output)
    return found
