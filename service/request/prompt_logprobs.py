"""Log-probabilities of a prompt in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from mindie_mm.engine.requests.engine_messages import TokenLogprob
from mindie_mm.engine.requests.sampling_params import ALL_TOKENS
from service.request.token_text import TokenTexts, finite, in_turns
from service.schemas.openai_answers import PromptToken


async def prompt_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob], num_top: int) -> Raw:
    """Return a JSON list with null for the prompt's first token, and an object for each further token.

    The keys of an object are token ids: first the prompt's token, and then the `num_top` most likely tokens.
    """

    def entry(token_id: int, logprob: float, rank: int | None) -> PromptToken:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token_id)}

    parts = [b"null"]
    weight = 1 + (len(logprobs[0].top) if logprobs else 0)
    async for some in in_turns(logprobs, weight):
        for one in some:
            entries = {str(one.token_id): entry(one.token_id, one.logprob, one.rank)}
            top = [*enumerate(one.top if num_top == ALL_TOKENS else one.top[:num_top], 1)]
            async for ranked in in_turns(top, 1):
                for rank, (token_id, logprob) in ranked:
                    if token_id != one.token_id:
                        entries[str(token_id)] = entry(token_id, logprob, rank)
            parts.append(msgspec.json.encode(entries))
    return Raw(b"[" + b",".join(parts) + b"]")
