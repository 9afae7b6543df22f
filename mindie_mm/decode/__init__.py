"""Decoder processes: the bytes of one media item in, its arrays out.

A decoder is stateless and has neither paths nor network. It gets an open file, plans the item, and later writes the
item's arrays into its scratch memory. The tokenizer copies them into the item's block. `Decoders` is the tokenizer's
side, `nursery` the process that forks decoders.
"""

from mindie_mm.decode.decoders import Decoders
from mindie_mm.decode.jobs import Group

__all__ = ["Decoders", "Group"]
