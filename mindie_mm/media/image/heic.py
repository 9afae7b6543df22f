"""HEIC images, as phones write them: HEVC in HEIF, in one piece or as a grid of tiles.

FFmpeg, which PyAV contains, decodes the pieces. Only the primary image is decoded. Thumbnails, depth maps, gain maps
and other views are other items of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import av
import numpy as np
import torch
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from mindie_mm.errors import LimitExceeded, MediaError, MindieMMError
from mindie_mm.media.guard.boxes import check_boxes
from mindie_mm.media.guard.caps import add_image, caps
from mindie_mm.media.guard.container import coded_pixels
from mindie_mm.media.image.colours import pil_to_rgb
from mindie_mm.media.image.heif_boxes import Cursor, Items, pairs_of, read_items
from mindie_mm.settings.config import Colour

MAX_TILES = 4096
_CODED = b"hvc1"
_ALPHA = (b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0", b"urn:mpeg:hevc:2015:auxid:1\0")
_BT_601 = 5
_SPACES = {1: 1, 5: 5, 6: 5, 7: 7, 9: 9}
"""Value of swscale's colorspace (SWS_CS_*) for each matrix of ISO/IEC 23091-2."""
_LIMITED, _FULL = 1, 2  # AVCOL_RANGE_*


@dataclass(frozen=True, slots=True)
class _Grid:
    """The tiles of an image. An image in one piece is a grid with a single tile."""

    tiles: list[int]
    rows: int
    columns: int
    height: int
    """Height of the image, which the last row of tiles may exceed."""
    width: int
    tile_height: int
    tile_width: int


@dataclass(frozen=True, slots=True)
class HeicImage:
    """A HEIC image whose header has been read and checked against the limits, like EncodedImage."""

    height: int
    """Height in pixels after the image is cropped and turned."""
    width: int
    """Width in pixels after the image is cropped and turned."""
    items: Items
    grid: _Grid
    alpha: _Grid | None
    background: Colour | None
    """Color behind transparent pixels. None means that the alpha channel is dropped."""

    @classmethod
    def open(cls, data: bytes, *, drop_alpha: bool = False) -> HeicImage | None:
        """Read the header of `data`. Return None if the primary image is no HEVC image, as in an AVIF file.

        Raises:
            MediaError: The file is broken, or has no still image.
            LimitExceeded: The image exceeds a limit.

        """
        try:
            return cls._opened(data, drop_alpha=drop_alpha)
        except (MindieMMError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - for a hostile header, any exception may be raised
            raise _broken(len(data)) from None

    @classmethod
    def _opened(cls, data: bytes, *, drop_alpha: bool) -> HeicImage | None:
        check_boxes(data)
        items = read_items(data)
        if items is None:
            raise MediaError("the HEIC file has no still image; send it as a video")
        kind = items.kinds[items.primary]
        if kind not in {_CODED, b"grid"}:
            if data[8:12].startswith(b"he"):
                raise MediaError(f"the HEIC image is of type {kind!r}, which is not supported; convert it to JPEG")
            return None
        grid = _grid_of(items, items.primary)
        if any(items.kinds[tile] != _CODED for tile in grid.tiles):
            return None
        add_image(grid.columns * grid.tile_width, grid.rows * grid.tile_height)
        alpha = None if drop_alpha else _alpha_of(items)
        if alpha is not None:
            add_image(alpha.columns * alpha.tile_width, alpha.rows * alpha.tile_height)
        size = np.empty((grid.height, grid.width, 0), np.uint8)
        height, width, _ = _transformed(items, items.primary, size).shape
        return cls(height, width, items, grid, alpha, None if drop_alpha else caps().rgba_background_color)

    def decode(self) -> NDArray[np.uint8]:
        """Return RGB pixels, uint8 [height, width, 3]. Raise MediaError if the image is broken or truncated."""
        try:
            pixels = _decoded(self.items, self.grid, self.items.primary, "rgb24")
            if self.alpha is not None:
                alpha = _decoded(self.items, self.alpha, self.alpha.tiles[0], "gray")
                image = Image.fromarray(pixels)
                image.putalpha(Image.fromarray(alpha).resize(image.size))
                pixels = np.asarray(pil_to_rgb(image, self.background))
            return np.ascontiguousarray(_transformed(self.items, self.items.primary, pixels))
        except (MindieMMError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - for broken data, a decoder may raise any exception
            raise _broken(len(self.items.data)) from None


def _broken(nbytes: int) -> MediaError:
    return MediaError(f"the HEIC image of {nbytes} bytes is broken or truncated")


def _grid_of(items: Items, item: int) -> _Grid:
    """Return the tiles of an image. Raise LimitExceeded or ValueError if they do not fit the image."""
    height, width = _size(items, item)
    if items.kinds[item] == _CODED:
        return _Grid([item], 1, 1, height, width, height, width)
    head = Cursor(items.content(item))
    _, flags, rows, columns = (head.number(1) for _ in range(4))
    side_bytes = 4 if flags & 1 else 2
    width, height = head.number(side_bytes), head.number(side_bytes)
    tiles = items.references[b"dimg", item]
    rows, columns = rows + 1, columns + 1
    if rows * columns > MAX_TILES:
        raise LimitExceeded(f"the HEIC image has {rows * columns} tiles; the limit is {MAX_TILES}")
    tile_height, tile_width = _size(items, tiles[0])
    exact = len(tiles) == rows * columns and all(_size(items, tile) == (tile_height, tile_width) for tile in tiles)
    if not exact or not 0 < height <= rows * tile_height or not 0 < width <= columns * tile_width:
        raise ValueError("the tiles do not fit the image")
    return _Grid(tiles, rows, columns, height, width, tile_height, tile_width)


def _size(items: Items, item: int) -> tuple[int, int]:
    """Return height and width of an image before it is cropped and turned."""
    given = items.property_of(item, b"ispe")
    if given is None:
        raise ValueError("an image has no size")
    box = Cursor(given)
    box.take(4)
    width, height = box.number(4), box.number(4)
    if not width or not height:
        raise ValueError("an image has no pixels")
    return height, width


def _alpha_of(items: Items) -> _Grid | None:
    for (kind, item), targets in items.references.items():
        meaning = items.property_of(item, b"auxC") or b""
        if kind == b"auxl" and items.primary in targets and meaning[4:].startswith(_ALPHA):
            return _grid_of(items, item)
    return None


def _decoded(items: Items, grid: _Grid, described_by: int, form: str) -> NDArray[np.uint8]:
    """Decode the tiles of an image. The item `described_by` may state the colors."""
    shape = (grid.rows * grid.tile_height, grid.columns * grid.tile_width)
    pixels = np.zeros((*shape, 3) if form == "rgb24" else shape, np.uint8)
    context, scaler = None, VideoReformatter()
    for index, tile in enumerate(grid.tiles):
        setup = items.property_of(tile, b"hvcC")
        assert setup is not None or context is not None, "the caller turns any exception into a MediaError"
        if context is None or context.extradata != setup:
            context = _decoder(setup or b"", grid.tile_height * grid.tile_width)
        frame = _frame(context, items.content(tile))
        if (frame.height, frame.width) != (grid.tile_height, grid.tile_width):
            raise MediaError(
                f"the header of the HEIC image states tiles of {grid.tile_width}x{grid.tile_height} pixels, but one of "
                f"{frame.width}x{frame.height} pixels was decoded"
            )
        row, column = index // grid.columns * grid.tile_height, index % grid.columns * grid.tile_width
        matrix, color_range = _colours(items, (described_by, tile), frame)
        converted = scaler.reformat(
            frame, format=form, src_colorspace=matrix, src_color_range=color_range, threads=torch.get_num_threads()
        )
        pixels[row : row + grid.tile_height, column : column + grid.tile_width] = converted.to_ndarray()
    return pixels[: grid.height, : grid.width]


def _decoder(setup: bytes, num_pixels: int) -> VideoCodecContext:
    context = cast("VideoCodecContext", av.CodecContext.create("hevc", "r"))
    context.extradata = setup
    context.thread_count = 1
    context.options = {"max_pixels": str(coded_pixels(num_pixels))}
    return context


def _frame(context: VideoCodecContext, data: bytes) -> VideoFrame:
    """Decode one image. Raise ValueError if it is broken."""
    try:
        frames = [*context.decode(av.Packet(data)), *context.decode(None)]
    except av.error.MemoryError:  # FFmpeg's error for a frame above `max_pixels`
        raise ValueError("a tile is larger than the file states") from None
    context.flush_buffers()
    if len(frames) != 1 or frames[0].is_corrupt:
        raise ValueError("a tile has no image")
    return frames[0]


def _colours(items: Items, described_by: tuple[int, ...], frame: VideoFrame) -> tuple[int, int]:
    """Return the matrix and the range of YCbCr values. A property of the file takes precedence over the bitstream."""
    for item in described_by:
        for kind, content in items.properties.get(item, ()):
            if kind == b"colr" and content.startswith(b"nclx") and len(content) >= 11:
                matrix, full = int.from_bytes(content[8:10]), content[10] >> 7
                return _SPACES.get(matrix, _BT_601), _FULL if full else _LIMITED
    return _SPACES.get(frame.colorspace, _BT_601), frame.color_range or _LIMITED


def _transformed(items: Items, item: int, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Crop, turn and mirror an image as its properties say, in their order. The EXIF orientation has no effect."""
    for kind, content in items.properties.get(item, ()):
        if kind == b"clap":
            pixels = _cropped(pixels, content)
        elif kind == b"irot":
            pixels = np.rot90(pixels, content[0] & 3)
        elif kind == b"imir":
            pixels = pixels[:, ::-1] if content[0] & 1 else pixels[::-1]
    return pixels


def _cropped(pixels: NDArray[np.uint8], content: bytes) -> NDArray[np.uint8]:
    """Return the clean aperture: width, height, and the offset of its center from the center of the image."""
    width, height, right, down = pairs_of(content, 4)
    left = round(right + (pixels.shape[1] - width) / 2)
    top = round(down + (pixels.shape[0] - height) / 2)
    if left < 0 or top < 0 or width < 1 or height < 1:
        raise ValueError("the clean aperture is outside the image")
    return pixels[top : top + round(height), left : left + round(width)]
