"""Random numbers of the device. As on a real device, they depend on a generator's seed and offset only."""

from __future__ import annotations

import torch

_DRAW = 4  # offsets advance by 4 per draw, because Philox counts in fours


def host_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return a host generator for one operator, and advance the device's `generator` or the default one."""
    if generator is None:
        generator = torch.npu.default_generators[device.index]
    if generator.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' device type for generator but found '{generator.device.type}'")
    offset = generator.get_offset()
    generator.set_offset(offset + _DRAW)
    return torch.Generator().manual_seed(hash((generator.initial_seed(), offset)) & (2**63 - 1))
