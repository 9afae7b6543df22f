"""Decoder processes: bytes of one media item in, arrays in a block of shared memory out.

A decoder is stateless and has neither paths nor network. It gets an open file, plans the item, and later writes the
item's arrays into the pages of its block. `Decoders` is the tokenizer's side, `nursery` the process that forks them.
"""

from mindie_mm.decode.decoders import Decoders, Group

__all__ = ["Decoders", "Group"]
