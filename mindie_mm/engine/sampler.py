"""From logits to tokens, each row by its own request's settings."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from mindie_mm.engine.messages import TokenLogprob
from mindie_mm.engine.sampling_params import SamplingParams
from mindie_mm.engine.sequence import Sequence


@torch.inference_mode()
def sample(logits: Tensor, sequences: Rows[Sequence], eos_token_ids: tuple[int, ...]) -> list[int]:
    """The next token of each sequence from logits float32 [rows, vocabulary], which are changed in place.

    A row's draw depends on nothing but its logits, settings and generator: not on its neighbours.
    """
    for row, sequence in zip(logits, sequences, strict=True):
        _bias(row, sequence, eos_token_ids)
    tokens = logits.argmax(dim=-1).tolist()
    drawn = [i for i, sequence in enumerate(sequences) if not sequence.params.greedy]
    if drawn:
        picked = [sequences[i] for i in drawn]
        for i, token in zip(drawn, _draw(logits[drawn], picked), strict=True):
            tokens[i] = token
    return tokens


def _bias(row: Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> None:
    """Adds a request's own preferences to its logits, float32 [vocabulary]; most requests have none."""
    params = sequence.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row.index_add_(0, ids, torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device))
    if params.repetition_penalty != 1:
        seen = torch.tensor(sequence.token_ids, device=row.device).unique()
        seen = seen[seen < len(row)]  # a prompt may hold ids that have no logits
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.num_output:
        ids, counts = torch.tensor(sequence.output_ids, device=row.device).unique(return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if sequence.num_output < params.min_tokens:
        row[[*eos_token_ids, *params.stop_token_ids]] = -torch.inf


def _draw(logits: Tensor, sequences: Rows[Sequence]) -> list[int]:
    """Tokens drawn from logits float32 [rows, vocabulary] by temperature, top_k, top_p and min_p, in that order."""
    device = logits.device
    logits = logits / torch.tensor([[s.params.temperature] for s in sequences], device=device)
    if any(_filters(sequence.params) for sequence in sequences):
        top_k = torch.tensor([[s.params.top_k] for s in sequences], device=device)
        top_p = torch.tensor([[s.params.top_p] for s in sequences], device=device)
        min_p = torch.tensor([[s.params.min_p] for s in sequences], device=device)
        scores, order = logits.sort(dim=-1, descending=True)
        rank = torch.arange(scores.shape[-1], device=device)
        scores = scores.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
        probabilities = scores.softmax(dim=-1)
        # A token stays while the ones before it have not reached top_p: the likeliest always does.
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = (before >= top_p) & (top_p < 1)
        dropped |= probabilities < min_p * probabilities[:, :1]
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, scores.masked_fill(dropped, -torch.inf))
    probabilities = logits.softmax(dim=-1)
    # argmax of p / Exponential(1) is a draw from p, one noise vector a row from its own generator.
    noise = torch.stack([torch.empty(logits.shape[-1]).exponential_(generator=s.generator) for s in sequences])
    drawn: list[int] = (probabilities / noise.to(device)).argmax(dim=-1).tolist()
    return drawn


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def token_logprobs(logits: Tensor, token_ids: Rows[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of token_ids under raw logits float32 [rows, vocabulary], with the `num_top` likeliest.

    That of an id outside the vocabulary, which a prompt may hold, is minus infinity.
    """
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    known = logprobs.gather(1, ids.clamp(max=logits.shape[-1] - 1))
    chosen = known.masked_fill(ids >= logits.shape[-1], -torch.inf).squeeze(1).tolist()
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprob(token, logprob, list(zip(top_ids, top, strict=True)))
        for token, logprob, top_ids, top in zip(token_ids, chosen, ids.tolist(), values.tolist(), strict=True)
    ]
