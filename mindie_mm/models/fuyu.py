"""Fuyu: patches that go straight into the decoder, row by row, with a newline token after each row.

Source: adept.ai/blog/fuyu-8b. Token ids and patches match transformers' `fuyu`. A prompt has at most one
image, which precedes the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, Pixels, open_image, resize
from mindie_mm.media.image.patches import patchify, unpatchify
from mindie_mm.media.image.preprocess import Size, check_settings, resample_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pixels import HALF, Normalization, joined
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_NEEDED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": True, "padding_mode": "constant"}
_DEFAULTS: Mapping[str, Any] = {
    "resample": 2,
    "size": {"height": 1080, "width": 1920},
    "patch_size": {"height": 30, "width": 30},
    "padding_value": 1.0,
    "image_mean": HALF,
    "image_std": HALF,
}
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
)


class FuyuProcessor(Processor):
    """Processor for Fuyu.

    A block contains `patches`, uint8 [rows * columns, patch * patch * 3]. The grid is (rows, columns), in patches.
    """

    traits = Traits(
        chat_template=_CHAT_TEMPLATE,
        inserted_at=0,
        max_items={"image": 1},
        grids={"image": "the numbers of rows and columns of patches"},
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("FuyuConfig", checkpoint)
        settings = checkpoint.preprocessor("image", {"FuyuImageProcessor": _DEFAULTS})
        check_settings(settings, _NEEDED, where)
        self._resample = resample_of(settings, where)
        size, patch = (Size.read(settings[name], where).fixed for name in ("size", "patch_size"))
        if size is None or patch != (config.patch_size, config.patch_size):
            raise UnsupportedCheckpoint(
                f"{where}: size is {settings['size']} and patch_size is {settings['patch_size']}; size must "
                f"have height and width, and patch_size must be {config.patch_size} pixels square"
            )
        (self._height, self._width), self.patch = size, patch[0]
        if self._height % self.patch or self._width % self.patch:
            raise UnsupportedCheckpoint(
                f"{where}: the image size {self._height}x{self._width} is not a multiple of the patch size "
                f"({self.patch})"
            )
        self.feature_width = config.get_text_config().hidden_size
        self._padding = int(settings["padding_value"])
        self.normalization = Normalization.read(settings)
        vocabulary = _vocabulary(checkpoint)
        try:
            self._bos, newline, answer = (vocabulary[token] for token in ("<s>", "|NEWLINE|", "<0x04>"))
            token = checkpoint.config.get("image_token_id") or vocabulary["|SPEAKER|"]
        except KeyError as error:
            raise UnsupportedCheckpoint(f"{where}: tokenizer.json has no token {error}") from error
        self._newline, self._answer = newline, answer
        self._blank = [vocabulary[piece] for piece in _prepended(checkpoint) if piece in vocabulary]
        self._token = token
        self.placeholders = {"image": Placeholder((), token, (), control_ids=(token, newline, answer))}

    def max_tokens(self, kind: Kind) -> int:
        return self._height // self.patch * (self._width // self.patch)

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((self._height, self._width, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 2 or min(grid) <= 0 or math.prod(grid) != num_features:
            return None
        rows, columns = grid
        return Spelling(runs=[[*[self._token] * columns, self._newline] * rows])

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Add the tokens around the text of a prompt with an image.

        A BOS token separates the image from the text, and a special token starts the answer.
        """
        if not num_items:
            return ids
        text = ids[1:] if ids[:1] == [self._bos] else ids
        # The reference encodes the text together with the answer token, so even an empty text gets the tokenizer's
        # prefix.
        return [self._bos, *(text or self._blank), self._answer]

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        height, width = self._size(image.height, image.width)
        patch = self.patch
        rows, columns = -(-height // patch), -(-width // patch)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            padded = np.full((rows * patch, columns * patch, 3), self._padding, np.uint8)
            padded[:height, :width] = resize(image.decode(), height, width, self._resample)
            patchify(padded, arrays["patches"].reshape(-1, patch, patch, 3), patch, 1)

        plan = Plan(
            num_features=rows * columns,
            specs=self.specs_of(media.kind, (rows, columns)),
            settings=f"fuyu {height}x{width}, {self._resample}, patch {patch}, padding {self._padding}",
            grid=(rows, columns),
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {"patches": ArraySpec((grid[0] * grid[1], self.patch**2 * 3), "uint8")}

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return normalized patches, float32 [rows * columns, patch * patch * 3].

        The three channels of a pixel are adjacent.
        """
        patches = to_device(item.view, "patches", device)
        pixels = patches.view(len(patches), self.patch, self.patch, 3)
        return self.normalization(pixels).permute(0, 2, 3, 1).flatten(1)

    def images(self, arrays: Mapping[str, np.ndarray[Any, Any]], grid: tuple[int, ...]) -> list[Pixels]:
        patches = arrays["patches"].reshape(-1, self.patch, self.patch, 3)
        return [unpatchify(patches, grid[0], grid[1], 1)]

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of an image after it is shrunk to fit the checkpoint's size. Smaller images keep their size.

        Raise LimitExceeded if no pixel of one side would be left.
        """
        if height <= self._height and width <= self._width:
            return height, width
        scale = min(self._height / height, self._width / width)
        size = int(height * scale), int(width * scale)
        if not min(size):
            raise LimitExceeded(
                f"the image has {width}x{height} pixels; one side would have no pixels when it is resized to "
                f"{self._width}x{self._height}"
            )
        return size


class FuyuModel(PretrainedModel):
    """The Fuyu model, whose tower is one linear layer. `module` is transformers' `FuyuForCausalLM`."""

    traits = Traits(projector_parts=("model.vision_embed_tokens",))

    def __init__(self, module: Any, spec: ModelSpec, processor: FuyuProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        patches = joined([self.normalized(item) for item in items]).to(self.spec.dtype)
        return split_features(self.module.model.vision_embed_tokens(patches), items)


class Fuyu(PretrainedFamily):
    """Fuyu (Adept, 2023), run by transformers' modules."""

    model_types = ("fuyu",)
    published = "adept/fuyu-8b"
    kinds = ("image",)
    processor = FuyuProcessor
    module_name = "FuyuForCausalLM"
    model_class = FuyuModel
    # The default is from transformers 4. transformers 5 sets it in a class that does not read it, and uses 10,000.
    default_theta = 25_000.0


def _prepended(checkpoint: Checkpoint) -> list[str]:
    """Return the strings that the tokenizer prepends to every text."""
    normalizer = checkpoint.json("tokenizer.json").get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    return [step["prepend"] for step in steps if step.get("type") == "Prepend"]


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the id of each token.

    In the published tokenizer, the image tokens are ordinary vocabulary entries, not added tokens.
    """
    tokenizer = checkpoint.tokenizer_json()
    pieces = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(pieces, dict):
        pieces = {piece: index for index, (piece, _) in enumerate(pieces)}
    ids = checkpoint.ids_of(tokenizer)
    added = [*ids.items()]
    ids.update(pieces)
    ids.update(added)
    return ids
