"""Decoder processes, which turn the bytes of one media item into its arrays.

A decoder process cannot open files or access the network. It receives an open file, plans the item, and later writes
the item's arrays to its scratch memory. The tokenizer process copies the arrays to the item's block. `Decoders` is the
tokenizer's side of the decoder processes. The nursery is the process that forks decoder processes.
"""

from mindie_mm.decode.decoders import Decoders
from mindie_mm.decode.jobs import Group

__all__ = ["Decoders", "Group"]
