"""Arrays in shared memory. docs/wire-format.md is the normative description of the format.

with Arena.create(capacity_bytes) as arena:
    with arena.allocate({"pixel_values": ArraySpec((n, 588), "uint8")}, path_file=path_file) as block:
        block["pixel_values"][...] = ...
        name_word, shape_word = block.publish().to_words()

with attach(Ref.from_words(name_word, shape_word)) as view:     # another process
    tensor = copy_to_device(view["pixel_values"])

release(path_file)                                              # any process

format/     binary format of handle words, arena files and blocks
owner/      arenas: allocation of blocks, and the queue for room
view        attaching and freeing blocks; mapped: the arenas that this process reads
path_file   list of the blocks of a request; spool: directories of live requests
reclaim     reclamation of memory that dead processes left behind; arena_info: survey of /dev/shm
mindie      segments in MindIE's wire format
dev_shm, liveness_lock, mapping, segment    files in /dev/shm: creation, locking, mapping and removal
"""

from mindie_mm.shm.arena_info import ArenaInfo, BlockInfo, arenas_of, survey
from mindie_mm.shm.format.block import Block
from mindie_mm.shm.format.spec import ArraySpec
from mindie_mm.shm.format.words import NAME_WORD_STOP, Ref, is_name_word
from mindie_mm.shm.owner.arena import Arena
from mindie_mm.shm.path_file import PATH_FILE_NAME, release
from mindie_mm.shm.reclaim import Collected, collect
from mindie_mm.shm.spool import RequestDirectory, make_spool, request_directory, require_spool
from mindie_mm.shm.view import View, attach, free

__all__ = [
    "NAME_WORD_STOP",
    "PATH_FILE_NAME",
    "Arena",
    "ArenaInfo",
    "ArraySpec",
    "Block",
    "BlockInfo",
    "Collected",
    "Ref",
    "RequestDirectory",
    "View",
    "arenas_of",
    "attach",
    "collect",
    "free",
    "is_name_word",
    "make_spool",
    "release",
    "request_directory",
    "require_spool",
    "survey",
]
