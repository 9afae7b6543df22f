"""The size of the KV cache. It is measured by running the model's worst case before the cache is allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mindie_mm.device import Device, upload
from mindie_mm.engine.cache.kv_cache_size import MORE_ROOM, block_size, context_length, useful_bytes
from mindie_mm.engine.decode_graphs import captures_graphs, most_blocks, most_rows
from mindie_mm.engine.process.trials import Trial, Trials, mib
from mindie_mm.engine.ranks import ALONE, Ranks
from mindie_mm.engine.runner import PROMPT_ROWS
from mindie_mm.engine.towers import fetched_bytes
from mindie_mm.errors import DeviceError, MindieMMError
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.nn.family import Plan, Processor
from mindie_mm.nn.model import MediaModel, Model
from mindie_mm.nn.paged_batch import Chunk, GraphBatch, PagedBatch, PagedCache
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.splice import ItemView, MediaItem, MediaShape, Splice
from mindie_mm.settings.config import EngineConfig

_log = logging.getLogger(__name__)

_PARTS = (1024, 256, 64, 16, 4, 1)
"""Divisors of the size of the worst case. The trials use them in this order."""


def kv_cache_bytes(
    model: Model | Seq2SeqModel,
    processor: Processor,
    kinds: tuple[Kind, ...],
    device: Device,
    config: EngineConfig,
    ranks: Ranks = ALONE,
    num_engines: int = 1,
) -> int:
    """Return the size in bytes of this rank's KV cache.

    The size is `config.kv_cache_bytes` if that is set. Otherwise it is the memory that `memory_share` allows, minus the
    memory of the largest step and of the encoder cache. It never exceeds the size that all sequences at full length
    use. Ranks and engines on CPUs divide the host's memory equally.

    Args:
        model: Loaded model.
        processor: Processor of the model's family, which supplies the largest media.
        kinds: Media kinds that the model accepts.
        device: Device of the model.
        config: Settings of the engine.
        ranks: All ranks of the engine. Each of them must call this function.
        num_engines: Number of engines of the service that are being started, and still need memory.

    Raises:
        DeviceError: No memory is left, `config.kv_cache_bytes` does not fit, or running the worst case fails.

    """
    spec = model.spec
    block_bytes = block_size(spec, config) * spec.kv_token_bytes
    useful = useful_bytes(model, config)
    worst = WorstCase(model, processor, device, config, ranks)
    taken = worst.num_bytes(kinds)
    divided = num_engines > 1 and spec.device.type == "cpu"
    each, fewer = (f" for each of {num_engines} engines", ", or lower replicas") if divided else ("", "")
    free = device.free_bytes() // (ranks.count * num_engines if spec.device.type == "cpu" else 1)
    share = config.memory_share or device.memory_share
    says = (
        f"{spec.device} has {mib(free)} free{each} after loading the weights; the largest step takes {mib(taken)}; "
        f"the encoder cache takes {mib(config.encoder_cache_bytes)}"
    )
    if config.kv_cache_bytes is not None:
        asked = min(config.kv_cache_bytes, useful)
        if asked + taken + config.encoder_cache_bytes > free:
            raise DeviceError(
                f"kv_cache_bytes of {mib(asked)} does not fit: {says}. Lower kv_cache_bytes, encoder_cache_bytes, "
                f"or a limit of the largest step, such as max_num_batched_tokens{fewer}"
            )
        _log.info("%s; the KV cache takes %s (kv_cache_bytes)", says, mib(asked))
        return asked
    left = int(free * share) - taken - config.encoder_cache_bytes
    # A decode step copies one layer of the sequences' KV cache. Padding at most doubles the size of the copy.
    left -= 2 * left // (spec.num_layers + 2)
    if left < block_bytes:
        raise DeviceError(f"no memory is left for the KV cache: {says}; memory_share is {share:g}. {MORE_ROOM}{fewer}")
    _log.info(
        "%s; the KV cache takes %s of the %s that memory_share %g leaves",
        says,
        mib(min(left, useful)),
        mib(left),
        share,
    )
    return min(left, useful)


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
        self._trials = Trials(device, ranks)
        self._config = config
        self._max_model_len = context_length(model.spec, config)

    def num_bytes(self, kinds: tuple[Kind, ...]) -> int:
        """Return the memory in bytes that the step uses, without weights and caches. It is 0 if `measure_s` is 0."""
        seconds = self._device.measure_s if self._config.measure_s is None else self._config.measure_s
        if not seconds:
            return 0
        model, device = self._model, type(self._device)
        captured = not isinstance(model, Seq2SeqModel) and captures_graphs(device, self._config, self._ranks)
        seconds /= 1 + len(kinds) + captured
        decoder = self._decoder_bytes(kinds, seconds)
        # Add these sizes, because a step's features exist while the decoder runs, and captured graphs keep their
        # memory.
        towers = max((self._tower_bytes(kind, seconds) for kind in kinds), default=0)
        fetched = 0 if model.spec.device.type == "cpu" else fetched_bytes(self._config.max_tower_bytes)
        return decoder + towers + fetched + (self._graph_bytes(cast("Model", model), seconds) if captured else 0)

    def _decoder_bytes(self, kinds: tuple[Kind, ...], seconds: float) -> int:
        most = self._max_model_len
        if (
            not isinstance(self._model, Seq2SeqModel) and not self._model.traits.joins_items
        ):  # a model that does not fit this condition computes a whole prompt in one step
            most = min(self._config.max_num_batched_tokens, most)
            if _has_bidirectional_spans(self._model):  # the last span of a step may exceed the budget
                most = min(most + max(map(self._processor.max_tokens, kinds), default=0), self._max_model_len)
        sizes = [-(-most // part) for part in _PARTS]
        return self._trials.measure(
            "a prefill", "tokens", (Trial(n, partial(self._prefill, n)) for n in sizes), most, seconds
        )

    def _prefill(self, num_tokens: int) -> Callable[[], object]:
        """Return a prefill of the last `num_tokens` tokens of the longest sequence. All tokens are media features."""
        model, spec = self._model, self._model.spec
        if isinstance(model, Seq2SeqModel):
            return partial(self._encode_prompt, model, num_tokens)
        start, stop = self._max_model_len - num_tokens, self._max_model_len
        size = block_size(spec, self._config)
        num_blocks = -(-stop // size)
        # All layers share the memory of one layer. Its content does not matter, and memory for all layers may be
        # missing.
        layer = spec.allocate_cache(num_blocks, size, num_layers=1)
        cache = PagedCache(layer.keys * spec.num_layers, layer.values * spec.num_layers, layer.block_size)
        features = torch.zeros(num_tokens, spec.hidden_size + spec.extra_width, dtype=spec.dtype, device=spec.device)
        span_ids = torch.zeros(stop, dtype=torch.int64) if _has_bidirectional_spans(model) else None
        return lambda: _logits(
            model,
            torch.zeros(num_tokens, dtype=torch.int64, device=spec.device),
            upload(model.positions(stop, ()).of(start, stop), spec.device),
            [Splice(np.arange(num_tokens), features)],
            PagedBatch([Chunk(start, stop, range(num_blocks), span_ids)], cache, spec.device),
            torch.arange(min(num_tokens, max(self._config.max_num_seqs, PROMPT_ROWS)), device=spec.device),
        )

    def _graph_bytes(self, model: Model, seconds: float) -> int:
        """Return the memory in bytes that captured decode steps keep in their common memory pool."""
        spec, size = model.spec, block_size(model.spec, self._config)
        most = most_rows(self._config.max_num_seqs, size)
        blocks = most_blocks(most, self._max_model_len, size)
        cache = spec.allocate_cache(1, size, num_layers=1)
        cache = PagedCache(cache.keys * spec.num_layers, cache.values * spec.num_layers, size)
        sizes = [-(-most // part) for part in _PARTS]
        trials = (Trial(n, partial(self._decode, model, cache, n, blocks)) for n in sizes)
        step = self._trials.measure("a decode step", "rows", trials, most, seconds)
        # Sizes of graphs are powers of two. All smaller graphs together need at most the memory of the largest graph,
        # and may have been captured before it.
        return 2 * step + most * spec.vocab_size * torch.float32.itemsize

    @staticmethod
    def _decode(model: Model, cache: PagedCache, num_rows: int, num_blocks: int) -> Callable[[], object]:
        """Return a decode step like the captured steps, for `num_rows` sequences of `num_blocks` KV blocks."""
        device = model.spec.device
        position = upload(model.positions(1, ()).of(0, 1), device)
        ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        table, lengths = ids[:, None].expand(-1, num_blocks), ids + num_blocks * cache.block_size
        return lambda: _logits(
            model, ids, position.repeat(1, num_rows), (), GraphBatch(cache, ids, table, lengths), None
        )

    @staticmethod
    def _encode_prompt(model: Seq2SeqModel, num_tokens: int) -> None:
        """Encode a prompt of `num_tokens` media features, and decode the first token of the answer."""
        spec = model.spec
        features = torch.zeros(num_tokens, spec.hidden_size, dtype=spec.dtype, device=spec.device)
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        decoding = model.encode_prompt(ids, [Splice(np.arange(num_tokens), features)])
        model.decode(decoding, [model.rules.start_token_id])

    def _tower_bytes(self, kind: Kind, seconds: float) -> int:
        worst = self._largest(kind)
        if worst is None:
            return 0
        plan, config = self._plan(kind, worst), self._config
        features = plan.num_features
        item_bytes = sum(spec.nbytes for spec in plan.specs.values()) + features * self._model.spec.feature_bytes
        in_view = config.max_num_seqs * self._max_model_len
        copies = max(1, min(min(config.max_tower_tokens, in_view) // features, config.max_tower_bytes // item_bytes))
        trials = self._tower_trials(kind, worst, copies * features)
        return self._trials.measure(f"the tower on {kind}s", "features", trials, copies * features, seconds)

    def _tower_trials(self, kind: Kind, worst: Data, most: int) -> Iterator[Trial]:
        """Yield trials of increasing size, with several worst-case items or with a part of an item."""
        whole = self._plan(kind, worst)
        for part in _PARTS:
            number = most // part // whole.num_features
            plan = whole if number else self._try_plan(kind, _cut(worst, most // part, whole.num_features))
            if plan is not None:
                yield Trial(max(1, number) * plan.num_features, partial(self._encode, kind, plan, max(1, number)))

    def _encode(self, kind: Kind, plan: Plan, number: int) -> Callable[[], object]:
        arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
        plan.write(arrays)
        shape = MediaShape(kind, self._processor.placeholders[kind].token, plan.num_features, plan.grid)
        # A tower only looks up arrays by name, so a dict can replace the view.
        slots, view = np.arange(plan.num_features), cast("ItemView", arrays)
        items = [MediaItem(slots, view, shape) for _ in range(number)]
        return torch.inference_mode()(lambda: self._model.tower(items))

    def _largest(self, kind: Kind) -> Data | None:
        """Return the family's largest item, cut to the maximum context length. Return None if no item fits."""
        worst = self._processor.worst_case(kind)
        plan = self._plan(kind, worst)
        while plan.num_features > self._max_model_len:
            shorter = _cut(worst, self._max_model_len, plan.num_features)
            cut = self._try_plan(kind, shorter)
            if cut is None or getattr(shorter, "shape", None) == getattr(worst, "shape", None):
                return None
            worst, plan = shorter, cut
        return worst

    def _plan(self, kind: Kind, data: Data) -> Plan:
        return self._processor.plan(Media(kind, data), data, {kind: 1})

    def _try_plan(self, kind: Kind, data: Data) -> Plan | None:
        try:
            return self._plan(kind, data)
        except MindieMMError:  # the family does not accept an item this short
            return None


def _has_bidirectional_spans(model: MediaModel) -> bool:
    """Return whether the family has spans of tokens with bidirectional attention."""
    return isinstance(model, Model) and type(model).bidirectional_spans is not Model.bidirectional_spans


@torch.inference_mode()
def _logits(model: Model, *batch: Any) -> Tensor:
    return model.head(model.states(*batch))


def _cut(data: Data, wanted: int, num_features: int) -> Data:
    """Cut an item of `num_features` features to about `wanted` features. Keep its first frames, rows or samples."""
    if not isinstance(data, np.ndarray):
        return data
    if data.ndim > 3 and len(data) == 1:  # cut the rows of a single frame
        return data[:, : max(1, data.shape[1] * wanted // num_features)]
    return data[: max(1, len(data) * wanted // num_features)]
