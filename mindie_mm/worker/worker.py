"""The complete pipeline of a request, from inputs to text, with the tokenizer and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np
from tokenizers import Tokenizer

from mindie_mm.engine.requests.default_sampling import log_default_sampling, stated_end_tokens
from mindie_mm.engine.requests.engine_messages import Features, Progress
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import ContextLengthExceeded, LimitExceeded
from mindie_mm.inputs import Embeddings, Media
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.processes.fork_client import ForkClient
from mindie_mm.processes.tasks import in_thread, task_group
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.settings.environment import default_spool
from mindie_mm.settings.paths import absolute
from mindie_mm.shm import request_directory
from mindie_mm.structured.schema_check import SchemaCheck
from mindie_mm.tokenize.clips import Clips
from mindie_mm.tokenize.prompt import PlannedPrompt, Prompt, PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.stage.async_tokenizer import AsyncTokenizer
from mindie_mm.tokenize.stage.tokenizer_stage import TokenizerStage
from mindie_mm.tokenize.text.bad_words import bad_token_ids
from mindie_mm.tokenize.text.detokenizer import StopScope, load_tokenizer
from mindie_mm.tokenize.token_ids import TokenIds, prompt_of_token_ids
from mindie_mm.worker.async_engine import AsyncEngine
from mindie_mm.worker.deltas import Answer, Delta, OutputText
from mindie_mm.worker.embedding import Embedder
from mindie_mm.worker.engine_replicas import EngineReplicas
from mindie_mm.worker.lora_names import Lora, LoraNames
from mindie_mm.worker.no_engine import NoEngine
from mindie_mm.worker.preflight import check_before_loading
from mindie_mm.worker.retry import ENDS_OF_ATTEMPTS, Engine, PromptSource, Use, generated, retry_once, tokenized

if TYPE_CHECKING:
    from mindie_mm.tokenize.local import LocalTokenizer

Part = TypeVar("Part", TokenizerStage, Engine)


class Worker:
    """Tokenizer processes and one or several engine processes for one checkpoint.

    A worker is a context manager. `answer` handles a request completely. A service that spools media creates a
    directory for each request instead, and calls `tokenize` and `generate` while the directory exists.
    """

    def __init__(
        self,
        config: WorkerConfig,
        tokenizer_stage: TokenizerStage,
        engine: Engine,
        tokenizer: Tokenizer,
        forks: ForkClient | None = None,
        loras: Mapping[str, Lora] | None = None,
    ) -> None:
        """Take ownership of the parts. `loras` are the adapters that the engine has loaded, by name.

        Raises:
            UnsupportedCheckpoint: The checkpoint's files about embeddings cannot be read.

        """
        self.config = config
        self.tokenizer_stage = tokenizer_stage
        self.engine = engine
        self.tokenizer = tokenizer
        self.forks = forks
        """Fork server that forks the processes, or None."""
        self._spool = absolute(default_spool())
        has_template = bool(tokenizer_stage.traits.chat.template)
        self.embedder = Embedder.of(config, engine.info, has_template=has_template)
        self._schemas = SchemaCheck(Checkpoint.open(config.model).path, config.family)
        self.loras = LoraNames(engine, loras or {})
        """LoRA adapters that requests may use."""
        self.media_remade = 0
        """Number of media items that were preprocessed again because their blocks were freed or lost."""

    @classmethod
    async def start(
        cls,
        config: WorkerConfig,
        *,
        in_process: bool = False,
        loading: Callable[[float], object] | None = None,
        forks: ForkClient | None = None,
        only_plans: bool = False,
    ) -> Self:
        """Start the tokenizers and the engines in parallel. If one of them fails, clean up and raise its error.

        Args:
            config: Settings of the worker.
            in_process: Whether to tokenize in this process. In this case decoder processes are used only if
                `config.decoders` is not 0.
            loading: Function to call with the loaded share of the weights, from 0 to 1, while they are loaded.
            forks: Client of a fork server that has imported `mindie_mm.worker.preloading`, which forks the processes.
                The caller closes it after the worker. None means that the processes are spawned.
            only_plans: Whether the worker has no engine, and neither reads the weights nor answers prompts.

        Raises:
            UnsupportedCheckpoint, SharedMemoryError, DeviceError, InputError, ProcessDied: The tokenizers or an engine
            cannot be started.

        """
        check_before_loading(config)
        checkpoint = Checkpoint.open(config.model)
        path = checkpoint.path
        source = config.generation_config
        end_token_ids = stated_end_tokens(source)  # before processes start, so that a wrong folder fails early

        async def started(start: Coroutine[Any, Any, Part]) -> Part:
            part = await start
            parts.push_async_callback(part.close)
            return part

        async with AsyncExitStack() as parts:
            async with task_group() as group:
                start = _start_tokenizers(config, path, forks, in_process=in_process, states_sizes=only_plans)
                stage = group.create_task(started(start))
                if not only_plans:
                    launched = group.create_task(started(_start_engines(config, path, end_token_ids, loading, forks)))
            traits = stage.result().traits
            tokenizer = load_tokenizer(checkpoint, config.family, traits.shown_tokens)
            engine = NoEngine.of(config, traits.sizes) if only_plans else launched.result()
            loras = {} if only_plans else _loras(config, engine)
            worker = cls(config, stage.result(), engine, tokenizer, forks, loras)
            log_default_sampling(worker.default_sampling, source)
            parts.pop_all()
            return worker

    @property
    def only_plans(self) -> bool:
        """True if the worker has no engine."""
        return isinstance(self.engine, NoEngine)

    @property
    def default_sampling(self) -> SamplingParams:
        """Default sampling settings of requests."""
        return self.engine.info.default_sampling

    async def answer(
        self, request: TokenizeRequest | TokenIds, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        """Answer a request, and always free its shared memory."""
        async with (
            self.prompt(request, params) as source,
            aclosing(self.generate(source, params, request_id)) as deltas,
        ):
            async for delta in deltas:
                yield delta

    async def whole_answer(
        self, request: TokenizeRequest | TokenIds, params: SamplingParams, request_id: str
    ) -> Answer:
        """Return the whole answer to a request. If the weights are replaced meanwhile, the answer starts again."""
        async with self.prompt(request, params) as source:
            return await self.generate_whole(source, params, request_id)

    @asynccontextmanager
    async def prompt(self, request: TokenizeRequest | TokenIds, params: SamplingParams) -> AsyncIterator[PromptSource]:
        """Tokenize a request, and free its shared memory at exit.

        The request may be given as token ids with handle words. The caller then frees their media, and only after the
        answer is complete.
        """
        with self.loras.use(params.lora) as key:  # from here on, an adapter that is unloaded finishes the request
            await self.check_schema(params)
            if not isinstance(request, TokenizeRequest):
                source = PromptSource(prompt_of_token_ids(request))
                source.lora = key
                yield source
                return
            with request_directory(self._spool) as directory:
                request = msgspec.structs.replace(self.limited(request, params), path_file=str(directory.path_file))
                (source,) = await self.tokenize([request])
                source.lora = key
                yield source

    async def encode(self, request: TokenizeRequest, request_id: str) -> list[Embeddings]:
        """Return the features of each media item of a request, and always free its shared memory.

        The text model does not run. If the engine dies, the request is sent again, once.

        Raises:
            ContextLengthExceeded: The prompt is longer than the model's context.
            MindieMMError: The tokenizer or the engine failed.

        """
        options = replace(request.options, max_prompt_tokens=self.engine.info.max_model_len)
        with request_directory(self._spool) as directory:
            request = msgspec.structs.replace(request, path_file=str(directory.path_file), options=options)
            (source,) = await tokenized(self.tokenizer_stage, [request], self._count_remade)
            with Use(source) as use:
                while (prompt := await use.take()).spans:
                    try:
                        async with aclosing(self.engine.encode(request_id, prompt.ids)) as parts:
                            return [_embeddings(features) async for part in parts for features in part]
                    except ENDS_OF_ATTEMPTS as error:
                        use.end_attempt(error)
        return []

    def check(self) -> None:
        """Raise ProcessDied with the reason if requests cannot be answered."""
        self.engine.check()
        self.tokenizer_stage.check()

    async def check_schema(self, params: SamplingParams) -> None:
        """Raise the error of `SchemaCheck.verify` if `params` ask for a structured output that is not supported."""
        if (wanted := params.structure) is not None:
            await self._schemas.verify(wanted)

    def spelled(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the tokens of `bad_words` added to `bad_token_ids`.

        Raise InputError if a word has no tokens.
        """
        if not params.bad_words:
            return params
        return msgspec.structs.replace(
            params,
            bad_words=(),
            bad_token_ids=(*params.bad_token_ids, *bad_token_ids(self.tokenizer, params.bad_words)),
        )

    def prompt_room(self, params: SamplingParams) -> int:
        """Return the maximum number of prompt tokens. Raise ContextLengthExceeded if there is no room for a prompt."""
        info, wanted = self.engine.info, params.least_room
        left_tokens = info.max_model_len - wanted
        if info.max_output_len is not None:
            left_tokens = info.max_model_len if wanted <= info.max_output_len else 0
        if left_tokens < 1:
            raise ContextLengthExceeded.of(
                info.max_model_len,
                f"the request needs {wanted} output tokens, which leaves no room for a prompt; lower max_tokens",
            )
        return left_tokens

    def limited(
        self, request: TokenizeRequest, params: SamplingParams, truncate_to: int | None = None
    ) -> TokenizeRequest:
        """Return a copy of `request` with the cache salt and the maximum number of prompt tokens.

        The maximum is the context length minus the tokens that `params` require.

        Args:
            request: Request to tokenize.
            params: Sampling settings of the request.
            truncate_to: Number of tokens that remain of a longer prompt. If it is None, a prompt that is too long is an
                error unless `config.truncate` is set.

        Raises:
            ContextLengthExceeded: The required tokens leave no room for a prompt.

        """
        left_tokens = self.prompt_room(params)
        truncate = self.config.truncate or truncate_to is not None
        options = replace(
            request.options,
            max_prompt_tokens=min(left_tokens, truncate_to or left_tokens),
            truncate=truncate,
            cache_salt=params.cache_salt,
        )
        return msgspec.structs.replace(request, options=options)

    async def tokenize(self, requests: Sequence[TokenizeRequest]) -> list[PromptSource]:
        """Tokenize requests that have the same limits. Return their prompts, whose media are in shared memory.

        This raises the errors of `TokenizerStage.tokenize_together`.
        """
        with self._explaining(requests[0].options):
            return await tokenized(self.tokenizer_stage, requests, self._count_remade)

    async def plan(self, requests: Sequence[TokenizeRequest], *, fill: bool = False) -> list[PlannedPrompt]:
        """Return the prompts of requests that have the same limits, without preprocessing their media unless `fill`.

        This raises the errors of `TokenizerStage.plan`.
        """
        with self._explaining(requests[0].options):
            plans, _ = await retry_once(partial(self.tokenizer_stage.plan, requests, fill=fill))
            return plans

    @contextmanager
    def _explaining(self, options: PromptOptions) -> Iterator[None]:
        """Add the context length and the output tokens to the message of ContextLengthExceeded."""
        try:
            yield
        except ContextLengthExceeded as error:
            if options.truncate:  # the limit may have been set by the request
                raise
            limit = self.engine.info.max_model_len
            message = str(error)
            if wanted := limit - options.max_prompt_tokens:
                message = f"the request needs {wanted} output tokens, and the prompt does not fit in the rest: {error}"
            raise ContextLengthExceeded.of(limit, message) from error

    async def cut(self, file: Path, folder: Path, max_bytes: int, domain: tuple[bytes, str], *, always: bool) -> Clips:
        """Cut a file of speech into clips that the checkpoint accepts. `MediaStage.cut` describes the other arguments.

        If `max_bytes` is 0, the file is not decoded, and the only clip has about the length that the header states.

        Raises:
            InputError: The checkpoint does not accept audio, or the file is not speech.
            ProcessDied: Two tokenizers died.

        """
        traits = self.tokenizer_stage.traits.speech or SpeechTraits()
        speech = Media("audio", str(file), cut_s=traits.window_s if max_bytes else 0.0)
        most = min(max_bytes, self.config.arena_bytes)
        clips, _ = await retry_once(partial(self.tokenizer_stage.cut, speech, folder, most, domain, always=always))
        if clips.num_bytes > self.config.arena_bytes:
            raise LimitExceeded(
                f"the speech has {clips.num_bytes} bytes when it is decoded; the limit is {self.config.arena_bytes} "
                "(--arena-bytes)"
            )
        return clips

    def generate(
        self,
        source: PromptSource,
        params: SamplingParams,
        request_id: str,
        *,
        silent: Collection[int] | None = None,
        stop_scope: StopScope | None = None,
        written: Sequence[int] = (),
        discard: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Return a generator of the output for a prompt. If it is closed, the request is aborted.

        This raises the errors of `generated`, and the errors below.

        Args:
            source: Prompt of the request.
            params: Sampling settings.
            request_id: Unique id of the request.
            silent: Ids of the tokens that have no text. None means the special tokens.
            stop_scope: Part of the output in which stop strings have an effect. None means the whole output.
            written: Ids that follow the prompt, and that the output continues.
            discard: Function to call before the output starts again, as in `generated`.

        Raises:
            InputError: A word in `bad_words` has no tokens.
            ModelNotFound: The LoRA adapter of `params` is not loaded.

        """
        params = self.spelled(params)

        def begin() -> Callable[[Progress], Delta | None]:
            return OutputText(self.tokenizer, params, silent, stop_scope).read

        key = source.lora
        if key is None and params.lora is not None:  # rows of a dataset, whose adapter is never unloaded
            key = self.loras.get(params.lora).key
        of_engine = msgspec.structs.replace(params, lora=key)
        return generated(self.engine, source, of_engine, request_id, begin, written, discard)

    async def generate_whole(
        self,
        source: PromptSource,
        params: SamplingParams,
        request_id: str,
        *,
        silent: Collection[int] | None = None,
        stop_scope: StopScope | None = None,
        written: Sequence[int] = (),
    ) -> Answer:
        """Return the whole output for a prompt, as `generate` describes.

        If the weights are replaced meanwhile, the output starts again.
        """
        answer = Answer()

        def discard() -> None:
            nonlocal answer
            answer = Answer()

        output = self.generate(
            source, params, request_id, silent=silent, stop_scope=stop_scope, written=written, discard=discard
        )
        async with aclosing(output) as deltas:
            async for delta in deltas:
                answer.add(delta)
        return answer

    def _count_remade(self, prompt: Prompt) -> None:
        self.media_remade += len(prompt.spans)

    async def close(self) -> None:
        """End all processes. The tokenizers remove their arenas."""
        await asyncio.gather(self.engine.close(), self.tokenizer_stage.close(), self._schemas.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _embeddings(features: Features) -> Embeddings:
    array = np.frombuffer(bytearray(features.data), features.dtype)  # a bytearray, because torch warns about bytes
    return Embeddings(array.reshape(features.num_features, -1), features.grid)


async def _start_engines(
    config: WorkerConfig,
    path: Path,
    end_token_ids: tuple[int, ...] | None,
    loading: Callable[[float], object] | None,
    forks: ForkClient | None,
) -> Engine:
    source = config.generation_config
    loras = [*config.lora_folders.values()] if config.serves_loras else None
    launch = partial(
        AsyncEngine.start, path, config.engine, config.family, end_token_ids, source, forks=forks, loras=loras
    )
    if config.replicas == 1:
        return await launch(loading=loading)
    return await EngineReplicas.start(launch, config.replicas, config.engine, config.replica_surplus_tokens, loading)


def _loras(config: WorkerConfig, engine: Engine) -> dict[str, Lora]:
    """Return the adapters that the engine has loaded at its start, by name."""
    keys = engine.info.lora_keys
    return {name: Lora(name, folder, keys[str(folder)]) for name, folder in config.lora_folders.items()}


async def _start_tokenizers(
    config: WorkerConfig, path: Path, forks: ForkClient | None, *, in_process: bool, states_sizes: bool
) -> TokenizerStage:
    if not in_process:
        return await AsyncTokenizer.start(path, config, forks, states_sizes=states_sizes)
    local = await in_thread(_local_tokenizer)  # takes seconds, in which the engine starts
    return await local.start(path, config)


def _local_tokenizer() -> type[LocalTokenizer]:
    # Imported late, because it imports torch. The service process does not need torch and starts faster without it.
    from mindie_mm.tokenize.local import LocalTokenizer

    return LocalTokenizer
