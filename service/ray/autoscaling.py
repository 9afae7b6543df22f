"""The autoscaling policy of the worker deployment."""

from __future__ import annotations

import math
from typing import Any


class QueuedTokens:
    """Chooses the number of replicas so that each has at most `target_queued_tokens` queued tokens on average.

    Queued tokens are the estimated tokens of the prompts of all requests in progress. If requests wait because all
    replicas are full, there is always at least one more replica.
    """

    def __init__(self, target_queued_tokens: float) -> None:
        self._target = target_queued_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas for an `AutoscalingContext`, and no state."""
        reported = (context.aggregated_metrics or {}).get("queued_tokens", {})
        wanted = math.ceil(sum(reported.values()) / self._target)
        if (context.total_queued_requests or 0) > 0:
            wanted = max(wanted, context.current_num_replicas + 1)
        return max(wanted, 1), {}
