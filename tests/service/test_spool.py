"""The spool: what is left by the dead is freed, what the living hold is not."""

from pathlib import Path

import numpy as np
import pytest

from mindie_mm.config import ServiceConfig
from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from mindie_mm.shm import Arena, ArraySpec
from service.media import MediaPolicy
from service.spool import open_spool, remove_media


def block_in(arena: Arena, path_file: Path) -> None:
    with arena.allocate({"x": ArraySpec((16,), "uint8")}, path_file=path_file) as block:
        block["x"][...] = np.arange(16, dtype=np.uint8)
        block.publish()


def test_leaving_a_request_frees_its_blocks(tmp_path: Path) -> None:
    with Arena.create(1 << 20) as arena, open_spool(tmp_path) as spool:
        with spool.request() as directory:
            block_in(arena, directory.path_file)
        assert not directory.path.exists()
        assert arena.num_blocks == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_opening_frees_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    dead = tmp_path / "123-dead" / "request"
    dead.mkdir(parents=True)
    (dead / "shm_name.txt").write_text("nonsense\n")
    with open_spool(tmp_path) as first, first.request() as living:
        assert not dead.parent.exists()
        with open_spool(tmp_path) as second:
            assert living.path.exists()
            assert second.path != first.path
        assert living.path.exists()


async def test_media_are_numbered_in_order_by_kind(tmp_path: Path) -> None:
    source = tmp_path / "in.png"
    source.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=tmp_path))
    request = tmp_path / "request"
    request.mkdir()
    items = [Media("image", str(source)) for _ in range(11)]
    items.insert(3, Media("video", "data:video/mp4;base64,AAAAIGZ0eXBpc29t"))
    paths = await policy.spool(items, request)
    relative = [str(path.relative_to(request)) for path in paths]
    assert relative == [
        *(f"image/{n}.png" for n in (1, 2, 3)),
        "video/1.mp4",
        *(f"image/{n}.png" for n in range(4, 12)),
    ]
    assert paths[0].read_bytes() == source.read_bytes()
    remove_media(request)
    assert list(request.iterdir()) == []


async def test_the_request_has_a_budget(tmp_path: Path) -> None:
    policy = MediaPolicy(ServiceConfig(max_media_bytes=20))
    items = [Media("image", "data:;base64,AAAAAAAAAAAAAAAAAAAA")] * 2
    with pytest.raises(LimitExceeded, match="image 2: the request's media take 30 bytes, the limit is 20"):
        await policy.spool(items, tmp_path)


async def test_jpeg_as_base64_is_no_path(tmp_path: Path) -> None:
    policy = MediaPolicy(ServiceConfig(allowed_media_dir=tmp_path))
    (path,) = await policy.spool([Media("image", "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBD")], tmp_path)
    assert path.suffix == ".jpg"
