"""Arrays in shared memory: words, arena, path file, spool, reclaim. Normative: docs/wire-format.md.

with Arena.create(capacity_bytes) as arena:
    with arena.allocate({"pixel_values": ArraySpec((n, 588), "uint8")}, path_file=path_file) as block:
        block["pixel_values"][...] = ...
        name_word, shape_word = block.publish().to_words()

with attach(Ref.from_words(name_word, shape_word)) as view:     # another process
    tensor = copy_to_device(view["pixel_values"])

release(path_file)                                              # any process

format/     the bytes: handle words, arena, block header (docs/wire-format.md)
memory/     files in /dev/shm: made, locked, mapped, removed
owner/      the arena: which blocks there are, and who waits for room
reader/     attach, view and free blocks; each arena is mapped once
requests/   path file and spool of a request
operate/    survey /dev/shm; reclaim what belongs to dead processes
disk/       blocks in a file on disk
mindie      segments of MindIE's wire
"""

from mindie_mm.shm.disk.disk_arena import DiskArena
from mindie_mm.shm.format.ref import Ref
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.format.words import NAME_WORD_STOP, is_name_word
from mindie_mm.shm.memory.block import Block
from mindie_mm.shm.operate.arena_info import ArenaInfo, BlockInfo, arenas_of, survey
from mindie_mm.shm.operate.reclaim import Collected, collect
from mindie_mm.shm.owner.arena import Arena
from mindie_mm.shm.reader.mapped import mount
from mindie_mm.shm.reader.view import LooseView, View, attach, free
from mindie_mm.shm.requests.path_file import PATH_FILE_NAME, release
from mindie_mm.shm.requests.spool import RequestDirectory, make_spool, request_directory, require_spool

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
