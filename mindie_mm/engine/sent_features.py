"""Features of media items in the form in which the engine sends them to a client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindie_mm.device.transfer import download
from mindie_mm.engine.requests.engine_messages import Features
from mindie_mm.errors import LimitExceeded, OperationalError
from mindie_mm.nn.splice import MediaItem

MAX_FEATURES_BYTES = 2**30
"""Maximum size in bytes of the features in one message, as float32."""


def sendable(items: Sequence[MediaItem], encoded: Sequence[Tensor]) -> list[Features]:
    """Return the features of the first items, as many as fit into one message.

    Raises:
        LimitExceeded: The features of the first item are too large.
        OperationalError: Features are not finite.

    """
    sent: list[Features] = []
    left_bytes = MAX_FEATURES_BYTES
    for item, features in zip(items, encoded, strict=False):
        num_bytes = 4 * features.numel()
        if num_bytes > MAX_FEATURES_BYTES:
            raise LimitExceeded(
                f"the features of the {item.shape.kind} have {num_bytes} bytes; the limit is {MAX_FEATURES_BYTES}"
            )
        left_bytes -= num_bytes
        if left_bytes < 0:
            break
        sent.append(_sent(item, features))
    return sent


def _sent(item: MediaItem, features: Tensor) -> Features:
    if features.dtype == torch.bfloat16:  # numpy has no bfloat16
        features = features.float()
    (on_host,) = download(features)
    if not on_host.isfinite().all():
        raise OperationalError(f"the tower returned non-finite features for the {item.shape.kind}")
    dtype = str(on_host.dtype).removeprefix("torch.")
    return Features(on_host.contiguous().numpy().tobytes(), dtype, len(on_host), item.shape.grid)
