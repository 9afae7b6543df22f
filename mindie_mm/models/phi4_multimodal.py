"""Phi-4-multimodal: images as tiles with a thumbnail, and audio clips of any length through a conformer.

Source: arXiv 2503.01743. Token ids, pixels, filter banks and logits match transformers' `phi4_multimodal` with the
adapter that belongs to the media of each prompt: the vision adapter for prompts with images, the speech adapter for
other prompts with audio clips, and none for text. Checkpoints may have transformers' layout or Microsoft's
(`_phi4_multimodal_original.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.device import Device
from mindie_mm.errors import InputError, MediaError
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.fbank import FbankSettings, write_fbank
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import check_settings, resample_of
from mindie_mm.media.image.tiles import closest_grid
from mindie_mm.models._phi4_multimodal_adapters import Adapter, adapt, read_adapters
from mindie_mm.models._phi4_multimodal_audio import clip_features, encode_clips, longest_clip
from mindie_mm.models._phi4_multimodal_long_rope import LONG_ROPE, ChosenRotary, LongRope, separated
from mindie_mm.models._phi4_multimodal_original import ORIGINAL, translated
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import context_length
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec, Positions
from mindie_mm.nn.model_inputs import Item, padded_cat
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.pixels import HALF, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.nn.weights.shares import refuse_shares
from mindie_mm.shm import ArraySpec

_SIDE, _PATCH = 448, 14
_ROWS = _SIDE // _PATCH
"""Number of patch rows in a tile. Pairs of rows and columns become features."""
_THUMBNAIL = (_ROWS // 2) ** 2 + _ROWS // 2 + 1
"""Number of features of the thumbnail, including the ends of its rows and the separator before it."""
_LEAST_SIDE = 10
"""Minimum height and width in pixels of a resized image."""
_PIXELS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": _SIDE, "width": _SIDE},
    "patch_size": _PATCH,
    "dynamic_hd": 36,
    "image_mean": HALF,
    "image_std": HALF,
}
_BICUBIC = 3
_TILES_AT_ONCE = 16
"""Maximum number of tiles that the tower encodes at once."""
_FBANK = "input_features"
_SPEECH, _WITH_IMAGES = 0, 1
"""Last number of a clip's grid, which states the projector."""
_NO_ADAPTER, _VISION_ADAPTER, _SPEECH_ADAPTER = 0, 1, 2


class Phi4MultimodalProcessor(Processor):
    """Processor for Phi-4-multimodal.

    The block of an image contains `pixel_values`, uint8 [1, height, width, 3], the image on a canvas of whole tiles.
    The grid is the number of tiles (rows, columns), and of rows and columns of patches that show the image.

    The block of a clip contains `input_features`, float32 [frames, bins]. The grid is (frames, projector).
    """

    traits = Traits(
        not_packed="its adapters and rotary frequencies are chosen for a whole row",
        grids={
            "image": "the numbers of rows and columns of tiles, and of rows and columns of patches that show the image"
        },
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        checkpoint = Phi4Multimodal.translated(checkpoint)
        config = read_config("Phi4MultimodalConfig", checkpoint)
        vision, audio = config.vision_config, config.audio_config
        self.feature_width = config.hidden_size
        self.long_rope = LongRope.read(checkpoint)
        sizes = {"image_size": _SIDE, "patch_size": _PATCH, "crop_size": _SIDE}
        check_settings(vision.to_dict(), sizes, f"{where} (vision_config)")
        whole = {"chunk_size": -1, "downsample_rate": 1, "time_reduction": 8}
        check_settings(audio.to_dict(), whole, f"{where} (audio_config)")
        names = ("Phi4MultimodalImageProcessor", "Phi4MMImageProcessor")
        image = checkpoint.preprocessor("image", dict.fromkeys(names, _PIXELS))
        needed = {"size": _PIXELS["size"], "patch_size": _PATCH, "resample": _BICUBIC, "do_resize": True}
        check_settings(image, needed, f"{where} (images)")
        self.normalizations: Mapping[Kind, Normalization] = {"image": Normalization.read(image)}
        self._most_tiles: int = image["dynamic_hd"]
        self._resample = resample_of({"resample": 2}, where)  # only the thumbnail is resized with `resample`
        names = ("Phi4MultimodalFeatureExtractor", "Phi4MMAudioFeatureExtractor")
        clips = checkpoint.preprocessor("audio", {name: {"feature_size": 80} for name in names})
        needed = {"feature_size": audio.input_size, "audio_compression_rate": 8}
        needed |= {"audio_downsample_rate": 1, "audio_feat_stride": 1}
        check_settings(clips, needed, f"{where} (audio)")
        self._fbank = FbankSettings.read(clips, f"{where} (audio)")
        self._most_frames = longest_clip(context_length(config))
        self.placeholders = {
            "image": Placeholder((), vision.image_token_id, ()),
            "audio": Placeholder((), audio.audio_token_id, ()),
        }

    def max_tokens(self, kind: Kind) -> int:
        if kind == "audio":
            return clip_features(self._most_frames)
        rows, columns = self._largest
        return _image_features((rows, columns, rows * _ROWS, columns * _ROWS))

    def worst_case(self, kind: Kind) -> Data:
        if kind == "audio":
            return np.zeros(self._fbank.num_samples(self._most_frames), np.float32)
        return np.zeros((*(side * _SIDE for side in self._largest), 3), np.uint8)

    @property
    def _largest(self) -> tuple[int, int]:
        """Rows and columns of tiles of the image with the most features.

        Each row of features ends with a further feature, so the shape of an image affects the number.
        """
        grids = ((rows, self._most_tiles // rows) for rows in range(1, self._most_tiles + 1))
        return max(grids, key=lambda grid: _image_features((*grid, grid[0] * _ROWS, grid[1] * _ROWS)))

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        if media.kind == "audio":
            return self._plan_audio(media, data, _WITH_IMAGES if counts.get("image") else _SPEECH)
        image = open_image(data)
        rows, columns = self._tiles(image.height, image.width)
        height, width = self._fitted(image.height, image.width, rows, columns)
        if min(height, width) < _LEAST_SIDE:
            raise InputError(
                f"the image of {image.width}x{image.height} pixels would be resized to {width}x{height}; the model "
                f"needs at least {_LEAST_SIDE} pixels on each side. Send an image that is less narrow"
            )

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            canvas = arrays["pixel_values"][0]
            canvas[...] = 255
            canvas[:height, :width] = resize(image.decode(), height, width, self._resample)

        patches = (
            rows * _ROWS - (rows * _SIDE - height) // _PATCH,
            columns * _ROWS - (columns * _SIDE - width) // _PATCH,
        )
        grid = (rows, columns, *patches)
        plan = Plan(
            _image_features(grid), self.specs_of("image", grid), f"phi4 {height}x{width} {self._resample}", grid
        )
        return plan, write

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = math.ceil(height / _SIDE), math.ceil(width / _SIDE)
        if rows * columns > self._most_tiles:
            return closest_grid(height, width, _SIDE, 1, self._most_tiles)
        return rows, columns

    def _fitted(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the height and width of the image on its canvas."""
        by_width, by_height = columns * _SIDE / width, rows * _SIDE / height
        if by_width < by_height:
            return int(height * by_width), columns * _SIDE
        return rows * _SIDE, int(width * by_height)

    def _plan_audio(self, media: Media, data: Data, projector: int) -> tuple[Plan, Write]:
        fbank = self._fbank
        clip = open_audio(data, media.options.sampling_rate).clip(fbank.rate, fbank.num_samples(self._most_frames))
        if not (frames := fbank.num_frames(clip.num_samples)):
            raise MediaError(
                f"the audio clip has {clip.num_samples} samples at {fbank.rate} Hz; it must have at least "
                f"{fbank.window}"
            )

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            write_fbank(clip.decode(), fbank, arrays[_FBANK])

        grid = (frames, projector)
        settings = f"sound of {media.options.sampling_rate}, {fbank}, projector {projector}"
        return Plan(clip_features(frames), self.specs_of("audio", grid), settings, grid), write

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if kind == "audio":
            is_possible = num_features <= self.max_tokens(kind)
            if grid:
                is_possible &= len(grid) == 2 and grid[1] in (_SPEECH, _WITH_IMAGES)
                is_possible = is_possible and clip_features(grid[0]) == num_features
            return Spelling() if is_possible else None
        if len(grid) != 4 or not 1 <= grid[0] * grid[1] <= self._most_tiles:
            return None
        hidden = [tiles * _ROWS - shown for tiles, shown in zip(grid[:2], grid[2:], strict=True)]
        is_possible = all(0 <= rows < _ROWS for rows in hidden) and 0 in hidden  # each tile shows a part of the image
        return Spelling() if is_possible and _image_features(grid) == num_features else None

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        if item.shape.kind == "audio":
            frames = to_device(item.view, _FBANK, device).unsqueeze(0)
            return {
                "audio_input_features": frames,
                "audio_embed_sizes": torch.tensor([item.shape.num_features]),
                "audio_attention_mask": torch.ones(frames.shape[:2], dtype=torch.bool),
            }
        rows, columns, height, width = item.shape.grid
        canvas = self.normalized(item, device)
        thumbnail = F.interpolate(canvas, (_SIDE, _SIDE), mode="bicubic", align_corners=False)
        tiles = canvas.reshape(3, rows, _SIDE, columns, _SIDE).permute(1, 3, 0, 2, 4).reshape(-1, 3, _SIDE, _SIDE)
        shown = torch.zeros(rows * _ROWS, columns * _ROWS)
        shown[:height, :width] = 1
        mask = shown.reshape(rows, _ROWS, columns, _ROWS).transpose(1, 2).flatten(0, 1)
        return {
            "image_pixel_values": torch.cat([thumbnail, tiles]).unsqueeze(0),
            "image_sizes": torch.tensor([[rows * _SIDE, columns * _SIDE]]),
            "image_attention_mask": torch.cat([torch.ones_like(mask[:1]), mask]).unsqueeze(0),
        }

    def join(self, name: str, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Join the arrays of all prompts. As in the reference, the mask of missing tiles is 1."""
        return padded_cat([array for arrays in prompts for array in arrays], int(name == "image_attention_mask"))

    def media_inputs(self, prompts: Sequence[Sequence[Item]], device: torch.device) -> dict[str, Tensor]:
        inputs = super().media_inputs(prompts, device)
        if len(inputs.get("audio_embed_sizes", ())) == 1:  # as in the reference
            del inputs["audio_attention_mask"]
        return inputs

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if not grid:
            return {}
        if kind == "audio":
            return {_FBANK: ArraySpec((grid[0], self._fbank.num_bins), "float32")}
        return {"pixel_values": ArraySpec((1, grid[0] * _SIDE, grid[1] * _SIDE, 3), "uint8")}


def _image_features(grid: Sequence[int]) -> int:
    """Return the number of features of an image."""
    rows, columns = _shown(grid)
    return rows * (columns + 1) + _THUMBNAIL


def _shown(grid: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of features that show the image, in all tiles together."""
    return -(-grid[2] // 2), -(-grid[3] // 2)


class Phi4MultimodalModel(ImageModel, PretrainedModel):
    """The Phi-4-multimodal model. `module` is transformers' `Phi4MultimodalForCausalLM`.

    The first axis of the positions advances. The second axis states the adapter, and the third the rotary frequencies.
    """

    _IMAGE = "model.embed_tokens_extend.image_embed"
    traits = Traits(
        vision_parts=(f"{_IMAGE}.img_processor.embeddings", f"{_IMAGE}.img_processor.encoder.layers"),
        projector_parts=(f"{_IMAGE}.img_projection_up", f"{_IMAGE}.img_projection_down"),
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: Phi4MultimodalProcessor) -> None:
        super().__init__(module, spec, module.model, module.lm_head)
        self._image, self._audio = (
            getattr(module.model.embed_tokens_extend, f"{kind}_embed") for kind in ("image", "audio")
        )
        # transformers leaves out a mask without padding, and sdpa then takes the tower's attention for causal.
        for part in (*self._image.img_processor.modules(), *self._audio.encoder.modules()):
            if hasattr(part, "is_causal"):
                part.is_causal = False
        layer = self._image.layer_idx
        layers = self._image.img_processor.encoder.layers
        self._layers = layers[: layer if layer >= 0 else len(layers) + 1 + layer]
        if (window := module.config.sliding_window) is not None and window >= spec.max_model_len:
            module.config.sliding_window = None  # kernels without a window are faster
        self._rotary: ChosenRotary | None = None
        self._long_rope = processor.long_rope
        if processor.long_rope is not None:
            self._rotary = module.model.rotary_emb = ChosenRotary(module.model.rotary_emb, processor.long_rope)

    def adapt(self, adapters: Sequence[Adapter], where: str) -> None:
        """Give the decoder its adapters. `where` is the name of the checkpoint in error messages."""
        self._choice = adapt(self.text_model.layers, adapters, self.spec.device, self.spec.dtype, where)

    def text_modules(self) -> list[nn.Module]:
        return [self.text_model.embed_tokens, self.text_model.layers, self.text_model.norm, self.lm_head]

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        kinds = {item.shape.kind for item in items}
        # A clip may have the projector of prompts with images although truncation has removed the images.
        sees = "image" in kinds or any(item.shape.grid[1:] == (_WITH_IMAGES,) for item in items)
        adapter = _VISION_ADAPTER if sees else _SPEECH_ADAPTER if "audio" in kinds else _NO_ADAPTER
        positions = torch.stack([torch.arange(length), torch.full((length,), adapter)])
        if self._long_rope is None:
            return Positions(positions, held_axes=1)
        return self._long_rope.positions(positions)

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        self._choice.set(positions[1])
        if self._rotary is not None:
            self._rotary.choose(positions[2])
        return self.run_text_model(hidden, positions[:1], paged)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        features = {index: self._encode_image(item) for index, item in enumerate(items) if item.shape.kind == "image"}
        clips = [index for index in range(len(items)) if index not in features]
        if clips:
            features |= dict(zip(clips, self._encode_audio([items[index] for index in clips]), strict=True))
        return [features[index] for index in range(len(items))]

    def _encode_audio(self, items: Sequence[MediaItem]) -> Iterator[Tensor]:
        banks = [to_device(item.view, _FBANK, self.spec.device).to(self.spec.dtype) for item in items]
        for item, hidden in zip(items, encode_clips(self._audio.encoder, banks), strict=True):
            projector = "vision_speech" if item.shape.grid[1:] == (_WITH_IMAGES,) else "speech"
            up, down = (getattr(self._audio, f"{half}_proj_for_{projector}") for half in ("up", "down"))
            yield down(F.gelu(up(hidden)))

    def _encode_image(self, item: MediaItem) -> Tensor:
        """Return the features of an image: its tiles row by row across all tiles, a separator, and the thumbnail."""
        (rows, columns), inputs = item.shape.grid[:2], self.processor.item_inputs(item, self.spec.device)
        pixels, shown = inputs["image_pixel_values"][0].to(self.spec.dtype), inputs["image_attention_mask"][0].bool()
        batches = zip(pixels.split(_TILES_AT_ONCE), shown.split(_TILES_AT_ONCE), strict=True)
        encoded = torch.cat([self._encode_tiles(tiles, mask) for tiles, mask in batches])
        side, width = _ROWS // 2, encoded.shape[-1]
        whole = encoded[1:].reshape(rows, columns, side, side, width).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        height, length = _shown(item.shape.grid)
        parts = [self._with_ends(whole[:height, :length]), self._image.global_img_feature_extensor[0]]
        features = torch.cat([*parts, self._with_ends(encoded[0])])
        projected: Tensor = self._image.img_projection_down(F.gelu(self._image.img_projection_up(features)))
        return projected

    def _with_ends(self, features: Tensor) -> Tensor:
        """Return features [rows, columns, width] with a feature after each row, [rows * (columns + 1), width]."""
        ends = self._image.sub_img_feature_extensor[0].expand(len(features), 1, -1)
        return torch.cat([features, ends], 1).flatten(0, 1)

    def _encode_tiles(self, pixels: Tensor, mask: Tensor) -> Tensor:
        """Return the features of tiles, [tiles, 16, 16, width].

        Args:
            pixels: Normalized tiles, [tiles, 3, side, side].
            mask: Which patches of each tile show the image, bool [tiles, rows, columns], on the host.

        """
        tower = self._image.img_processor
        on_device = mask.to(pixels.device)
        hidden = tower.embeddings(pixel_values=pixels, patch_attention_mask=on_device)
        attended = None
        if not mask.all():
            num_patches = hidden.shape[1]
            attended = on_device.view(-1, 1, 1, num_patches).expand(-1, 1, num_patches, -1)
        for layer in self._layers:
            hidden = layer(hidden, attended)
        planes = hidden.unflatten(1, (_ROWS, _ROWS)).permute(0, 3, 1, 2)
        pooled: Tensor = self._image.image_token_compression(planes).permute(0, 2, 3, 1)
        return pooled


class Phi4Multimodal(PretrainedFamily):
    """Phi-4-multimodal (Microsoft, 2025, arXiv 2503.01743), run by transformers' modules."""

    model_types = ("phi4_multimodal", ORIGINAL)
    published = "microsoft/Phi-4-multimodal-instruct"
    kinds = ("image", "audio")
    processor = Phi4MultimodalProcessor
    module_name = "Phi4MultimodalForCausalLM"
    model_class = Phi4MultimodalModel
    unused_weights = ("model.layers.*.lora_?.*.weight",)
    other_keys = (
        *(LONG_ROPE, "vision_lora", "speech_lora"),
        # Settings for training the original model, and the number of frames that its features have.
        *(f"embd_layer.{kind}_embd_layer.enable_gradient_checkpointing" for kind in ("image", "audio")),
        *(f"audio_processor.config.activation_checkpointing.{name}" for name in ("interval", "module", "offload")),
        "embd_layer.audio_embd_layer.compression_rate",
    )

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return separated(translated(checkpoint))

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        if not cls.translated(checkpoint).renamings:
            return super().tokenizer(checkpoint)
        from transformers import PreTrainedTokenizerFast  # imported late, because it is slow to import

        checkpoint.tokenizer_json()  # raises an error with advice if the file is missing
        checkpoint.check_tokenizer()
        # AutoTokenizer would read config.json, whose rotary settings it does not understand.
        return PreTrainedTokenizerFast.from_pretrained(checkpoint.path, local_files_only=True)

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Phi4MultimodalModel:
        refuse_shares(checkpoint, "has adapters, which are not divided among ranks")
        adapters = read_adapters(cls.translated(checkpoint))  # first, to report missing adapters early
        model = super().model(checkpoint, processor, device, dtype)
        assert isinstance(model, Phi4MultimodalModel)
        model.adapt(adapters, str(checkpoint.path))
        return model
