"""Arrays in shared memory: words, arena, path file, spool, reclaim. Normative: docs/wire-format.md.

with Arena.create(capacity_bytes) as arena:
    with arena.allocate({"pixel_values": ArraySpec((n, 588), "uint8")}, path_file=path_file) as block:
        block["pixel_values"][...] = ...
        name_word, shape_word = block.publish().to_words()

with attach(Ref.from_words(name_word, shape_word)) as view:     # another process
    tensor = copy_to_device(view["pixel_values"])

release(path_file)                                              # any process

The wire         words, ref, spec; mindie, mindie_words, segment: MindIE's
The bytes        layout (arena), extent (where a block lies), block_header, stats
The owner        arena, with inventory (which blocks there are), waiting (who waits for room) and arena_file
                 of the inventory: table (entries), heap (room), quota; block (being filled)
                 of the file: nameless (how it comes to be), life (its lock), populate, scatter (several pieces)
                 disk: the same in a file on disk
Readers          reader (attach, free), mapped (each arena once)
Requests         path_file, spool
Operators        arena_info (what there is), space (how full /dev/shm is), reclaim (what belongs to the dead)
"""

from mindie_mm.shm.arena import Arena
from mindie_mm.shm.arena_info import ArenaInfo, BlockInfo, arenas_of, survey
from mindie_mm.shm.block import Block
from mindie_mm.shm.disk import DiskArena
from mindie_mm.shm.mapped import mount
from mindie_mm.shm.path_file import PATH_FILE_NAME, release
from mindie_mm.shm.reader import LooseView, View, attach, free
from mindie_mm.shm.reclaim import Collected, collect
from mindie_mm.shm.ref import Ref
from mindie_mm.shm.spec import ArraySpec
from mindie_mm.shm.spool import RequestDirectory, make_spool, request_directory, require_spool
from mindie_mm.shm.words import NAME_WORD_STOP, is_name_word

__all__ = [
    "NAME_WORD_STOP",
    "PATH_FILE_NAME",
    "Arena",
    "ArenaInfo",
    "ArraySpec",
    "Block",
    "BlockInfo",
    "Collected",
    "DiskArena",
    "LooseView",
    "Ref",
    "RequestDirectory",
    "View",
    "arenas_of",
    "attach",
    "collect",
    "free",
    "is_name_word",
    "make_spool",
    "mount",
    "release",
    "request_directory",
    "require_spool",
    "survey",
]
