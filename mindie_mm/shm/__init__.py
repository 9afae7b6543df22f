"""Arrays in shared memory. docs/wire-format.md is the normative description of the format.

with Arena.create(capacity_bytes) as arena:
    with arena.allocate({"pixel_values": ArraySpec((n, 588), "uint8")}, path_file=path_file) as block:
        block["pixel_values"][...] = ...
        name_word, shape_word = block.publish().to_words()

with attach(Ref.from_words(name_word, shape_word)) as view:     # another process
    tensor = copy_to_device(view["pixel_values"])

release(path_file)                                              # any process

format/     binary format of handle words, arena headers and block headers
memory/     files in /dev/shm: creation, locking, mapping and removal
owner/      arenas: allocation of blocks, and threads that wait for room
reader/     attaching, viewing and freeing blocks
requests/   path file and spool of a request
operate/    survey of /dev/shm, and reclamation of memory that dead processes left behind
disk/       files on disk that contain blocks
mindie      segments in MindIE's wire format
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
