"""Tests for paged attention in a flat batch, against ordinary attention of each sequence alone."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.nn.attention import CHUNKED, attend, chunk_size_of
from mindie_mm.nn.paged_batch import Chunk, GraphBatch, PagedBatch
from mindie_mm.nn.paged_cache import KVLayer, PagedCache

HEADS, HEAD_DIM, BLOCK = 6, 16, 4
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    layer_idx = 0


class ChunkedLayer(Layer):
    config = SimpleNamespace(layer_types=[CHUNKED], attention_chunk_size=8)


def reference(query, key, value, window=None, span_ids=None, chunk_size=None):
    """Compute the attention of one whole sequence. The tensors have shape [heads, T, head_dim]."""
    length = query.shape[1]
    at, to = torch.arange(length)[:, None], torch.arange(length)
    mask = to <= at
    if span_ids is not None:
        mask = mask | ((span_ids[:, None] == span_ids) & (span_ids >= 0))
    if window is not None:
        mask = mask & (to > at - window)
    if chunk_size is not None:
        mask = mask & (to // chunk_size == at // chunk_size)
    key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], 0) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def chunks_of(lengths, generator):
    """Yield the borders of random chunks for each sequence. The last tokens come one by one, as in decoding."""
    for length in lengths:
        cut, cuts = 0, [0]
        while cut < length - 3:
            cut = min(length - 3, cut + int(torch.randint(1, 9, (), generator=generator)))
            cuts.append(cut)
        yield [*cuts, *range(cut + 1, length + 1)]


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(("layer", "window"), [(Layer(), None), (Layer(), 5), (ChunkedLayer(), None)])
def test_chunks_and_decodes_equal_whole_sequences(kv_heads, layer, window):
    generator = torch.Generator().manual_seed(kv_heads)
    lengths = [5, 23, 12, 37, 4]
    query = [torch.randn(HEADS, n, HEAD_DIM, generator=generator) for n in lengths]
    key = [torch.randn(kv_heads, n, HEAD_DIM, generator=generator) for n in lengths]
    value = [torch.randn(kv_heads, n, HEAD_DIM, generator=generator) for n in lengths]
    size = chunk_size_of(layer)
    expected = [reference(*parts, window, None, size) for parts in zip(query, key, value, strict=True)]

    cache = PagedCache.allocate(
        [KVLayer(kv_heads, HEAD_DIM)],
        num_blocks=64,
        block_size=BLOCK,
        dtype=torch.float32,
        device=CPU,
    )
    order = torch.randperm(64, generator=generator).tolist()
    blocks = [[order.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
    pending = list(chunks_of(lengths, generator))
    while any(len(cuts) > 1 for cuts in pending):
        step = [(i, cuts[0], cuts[1]) for i, cuts in enumerate(pending) if len(cuts) > 1]
        for i, *_ in step:
            pending[i].pop(0)
        chunks = [Chunk(start, stop, blocks[i]) for i, start, stop in step]
        flat = [
            torch.cat([source[i][:, start:stop] for i, start, stop in step], dim=1)[None]
            for source in (query, key, value)
        ]
        batch = PagedBatch(chunks, cache, CPU)
        out, _ = attend(layer, *flat, None, scaling=HEAD_DIM**-0.5, paged=batch, sliding_window=window)
        row = 0
        for i, start, stop in step:
            torch.testing.assert_close(
                out[0, row : row + stop - start].transpose(0, 1), expected[i][:, start:stop], rtol=1e-5, atol=1e-5
            )
            row += stop - start


@pytest.mark.parametrize("lengths", [[5], [8], [9], [23], [16, 1, 17, 24, 3, 40]])
@pytest.mark.parametrize("as_graph", [True, False])
def test_decodes_within_chunks_equal_whole_sequences(lengths, as_graph):
    """Each sequence has consecutive KV blocks, which the attention of the CPU reads without copies."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = 10
    cache = PagedCache.allocate(
        [KVLayer(HEADS, HEAD_DIM)],
        num_blocks=num_blocks * len(lengths),
        block_size=BLOCK,
        dtype=torch.float32,
        device=CPU,
    )
    table = torch.arange(num_blocks * len(lengths)).view(-1, num_blocks)
    query, key, value = (
        [torch.randn(HEADS, length, HEAD_DIM, generator=generator) for length in lengths] for _ in range(3)
    )
    for pages, parts in ((cache.keys[0], key), (cache.values[0], value)):
        for blocks, part in zip(table, parts, strict=True):
            pages.flatten(0, 1)[blocks[0] * BLOCK : blocks[0] * BLOCK + part.shape[1]] = part.transpose(0, 1)
    stops = torch.tensor(lengths)
    if as_graph:
        slots = table[:, 0] * BLOCK + stops - 1
        batch = GraphBatch(cache, slots, table, stops, lengths, torch.zeros(2, len(lengths), dtype=torch.int64))
    else:
        batch = PagedBatch([Chunk(n - 1, n, own.tolist()) for n, own in zip(lengths, table, strict=True)], cache, CPU)
    flat = [torch.stack([one[:, -1] for one in part], dim=1)[None] for part in (query, key, value)]
    out, _ = attend(ChunkedLayer(), *flat, None, scaling=HEAD_DIM**-0.5, paged=batch)
    for row, parts in zip(out[0], zip(query, key, value, strict=True), strict=True):
        torch.testing.assert_close(row, reference(*parts, chunk_size=8)[:, -1], rtol=1e-5, atol=1e-5)


def test_a_batch_shorter_than_a_chunk_is_not_cut():
    batch = PagedBatch([Chunk(0, 8, ()), Chunk(0, 3, ())], None, CPU)
    assert batch.cut(8) is batch
    assert batch.cut(4) is batch.cut(4) is not batch


def test_blocks_that_do_not_divide_a_chunk_are_refused():
    layers = [KVLayer(2, HEAD_DIM), KVLayer(2, HEAD_DIM, chunk_size=8)]
    sizes = {"num_blocks": 2, "dtype": torch.float32, "device": CPU}
    PagedCache.allocate(layers, block_size=8, **sizes)
    with pytest.raises(InputError, match="kv_block_size=3 must divide 8, the size of the chunks"):
        PagedCache.allocate(layers, block_size=3, **sizes)


@pytest.mark.parametrize("layer", [Layer(), ChunkedLayer()])
def test_a_batch_without_a_cache_equals_whole_sequences(layer):
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 19, 1]
    query, key, value = (torch.randn(HEADS, sum(lengths), HEAD_DIM, generator=generator) for _ in range(3))
    batch = PagedBatch([Chunk(0, n, ()) for n in lengths], None, CPU)
    out, _ = attend(layer, query[None], key[None], value[None], None, scaling=HEAD_DIM**-0.5, paged=batch)
    parts = zip(*(x.split(lengths, dim=1) for x in (query, key, value)), strict=True)
    expected = [reference(*p, chunk_size=chunk_size_of(layer)) for p in parts]
    torch.testing.assert_close(out[0].transpose(0, 1), torch.cat(expected, dim=1))


@pytest.mark.parametrize("window", [None, 3, 5, 30])
def test_chunks_with_bidirectional_spans_and_windows_equal_whole_sequences(window):
    """Prompts contain bidirectional spans and causal tokens. A whole prompt and its chunks give the same result.

    No chunk ends within a span.
    """
    generator = torch.Generator().manual_seed(0)
    span_ids = torch.tensor([-1] * 4 + [0] * 7 + [-1] + [1] * 4 + [-1] * 4)
    length = len(span_ids)
    query, key, value = (torch.randn(HEADS, length + 2, HEAD_DIM, generator=generator) for _ in range(3))
    expected = reference(query, key, value, window, torch.nn.functional.pad(span_ids, (0, 2), value=-1))
    sizes = {"num_blocks": 6, "block_size": BLOCK, "dtype": torch.float32, "device": CPU}
    for cuts in ([0, length], [0, 2, 11, 12, 16, 18, length], [0, 4, 11, 20]):
        cache = PagedCache.allocate([KVLayer(HEADS, HEAD_DIM)], **sizes)
        outs = []
        for start, stop in itertools.pairwise([*cuts, length + 1, length + 2]):
            batch = PagedBatch([Chunk(start, stop, range(6), span_ids)], cache, CPU)
            flat = [x[None, :, start:stop] for x in (query, key, value)]
            outs.append(attend(Layer(), *flat, None, scaling=HEAD_DIM**-0.5, paged=batch, sliding_window=window)[0][0])
        torch.testing.assert_close(torch.cat(outs).transpose(0, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("further", [{"s_aux": torch.zeros(2)}, {"softcap": 50.0}])
def test_unsupported_changes_of_the_scores_are_refused(further):
    layer = torch.nn.Module()
    layer.layer_idx = 0
    states = torch.zeros(1, 2, 3, 16)
    batch = PagedBatch([Chunk(0, 3, ())], None, torch.device("cpu"))
    with pytest.raises(UnsupportedCheckpoint, match="sinks or softcapped scores"):
        attend(layer, states, states, states, None, scaling=1.0, paged=batch, **further)


class Writes(TorchDispatchMode):
    """Count the calls to index_copy_."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.index_copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("value_dim", "calls"), [(HEAD_DIM, 1), (HEAD_DIM // 2, 2)])
def test_blocks_of_all_layers_are_cleared_together(value_dim, calls):
    cache = PagedCache.allocate(
        [KVLayer(2, HEAD_DIM, value_dim)] * 3,
        num_blocks=5,
        block_size=BLOCK,
        dtype=torch.float32,
        device=CPU,
    )
    for pages in (*cache.keys.values(), *cache.values.values()):
        pages.fill_(torch.nan)
    with Writes() as writes:
        cache.clear(torch.tensor([4, 1]))
    assert writes.count == calls
    assert [part.shape[-1] for part in (*cache.keys.values(), *cache.values.values())] == [HEAD_DIM] * 3 + [
        value_dim
    ] * 3
    for pages in (*cache.keys.values(), *cache.values.values()):
        assert [bool(block.isnan().any()) for block in pages] == [True, False, True, True, False, True, True]
