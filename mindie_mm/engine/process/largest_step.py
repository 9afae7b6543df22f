"""The largest step that requests can cause, and the memory that it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import Device, upload
from mindie_mm.engine.cache.kv_cache_size import block_size, context_length
from mindie_mm.engine.decode_graphs import captures_graphs, most_blocks, most_rows
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.runner import PROMPT_ROWS
from mindie_mm.engine.sampler import sample, score
from mindie_mm.engine.towers import fetched_bytes
from mindie_mm.errors import DeviceError, MindieMMError
from mindie_mm.inputs import PROMPT, Kind, Media
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.nn.family import Plan, Processor, Write
from mindie_mm.nn.model import MediaModel, Model, Positions
from mindie_mm.nn.model_inputs import EMBEDDINGS
from mindie_mm.nn.paged_batch import Chunk, GraphBatch, PagedBatch
from mindie_mm.nn.paged_cache import PagedCache
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.splice import ItemView, MediaItem, Splice
from mindie_mm.settings.config import EngineConfig, MiB
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape

_log = logging.getLogger(__name__)
T = TypeVar("T")

_SHORT = 16
"""Number of tokens of the real step that checks the computed memory."""
_LARGE = 1024
"""Number of features above which a peak is computed for pieces of an item, because towers may have loops over windows.
If the peak of a larger piece is more than `_LINEAR` times in proportion, it is computed for the whole item."""
_LINEAR = 1.02
_MOST_LOGPROBS = 20
"""Number of log-probabilities per token in the step. A request may ask for more."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory of the largest step, or a cache."""

    name: str
    num_bytes: int
    settings: str
    """Settings that limit the part, for messages."""


@dataclass(frozen=True, slots=True)
class Step:
    """The memory of the largest step, without weights and caches."""

    parts: tuple[Part, ...]
    is_kept: bool = False
    """True if an earlier process of the engine computed the memory."""

    @classmethod
    def kept(cls, num_bytes: int | None) -> Step | None:
        """Return the step that an earlier process of the engine reported, or None if there was no such process."""
        return None if num_bytes is None else cls((Part("the largest step", num_bytes, ""),), is_kept=True)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def __str__(self) -> str:
        """Return the memory of the step and of its parts for messages."""
        taken = f"the largest step takes {mib(self.num_bytes)}"
        if self.is_kept:
            return f"{taken}, as computed when the engine first started"
        listed = ", ".join(f"{part.name}: {mib(part.num_bytes)}" for part in self.parts if part.num_bytes >= MiB)
        return f"{taken} ({listed})"


class WorstCase:
    """The largest step that requests can cause."""

    def __init__(
        self,
        model: Model | Seq2SeqModel,
        processor: Processor,
        device: Device,
        config: EngineConfig,
        ranks: Ranks = ALONE,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._processor = processor
        self._device = device
        self._config = config
        self._max_model_len = context_length(model.spec, config)

    def step(self, kinds: tuple[Kind, ...]) -> Step:
        """Return the memory of the step.

        If the device `computes_peaks`, only a short step is run, which checks the computation. Each rank must call this
        method.

        Args:
            kinds: Media kinds that the model accepts.

        Raises:
            DeviceError: A part of the step fails on one of the ranks.

        """
        # The parts add up, because a step's features exist while the decoder runs, and captured graphs keep their
        # memory.
        given = (*kinds, PROMPT) if self._model.traits.takes_prompt_embeds else kinds
        # All parts start before the first is awaited, because a device may compute several at the same time.
        started = [(*self._decoder(kinds), self._sampling()), tuple(map(self._features, given))]
        parts = [max((part() for part in group), key=lambda part: part.num_bytes) for group in started if group]
        if self._model.spec.device.type != "cpu":
            parts.append(Part("prefetched media", fetched_bytes(self._config.max_tower_bytes), "max_tower_bytes"))
        if not isinstance(self._model, Seq2SeqModel) and captures_graphs(type(self._device), self._config):
            parts.append(self._graphs(self._model))
        if self._device.computes_peaks:
            parts.append(Part("buffers of operators", self._device.scratch_bytes, "num_threads"))
            parts += self._unseen(parts)
        return Step(tuple(parts))

    def _part(
        self, name: str, works: list[Callable[[], object]], settings: str, scale: float = 1.0
    ) -> Callable[[], Part]:
        """Start `works`, and return a function that returns the part with their largest peak."""
        peaks = self._on_all(name, settings, lambda: [self._device.peak_bytes(work, scale) for work in works])
        return lambda: Part(name, self._on_all(name, settings, lambda: max(peak() for peak in peaks)), settings)

    def _on_all(self, name: str, settings: str, measure: Callable[[], T]) -> T:
        """Call a function on all ranks. If a rank fails, raise its error on all ranks."""

        def measured() -> T:
            try:
                return measure()
            except MindieMMError:
                raise
            except Exception as error:
                raise DeviceError(
                    f"{name}, which requests may cause, fails on {self._device.torch_device}: {error}. Lower {settings}"
                ) from error

        return self._ranks.run_on_all(measured)

    def _decoder(self, kinds: tuple[Kind, ...]) -> list[Callable[[], Part]]:
        most, settings = self._max_model_len, "max_model_len"
        if (
            not isinstance(self._model, Seq2SeqModel) and not self._model.traits.joins_items
        ):  # a model that does not fit this condition computes a whole prompt in one step
            most, settings = min(self._config.max_num_batched_tokens, most), "max_num_batched_tokens or max_model_len"
            if _has_bidirectional_spans(self._model):  # the last span of a step may exceed the budget
                most = min(most + max(map(self._processor.max_tokens, kinds), default=0), self._max_model_len)
        # A step that computes a whole request needs no mask, so that a slightly shorter step may need more memory.
        sizes = {most, max(1, min(most, self._max_model_len - 1))}
        name = f"a prefill of {most} tokens"
        # Steps without adapters may compute in a wider dtype, and steps with adapters have more tensors.
        adapted = (True,) if self._model.loras is None else (True, False)
        works = [self._prefill(size, with_loras=one) for size in sizes for one in adapted]
        prefill = self._part(name, works, settings)
        if isinstance(self._model, Seq2SeqModel) or not self._model.spec.state_bytes:
            return [prefill]
        # A decode step copies the states of all requests in each layer.
        rows = min(self._config.max_num_seqs, self._config.max_num_batched_tokens)
        cache = self._model.spec.allocate_cache(1, block_size(self._model.spec, self._config), 1, is_shared=True)
        name, settings = f"a decode step of {rows} requests", "max_num_seqs"
        return [prefill, self._part(name, [self._decode(self._model, cache, rows, 1)], settings)]

    def _prefill(self, num_tokens: int, *, with_loras: bool = True) -> Callable[[], object]:
        """Return a prefill of the last `num_tokens` tokens of the longest request. All tokens are media features."""
        model, spec = self._model, self._model.spec
        if isinstance(model, Seq2SeqModel):
            return partial(self._encode_prompt, model, num_tokens)
        start, stop = self._max_model_len - num_tokens, self._max_model_len
        size = block_size(spec, self._config)
        num_blocks = -(-stop // size)
        # The content of the cache does not matter, and memory for all layers may be missing.
        cache = spec.allocate_cache(num_blocks, size, num_slots=1, is_shared=True)
        features = torch.zeros(num_tokens, spec.hidden_size + spec.extra_width, dtype=spec.dtype, device=spec.device)
        span_ids = torch.zeros(stop, dtype=torch.int64) if _has_bidirectional_spans(model) else None
        return lambda: _logits(
            model,
            torch.zeros(num_tokens, dtype=torch.int64, device=spec.device),
            upload(model.positions(stop, ()).of(start, stop), spec.device),
            [Splice(np.arange(num_tokens), features)],
            PagedBatch([Chunk(start, stop, range(num_blocks), span_ids)], cache, spec.device),
            torch.arange(min(num_tokens, max(self._config.max_num_seqs, PROMPT_ROWS)), device=spec.device),
            with_loras=with_loras,
        )

    def _sampling(self) -> Callable[[], Part]:
        """Start with the memory for drawing the tokens of a step, with log-probabilities."""
        spec = self._model.spec
        rows = min(self._config.max_num_seqs, self._config.max_num_batched_tokens)
        params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, seed=0)
        request = Request(
            request_id="",
            params=params,
            token_ids=[0],
            num_prompt=1,
            items=(),
            prompt_positions=Positions(torch.zeros(1, 1, dtype=torch.int64)),
            span_ids=None,
            max_tokens=1,
            generator=torch.Generator(),
        )

        @torch.inference_mode()
        def draw() -> None:
            logits = torch.zeros(rows, spec.vocab_size, dtype=torch.float32, device=spec.device)
            raw = logits.clone()
            score(raw, sample(logits, [request] * rows, ()), _MOST_LOGPROBS)

        return self._part(f"sampling of {rows} tokens", [draw], "max_num_seqs")

    def _graphs(self, model: Model) -> Part:
        """Return the memory that captured decode steps keep in their common memory pool."""
        spec, size = model.spec, block_size(model.spec, self._config)
        most = most_rows(self._config.max_num_seqs, size)
        blocks = most_blocks(most, self._max_model_len, size)
        cache = spec.allocate_cache(1, size, num_slots=1, is_shared=True)
        name, settings = f"captured decode steps of {most} requests", "max_num_seqs, or set enforce_eager"
        work = self._decode(model, cache, most, blocks, with_loras=False)
        step = self._part(name, [work], settings)().num_bytes
        # Sizes of graphs are powers of two. All smaller graphs together need at most the memory of the largest graph,
        # and may have been captured before it.
        return Part(name, 2 * step + most * spec.vocab_size * torch.float32.itemsize, settings)

    def _unseen(self, parts: list[Part]) -> Iterator[Part]:
        """Yield memory that the computation has missed, such as copies of weights that an operator makes."""
        step = self._prefill(min(_SHORT, self._max_model_len))
        took = self._ranks.run_on_all(lambda: self._device.grown_bytes(step))
        if took > sum(part.num_bytes for part in parts):
            _log.warning(
                "a step of %d tokens took %s, which is more than computed for the largest step", _SHORT, mib(took)
            )
            yield Part("memory of operators that is not computed", took, "nothing: free memory")

    @staticmethod
    def _decode(
        model: Model, cache: PagedCache, num_rows: int, num_blocks: int, *, with_loras: bool = True
    ) -> Callable[[], object]:
        """Return a decode step like the captured steps, for `num_rows` requests of `num_blocks` KV blocks."""
        device = model.spec.device
        position = upload(model.positions(1, ()).of(0, 1), device)
        ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        table, lengths = ids[:, None].expand(-1, num_blocks), ids + num_blocks * cache.block_size
        return lambda: _logits(
            model,
            ids,
            position.repeat(1, num_rows),
            (),
            GraphBatch(cache, ids, table, lengths, [num_blocks * cache.block_size] * num_rows, ids.expand(2, -1)),
            None,
            with_loras=with_loras,
        )

    @staticmethod
    def _encode_prompt(model: Seq2SeqModel, num_tokens: int) -> None:
        """Encode a prompt of `num_tokens` media features, and decode the first token of the answer."""
        spec = model.spec
        features = torch.zeros(num_tokens, spec.hidden_size, dtype=spec.dtype, device=spec.device)
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        decoding = model.encode_prompt(ids, [Splice(np.arange(num_tokens), features)])
        model.decode(decoding, [model.rules.start_token_id])

    def _features(self, kind: Kind) -> Callable[[], Part]:
        """Start with the memory for the features of the media in one step. PROMPT stands for prompt embeddings."""
        name = "embeddings of the prompt" if kind == PROMPT else f"the tower on {kind}s"
        settings = "max_tower_tokens, max_tower_bytes or max_model_len"
        largest = self._largest_plan(kind)
        if largest is None:
            if self._ranks.number == 0:
                _log.warning(
                    "no %s fits in %d tokens, so that every request with one will be refused; raise max_model_len",
                    kind,
                    self._max_model_len,
                )
            return lambda: Part(name, 0, settings)
        plan, _ = largest
        config = self._config
        features = plan.num_features
        item_bytes = sum(spec.nbytes for spec in plan.specs.values()) + features * self._model.spec.feature_bytes
        in_view = config.max_num_seqs * self._max_model_len
        copies = max(1, min(min(config.max_tower_tokens, in_view) // features, config.max_tower_bytes // item_bytes))
        total = copies * features
        few = min(copies, 2) if self._device.computes_peaks else copies

        def part(one: tuple[Plan, Write]) -> Callable[[], Part]:
            # A computed peak grows at most in proportion to the number of equal items, from two items on.
            scale = total / (few * one[0].num_features)
            return self._part(name, [self._encode(kind, *one, few)], settings, scale)

        name = f"{name} ({total} features)"
        pieces: list[tuple[Plan, Write]] = []
        if self._device.computes_peaks and features > _LARGE:
            pieces = [self._piece(kind, largest, wanted) for wanted in (_LARGE // 4, _LARGE // 2)]
        if len({piece.num_features for piece, _ in pieces}) < 2:
            return part(largest)
        started = [part(piece) for piece in pieces]

        def whole() -> Part:
            smaller, larger = (one() for one in started)
            grows_evenly = larger.num_bytes <= _LINEAR * smaller.num_bytes
            # Ranks must agree, because a tower whose weights are shared computes on all of them together.
            return larger if self._ranks.all_reduce_min(int(grows_evenly)) else part(largest)()

        return whole

    def _piece(self, kind: Kind, whole: tuple[Plan, Write], wanted: int) -> tuple[Plan, Write]:
        """Return a plan for a piece of the largest item, with about `wanted` features.

        If there is none, return `whole`, the plan for the complete item.
        """
        worst = None if kind == PROMPT else self._largest(kind)
        return whole if worst is None else self._try_plan(kind, _cut(worst, wanted, whole[0].num_features)) or whole

    def _encode(self, kind: Kind, plan: Plan, write: Write, number: int) -> Callable[[], object]:
        arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
        write(arrays)
        token = 0 if kind == PROMPT else self._processor.placeholders[kind].token
        shape = MediaShape(kind, token, plan.num_features, plan.grid)
        # A tower only looks up arrays by name, so a dict can replace the view.
        slots, view = np.arange(plan.num_features), cast("ItemView", arrays)
        items = [MediaItem(slots, view, shape) for _ in range(number)]

        @torch.inference_mode()
        def encode() -> list[Tensor]:
            with _adapted(self._model, None):
                return self._model.features_of(items)

        return encode

    def _largest_plan(self, kind: Kind) -> tuple[Plan, Write] | None:
        if kind == PROMPT:
            shape = self._max_model_len, self._model.spec.hidden_size
            return Plan(self._max_model_len, {EMBEDDINGS: ArraySpec(shape, "float32")}, ""), lambda _: None
        worst = self._largest(kind)
        return None if worst is None else self._plan(kind, worst)

    def _largest(self, kind: Kind) -> Data | None:
        """Return the family's largest item, cut to the maximum context length. Return None if no item fits."""
        worst = self._processor.worst_case(kind)
        plan, _ = self._plan(kind, worst)
        while plan.num_features > self._max_model_len:
            shorter = _cut(worst, self._max_model_len, plan.num_features)
            cut = self._try_plan(kind, shorter)
            if cut is None or getattr(shorter, "shape", None) == getattr(worst, "shape", None):
                return None
            worst, (plan, _) = shorter, cut
        return worst

    def _plan(self, kind: Kind, data: Data) -> tuple[Plan, Write]:
        return self._processor.plan(Media(kind, data), data, {kind: 1})

    def _try_plan(self, kind: Kind, data: Data) -> tuple[Plan, Write] | None:
        try:
            return self._plan(kind, data)
        except MindieMMError:  # the family does not accept an item this short
            return None


def _has_bidirectional_spans(model: MediaModel) -> bool:
    """Return whether the family has spans of tokens with bidirectional attention."""
    return isinstance(model, Model) and type(model).bidirectional_spans is not Model.bidirectional_spans


@torch.inference_mode()
def _logits(model: Model, ids: Tensor, *batch: Any, with_loras: bool = True) -> Tensor:
    with _adapted(model, len(ids)) if with_loras else nullcontext():
        states = model.states(ids, *batch)
    with _adapted(model, len(states)) if with_loras else nullcontext():
        return model.head(states)


def _adapted(model: MediaModel, num_rows: int | None) -> AbstractContextManager[None]:
    """Apply the LoRA adapter that takes the most memory inside the context, if adapters are enabled."""
    return nullcontext() if model.loras is None else model.loras.largest(num_rows, model.spec.device)


def _cut(data: Data, wanted: int, num_features: int) -> Data:
    """Cut an item of `num_features` features to about `wanted` features. Keep its first frames, rows or samples."""
    if not isinstance(data, np.ndarray):
        return data
    if data.ndim > 3 and len(data) == 1:  # cut the rows of a single frame
        return data[:, : max(1, data.shape[1] * wanted // num_features)]
    return data[: max(1, len(data) * wanted // num_features)]


def mib(num_bytes: int) -> str:
    return f"{num_bytes / MiB:.0f} MiB"
