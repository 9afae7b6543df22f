"""Fuyu: patches of an image straight into the decoder, row by row, each row behind its last ended by a token.

Source: adept.ai/blog/fuyu-8b; transformers' fuyu, whose ids and patches these are. One image a prompt, in front of
the text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from mindie_mm import faults
from mindie_mm.device import Device
from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image import RESAMPLES, Data, Pixels, open_image, resize
from mindie_mm.media.patches import patchify, unpatchify
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import Family, Placeholder, Plan, Processor, Spelling, placeholder_of
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pixels import joined
from mindie_mm.nn.pretrained import PretrainedModel, load_pretrained, text_width
from mindie_mm.nn.splice import MediaItem
from mindie_mm.shm import ArraySpec

_BILINEAR = 2
_NEEDED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": True, "padding_mode": "constant"}
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
)


class FuyuProcessor(Processor):
    """The tokenizer's half.

    A block holds `patches`, uint8 [rows * columns, patch * patch * 3]; the grid: (rows, columns).
    """

    inserted: ClassVar[bool] = True
    chat_template: ClassVar[str | None] = _CHAT_TEMPLATE

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = checkpoint.path
        config = checkpoint.json("processor_config.json").get("image_processor")
        config = config or checkpoint.json("preprocessor_config.json")
        for name, needed in _NEEDED.items():
            if config.get(name, needed) != needed:
                raise UnsupportedCheckpoint(f"{where}: {name} is {config[name]!r}, only {needed!r} is served")
        if (number := config.get("resample", _BILINEAR)) not in RESAMPLES:
            raise UnsupportedCheckpoint(f"{where}: resample is {number!r}, only {[*RESAMPLES]} are served")
        self._resample = RESAMPLES[number]
        size = config.get("size") or {"height": 1080, "width": 1920}
        patch = config.get("patch_size") or {"height": 30, "width": 30}
        self._height, self._width, self.patch = int(size["height"]), int(size["width"]), int(patch["height"])
        if self.patch != patch["width"] or self.patch != checkpoint.config.get("patch_size", 30):
            raise UnsupportedCheckpoint(
                f"{where}: images are cut into patches of {patch['height']}x{patch['width']} pixels, the model takes "
                f"squares of {checkpoint.config.get('patch_size', 30)}"
            )
        if self._height % self.patch or self._width % self.patch:
            raise UnsupportedCheckpoint(
                f"{where}: images of up to {self._height}x{self._width} pixels are no whole patches of {self.patch}"
            )
        self.feature_width = text_width("FuyuConfig", checkpoint)
        self._padding = int(config.get("padding_value", 1.0))
        self.mean, self.std = (_channels(config.get(name, 0.5)) for name in ("image_mean", "image_std"))
        self.rescale_factor: float = config.get("rescale_factor", 1 / 255)
        vocabulary = _vocabulary(checkpoint)
        try:
            self._bos, newline, answer = (vocabulary[token] for token in ("<s>", "|NEWLINE|", "<0x04>"))
            token = checkpoint.config.get("image_token_id") or vocabulary["|SPEAKER|"]
        except KeyError as error:
            raise UnsupportedCheckpoint(f"{where}: tokenizer.json has no token {error}") from error
        self._newline, self._answer = newline, answer
        self._placeholder = Placeholder((), token, ())

    def placeholder(self, kind: Kind) -> Placeholder:
        return placeholder_of({"image": self._placeholder}, kind)

    def max_tokens(self, kind: Kind) -> int:
        del kind
        return self._height // self.patch * (self._width // self.patch)

    def worst_case(self, kind: Kind) -> Data:
        del kind
        return np.zeros((self._height, self._width, 3), np.uint8)

    def limits(self) -> Mapping[Kind, int]:
        return {"image": 1}

    def makes(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> bool:
        del kind
        return len(grid) == 2 and min(grid) > 0 and math.prod(grid) == num_features

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling:
        del kind, num_features
        rows, columns = grid
        return Spelling(runs=[[*[self._placeholder.token] * columns, self._newline] * rows])

    @property
    def control_pieces(self) -> Collection[int]:
        return self._placeholder.token, self._newline, self._answer

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Where there is an image, a BOS stands behind it, and the answer begins with a token of its own."""
        if not num_items:
            return ids
        return [*([] if ids[:1] == [self._bos] else [self._bos]), *ids, self._answer]

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        del media, counts
        image = open_image(data)
        height, width = self._size(image.height, image.width)
        patch = self.patch
        rows, columns = -(-height // patch), -(-width // patch)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            padded = np.full((rows * patch, columns * patch, 3), self._padding, np.uint8)
            padded[:height, :width] = resize(image.decode(), height, width, self._resample)
            patchify(padded, arrays["patches"].reshape(-1, patch, patch, 3), patch, 1)
            faults.point("mid-fill")

        return Plan(
            num_features=rows * columns,
            specs={"patches": ArraySpec((rows * columns, patch**2 * 3), "uint8")},
            settings=f"fuyu {height}x{width}, {self._resample}, patch {patch}, padding {self._padding}",
            write=write,
            grid=(rows, columns),
        )

    def pictures(self, arrays: Mapping[str, np.ndarray[Any, Any]], grid: tuple[int, ...]) -> list[Pixels]:
        patches = arrays["patches"].reshape(-1, self.patch, self.patch, 3)
        return [unpatchify(patches, grid[0], grid[1], 1)]

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """What fits within the checkpoint's size; smaller images stay as they are. LimitExceeded."""
        if height <= self._height and width <= self._width:
            return height, width
        scale = min(self._height / height, self._width / width)
        size = int(height * scale), int(width * scale)
        if not min(size):
            raise LimitExceeded(f"{width}x{height} pixels: nothing is left of one side at {self._width}x{self._height}")
        return size


class FuyuModel(PretrainedModel):
    """Decoder of Fuyu; its tower is one linear layer. `module` is transformers' FuyuForCausalLM."""

    projector_parts: ClassVar[tuple[str, ...]] = ("model.vision_embed_tokens",)

    def __init__(self, module: Any, spec: ModelSpec, processor: FuyuProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._scaled_mean, self._scaled_std = (
            torch.tensor(values, device=spec.device) * (1.0 / processor.rescale_factor)
            for values in (processor.mean, processor.std)
        )

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        patches = joined([self.normalized(item) for item in items]).to(self.spec.dtype)
        features: Tensor = self.module.model.vision_embed_tokens(patches)
        return list(features.split([item.shape.num_features for item in items]))

    def normalized(self, item: MediaItem) -> Tensor:
        """float32 [rows * columns, patch * patch * 3], on the device; of a pixel its colours stand together."""
        patches = from_dlpack(item.view["patches"]).to(self.spec.device)
        pixels = patches.view(len(patches), -1, 3).to(torch.float32)
        return pixels.sub_(self._scaled_mean).div_(self._scaled_std).flatten(1)


class Fuyu(Family):
    """Fuyu (Adept, 2023) over transformers' own modules."""

    model_types: ClassVar[tuple[str, ...]] = ("fuyu",)
    kinds: ClassVar[tuple[Kind, ...]] = ("image",)
    reference: ClassVar[str] = "transformers' FuyuForCausalLM"

    @classmethod
    def processor(cls, checkpoint: Checkpoint) -> FuyuProcessor:
        return FuyuProcessor(checkpoint)

    @classmethod
    def model(cls, checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> FuyuModel:
        from transformers import FuyuForCausalLM

        module, spec = load_pretrained(FuyuForCausalLM, checkpoint, device, dtype)
        return FuyuModel(module, spec, FuyuProcessor(checkpoint))


def _channels(value: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * 3


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Ids by token. The published tokenizer has those of images as pieces of its vocabulary, not as added tokens."""
    tokenizer = checkpoint.json("tokenizer.json")
    pieces = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(pieces, dict):
        pieces = {piece: index for index, (piece, _) in enumerate(pieces)}
    return {**pieces, **{added["content"]: added["id"] for added in tokenizer.get("added_tokens", ())}}
