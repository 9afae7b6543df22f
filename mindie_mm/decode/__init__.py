"""Decoder processes, which turn the bytes of one media item into its arrays.

A decoder is stateless, and can access neither paths nor the network. It receives an open file, plans the item, and
later writes the item's arrays to its scratch memory. The tokenizer copies them to the item's block. `Decoders` is the
tokenizer's side. `nursery` is the process that forks decoders.
"""

from mindie_mm.decode.decoders import Decoders
from mindie_mm.decode.jobs import Group

__all__ = ["Decoders", "Group"]
