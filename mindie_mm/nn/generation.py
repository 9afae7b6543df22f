"""A checkpoint's constraints on the tokens of answers, applied by transformers' logits processors.

The constraints apply to every request, whatever its parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import upload
from mindie_mm.errors import UnsupportedCheckpoint

_log = logging.getLogger(__name__)

# Unsupported settings that change the answers of transformers' `generate`, with the values that have no effect.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "sequence_bias": (None,),
    "watermarking_config": (None,),
}


class GenerationRules:
    """The tokens that a checkpoint forces or suppresses.

    The checkpoint's sampling parameters and length limits are ignored, because each request sets its own.
    """

    def __init__(self, configs: Sequence[Any], where: str, device: torch.device) -> None:
        """Read the generation settings.

        Args:
            configs: Instances of transformers' GenerationConfig. Each setting is read from the first instance that has
                it.
            where: Path of the checkpoint, for messages.
            device: Device of the logits.

        Raises:
            UnsupportedCheckpoint: A setting that would change the answers is not supported.

        """
        from transformers.generation import logits_process as rules

        def stated(name: str) -> Any:
            values = (getattr(config, name, None) for config in configs)
            return next((value for value in values if value is not None), None)

        _check({name: stated(name) for name in (*_NOT_SERVED, "num_beams")}, where)
        start, bos = stated("decoder_start_token_id"), stated("bos_token_id")
        if start is None and bos is None:
            raise UnsupportedCheckpoint(f"{where}: the generation config has no decoder_start_token_id")
        self.start_token_id: int = bos if start is None else start
        """The decoder's first input."""
        self.eos_token_ids = _ids(stated("eos_token_id"))
        """Tokens that end an answer."""
        self.forced_eos_token_ids = _ids(stated("forced_eos_token_id"))
        """Tokens that may end an answer of the maximum length. If empty, the answer may end with any token."""
        forced_bos = stated("forced_bos_token_id")
        self._rules = rules.LogitsProcessorList()
        if size := stated("no_repeat_ngram_size"):
            self._rules.append(rules.NoRepeatNGramLogitsProcessor(size))
        if words := stated("bad_words_ids"):
            self._rules.append(rules.NoBadWordsLogitsProcessor(words, list(self.eos_token_ids)))
        if forced_bos is not None:
            self._rules.append(rules.ForcedBOSTokenLogitsProcessor(forced_bos))
        self._barred = rules.LogitsProcessorList()
        if tokens := stated("suppress_tokens"):
            self._barred.append(rules.SuppressTokensLogitsProcessor(tokens, device=str(device)))
        if tokens := stated("begin_suppress_tokens"):
            begin = 1 if forced_bos is None else 2
            self._barred.append(rules.SuppressTokensAtBeginLogitsProcessor(tokens, begin, device=str(device)))

    def constrain(self, row: Tensor, output_ids: Sequence[int], *, last: bool) -> None:
        """Apply the constraints to the logits of the next token, in place.

        Args:
            row: Logits, float32 [vocabulary].
            output_ids: Tokens of the answer so far.
            last: Whether the next token is the last token that the answer may have.

        """
        scores = row.unsqueeze(0)
        if self._rules or self._barred:
            ids = upload([[self.start_token_id, *output_ids]], row.device)
            scores = self._rules(ids, scores)
        if last and self.forced_eos_token_ids:
            scores = torch.full_like(scores, -torch.inf)
            for token in self.forced_eos_token_ids:  # indexing by a list would wait for the device
                scores[:, token] = 0
        if self._barred:
            scores = self._barred(ids, scores)
        row.copy_(scores[0])


def _check(settings: Mapping[str, Any], where: str) -> None:
    for name, neutral in _NOT_SERVED.items():
        if (value := settings[name]) not in neutral:
            raise UnsupportedCheckpoint(
                f"{where}: the generation config sets {name} to {value!r}, which is not supported"
            )
    if (beams := settings["num_beams"] or 1) > 1:
        # Beam search only improves answers at a higher cost, so a checkpoint that sets num_beams also works without it.
        _log.warning(
            "%s: the generation config sets num_beams to %d; outputs are decoded without beam search", where, beams
        )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
