"""Arrays in shared memory: words, arena, path file, reclaim."""

from mindie_mm.shm.ref import Ref
from mindie_mm.shm.spec import ArraySpec
from mindie_mm.shm.words import NAME_WORD_STOP, is_name_word

__all__ = ["NAME_WORD_STOP", "ArraySpec", "Ref", "is_name_word"]
