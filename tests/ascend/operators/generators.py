"""Random numbers of the device. As on a real device, they depend only on the seed and the offset of a generator."""

from __future__ import annotations

import torch

_DRAW = 4  # a draw advances the offset by 4, because Philox generates four numbers at a time


def host_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return a host generator for one operator.

    Advance `generator`, or the device's default generator if it is None.
    """
    if generator is None:
        generator = torch.npu.default_generators[device.index]
    if generator.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' device type for generator but found '{generator.device.type}'")
    offset = generator.get_offset()
    generator.set_offset(offset + _DRAW)
    return torch.Generator().manual_seed(hash((generator.initial_seed(), offset)) & (2**63 - 1))
