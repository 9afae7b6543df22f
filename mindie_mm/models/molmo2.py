"""Molmo 2: overlapping crops or video frames, attention pooling, and image tokens that all attend to each other.

Source: allenai/Molmo2. Token ids, pixels and logits match transformers' `molmo2`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.device import upload
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media, MediaOptions
from mindie_mm.media.image.encoded_image import Data, Pixels, open_image
from mindie_mm.media.image.preprocess import Size, check_settings
from mindie_mm.media.video.encoded_video import Video, open_video
from mindie_mm.media.video.frames import check_asked, comes_sampled, num_taken, stepped
from mindie_mm.models._crops import Geometry, choose_tiling, cut_crops, cut_patches, only_tiling
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import context_length
from mindie_mm.nn.family import Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import PIXELS, Item
from mindie_mm.nn.pixels import HALF, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, split_features
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec

_WHOLE, _DETAIL, _FRAMES = "whole", "detail", "frames"
_DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 378, "width": 378},
    "patch_size": 14,
    "image_mean": HALF,
    "image_std": HALF,
}
_IMAGE: Mapping[str, Any] = {**_DEFAULTS, "max_crops": 8, "overlap_margins": (4, 4), "pooling_size": (2, 2)}
_VIDEO: Mapping[str, Any] = {
    **_DEFAULTS,
    "num_frames": 64,
    "max_fps": 2,
    "pooling_size": (3, 3),
    # These settings are off by default in the reference's class. A checkpoint must turn them on.
    "do_rescale": False,
    "do_normalize": False,
}
_PATCH = "<im_patch>"


class Molmo2Processor(Processor):
    """Processor for Molmo 2.

    The block of an image contains the image at two sizes, uint8 [height, width, 3]: the square `whole`, and `detail`
    for the crops. Its grid is the number of crops (rows, columns). The block of a video contains `frames`, uint8
    [frames, side, side, 3]. Its grid is the time of each frame in tenths of a second.
    """

    traits = Traits(
        max_items={"video": 1},
        mixes_kinds=False,
        splice_adds=True,
        token_types=("mm_token_type_ids",),
        not_packed="all images of a row attend to each other",
        frames_only_media_in_vllm=True,
        grids={
            "image": "the numbers of rows and columns of crops",
            "video": "the time of each frame in tenths of a second",
        },
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        config = read_config("Molmo2Config", checkpoint)
        text = config.get_text_config()
        self.feature_width = text.hidden_size
        self.num_embeddings = text.vocab_size + text.additional_vocab_size
        image = checkpoint.preprocessor("image", {"Molmo2ImageProcessor": _IMAGE})
        video = checkpoint.preprocessor("video", {"Molmo2VideoProcessor": _VIDEO})
        # The reference rejects videos if both fps and num_frames are set.
        check_settings(video, {"do_sample_frames": True, "fps": None}, where)
        self.geometries: Mapping[Kind, Geometry] = {
            "image": _geometry(image, config, where),
            "video": _geometry(video, config, where),
        }
        self.normalizations: Mapping[Kind, Normalization] = {
            "image": Normalization.read(image),
            "video": Normalization.read(video),
        }
        self._max_crops: int = image["max_crops"]
        rows, columns = self.geometries["video"].square_cells
        self._frame_features = rows * columns
        positions = context_length(config.get_text_config())
        self._max_frames: int = max(1, min(video["num_frames"], positions // self._frame_features))
        self._max_fps: float = video["max_fps"]
        self._bos = checkpoint.token_id(checkpoint.require_special_token("bos_token", "eos_token"))
        self._read_tokens(checkpoint, config)

    def _read_tokens(self, checkpoint: Checkpoint, config: Any) -> None:
        stated = checkpoint.json("processor_config.json")
        patch, column = checkpoint.token_id(_PATCH), checkpoint.token_id("<im_col>")
        if patch != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: image_patch_id is {config.image_token_id}, but the tokenizer's id of {_PATCH!r} "
                f"is {patch}"
            )
        columns: bool = stated.get("image_use_col_tokens", True)
        whole_columns = stated.get("use_single_crop_col_tokens")
        small = stated.get("use_single_crop_start_token", True)
        frame = "frame" if stated.get("use_frame_special_tokens", True) else "im"
        frame_columns: bool = stated.get("video_use_col_tokens", False)
        names = ("<low_res_im_start>" if small else "<im_start>", "<im_start>", "<im_end>")
        self._start_whole, self._start, self._end = (checkpoint.token_id(name) for name in names)
        self._frame_ends = tuple(checkpoint.token_id(f"<{frame}_{name}>") for name in ("start", "end"))
        self._row_ends = {
            _WHOLE: [column] if (columns if whole_columns is None else whole_columns) else [],
            _DETAIL: [column] if columns else [],
            _FRAMES: [column] if frame_columns else [],
        }
        self.tails: Mapping[Kind, int] = {"image": 1 + columns, "video": 1 + frame_columns}
        """Number of tokens after the last feature of each run of image tokens, by kind of media."""
        markers: Mapping[Kind, str] = {
            kind: checkpoint.special_token(f"{kind}_token") or f"<|{kind}|>" for kind in self.geometries
        }
        self.placeholders = {kind: Placeholder((), patch, (), marker) for kind, marker in markers.items()}

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        return ids if ids[:1] == [self._bos] else [self._bos, *ids]

    def max_tokens(self, kind: Kind) -> int:
        if kind == "video":
            return self._max_frames * self._frame_features
        return max(self._image_features(*tiling) for tiling in self._tilings())

    def worst_case(self, kind: Kind) -> Data:
        if kind == "video":
            return np.zeros((self._max_frames, 1, 1, 3), np.uint8)
        tiling = max(self._tilings(), key=lambda tiling: self._image_features(*tiling))
        return np.zeros((*self.geometries["image"].canvas(*tiling), 3), np.uint8)

    def _tilings(self) -> list[tuple[int, int]]:
        """Return the largest tilings (rows, columns) that the limit on crops allows."""
        return [(rows, self._max_crops // rows) for rows in range(1, self._max_crops + 1)]

    def _image_features(self, rows: int, columns: int) -> int:
        geometry = self.geometries["image"]
        return math.prod(geometry.square_cells) + math.prod(geometry.cells(rows, columns))

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if kind == "video":
            is_possible = min(grid, default=-1) >= 0 and len(grid) * self._frame_features == num_features
            return self._spell_video(grid) if is_possible else None
        if len(grid) != 2 or min(grid) <= 0 or self._image_features(*grid) != num_features:
            return None
        geometry = self.geometries["image"]
        run = (
            *(self._start_whole, *self._rows(_WHOLE, *geometry.square_cells), self._end),
            *(self._start, *self._rows(_DETAIL, *geometry.cells(*grid)), self._end),
        )
        return Spelling(_PATCH, [run])

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...] | None:
        if kind == "video":
            return None
        return only_tiling(self._max_crops, lambda *grid: self._image_features(*grid) == num_features)

    def _spell_video(self, grid: tuple[int, ...]) -> Spelling:
        start, end = self._frame_ends
        run = (start, *self._rows(_FRAMES, *self.geometries["video"].square_cells), end)
        return Spelling(" ".join(f"{time // 10}.{time % 10} {_PATCH}" for time in grid), [run] * len(grid))

    def _rows(self, part: str, rows: int, columns: int) -> list[int]:
        return ([self.placeholders["image"].token] * columns + self._row_ends[part]) * rows

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        if media.kind == "video":
            return self._plan_video(media, data)
        image, geometry = open_image(data), self.geometries["image"]
        height, width = image.height - geometry.shared, image.width - geometry.shared
        rows, columns = choose_tiling(height, width, geometry.step, self._max_crops)
        specs = self.specs_of(media.kind, (rows, columns))

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            values = _as_planes(image.decode())
            for name in specs:
                _resize(values, arrays[name])

        plan = Plan(
            num_features=self._image_features(rows, columns),
            specs=specs,
            settings=f"molmo2 {rows}x{columns} crops, {geometry}",
            grid=(rows, columns),
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        geometry = self.geometries[kind]
        if kind == "video":
            return {_FRAMES: ArraySpec((len(grid), geometry.side, geometry.side, 3), "uint8")}
        sizes = {_WHOLE: (geometry.side, geometry.side), _DETAIL: geometry.canvas(*grid)}
        return {name: ArraySpec((*size, 3), "uint8") for name, size in sizes.items()}

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return normalized patches, float32 [squares, patches, patch * patch * 3].

        The squares of an image are the whole image, followed by its crops. The squares of a video are its frames.
        """
        kind = item.shape.kind
        geometry, arrays = self.geometries[kind], item.view
        if kind == "video":
            squares = to_device(arrays, _FRAMES, device)
        else:
            whole, detail = (to_device(arrays, name, device) for name in (_WHOLE, _DETAIL))
            squares = torch.cat([whole.unsqueeze(0), cut_crops(detail, geometry.side, geometry.step)])
        return cut_patches(self.normalizations[kind](squares).permute(0, 2, 3, 1), geometry.patch)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        """Return the patches, and for each feature, the numbers of the patches that it pools.

        The number is -1 for a missing patch.
        """
        kind, grid, patches = item.shape.kind, item.shape.grid, self.normalized(item, device)
        geometry = self.geometries[kind]
        square, size = geometry.square_windows(), geometry.patches**2
        cells = geometry.square_cells
        if kind == "video":
            windows = _moved(square, torch.arange(len(grid)).view(-1, 1, 1) * size).flatten(0, 1)
            about = {"video_grids": torch.tensor([[len(grid), *cells]])}
        else:
            windows = torch.cat([square, _moved(geometry.canvas_windows(*grid), size)]).int()
            about = {
                "image_grids": torch.tensor([[*cells, *geometry.cells(*grid)]]),
                "image_num_crops": torch.tensor([len(patches)]),
            }
        return {PIXELS[kind]: patches, f"{kind}_token_pooling": windows, **about}

    def media_inputs(self, prompts: Sequence[Sequence[Item]], device: torch.device) -> dict[str, Tensor]:
        """Return the arrays of a batch. The patches of all items of a kind are numbered together."""
        inputs = super().media_inputs(prompts, device)
        for kind, geometry in self.geometries.items():
            items = [item for own in prompts for item in own if item.shape.kind == kind]
            squares = [len(i.shape.grid) if kind == "video" else 1 + math.prod(i.shape.grid) for i in items]
            starts = np.cumsum([0, *squares[:-1]]) * geometry.patches**2
            if items:
                offsets = np.repeat(starts, [item.shape.num_features for item in items])
                windows = inputs[f"{kind}_token_pooling"]
                inputs[f"{kind}_token_pooling"] = _moved(windows, torch.from_numpy(offsets).to(windows).unsqueeze(1))
        return inputs

    def token_inputs(self, ids: NDArray[np.int64], items: Sequence[Item]) -> dict[str, Tensor]:
        (name,) = self.traits.token_types
        return super().token_inputs(ids, items) | {name: self.token_types(len(ids), items)}

    def token_types(self, length: int, items: Sequence[Item]) -> Tensor:
        """Return 1 for all image tokens, with start, column and end tokens, but not for the times of video frames."""
        types = torch.zeros(length, dtype=torch.int64)
        for item in items:
            runs = 1 if item.shape.kind == "image" else len(item.shape.grid)
            for run in item.slots.reshape(runs, -1):
                types[run[0] - 1 : run[-1] + 1 + self.tails[item.shape.kind]] = 1
        return types

    def _plan_video(self, media: Media, data: Data) -> tuple[Plan, Write]:
        video, geometry = open_video(data, media.options.sample_fps), self.geometries["video"]
        fps = video.fps or self._max_fps  # the reference's assumption for frames without a rate
        indices = self._sample(video, fps, media.options)
        # Use float32 as in the reference, because the precision decides how times between two tenths are rounded.
        times = tuple(int(f"{time:.1f}".replace(".", "")) for time in (indices / fps).tolist())
        taken: list[int] = indices.tolist()
        video.count(taken)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            for place, frame in zip(arrays[_FRAMES], video.decode(taken), strict=True):
                _resize(_as_planes(frame), place)

        plan = Plan(
            num_features=len(taken) * self._frame_features,
            specs=self.specs_of("video", times),
            settings=f"molmo2 frames {taken}, {geometry}",
            grid=times,
        )
        return plan, write

    def _sample(self, video: Video, fps: float, options: MediaOptions) -> Tensor:
        """Return the ascending int32 indices of the frames to sample from a video with frame rate `fps`.

        Raises:
            InputError: This video cannot satisfy the options.
            LimitExceeded: The options ask for more frames than the model accepts.

        """
        check_asked(video, options)
        total = video.num_frames
        seconds = total / fps
        if comes_sampled(video, options):
            own = total
        elif options.fps is not None:
            own = int(seconds * options.fps)
        else:
            own = min(self._max_frames, int(seconds * self._max_fps)) if fps > self._max_fps else self._max_frames
        count = num_taken(own, video, options, self._max_frames)
        return torch.tensor(stepped(total, count), dtype=torch.int32)


def _moved(windows: Tensor, offset: Tensor | int) -> Tensor:
    """Add `offset` to all patch indices of `windows` except -1."""
    return torch.where(windows < 0, windows, windows + offset)


def _geometry(settings: Mapping[str, Any], config: Any, where: str) -> Geometry:
    """Return the geometry of images or videos. Raise UnsupportedCheckpoint if the tower does not accept it."""
    check_settings(settings, {"resample": 2}, where)
    size, patch, vision = Size.read(settings["size"], where, square=True), settings["patch_size"], config.vision_config
    side = size.height or 0
    fits = size.width == side and patch == vision.patch_size and side % patch == 0
    if not fits or (side // patch) ** 2 != vision.num_position_embeddings:
        raise UnsupportedCheckpoint(
            f"{where}: size is {settings['size']} and patch_size is {patch}, but the tower takes "
            f"{vision.num_position_embeddings} patches of {vision.patch_size} pixels"
        )
    high, wide = settings["pooling_size"]
    before, after = settings.get("overlap_margins", (0, 0))
    if min(high, wide) < 1 or min(before, after) < 0 or before + after >= side // patch:
        raise UnsupportedCheckpoint(
            f"{where}: pooling_size {(high, wide)} and overlap_margins {(before, after)} do not fit "
            f"{side // patch} patches per side"
        )
    return Geometry(side, patch, (high, wide), (before, after))


def _as_planes(rgb: Pixels) -> Tensor:
    """Convert uint8 [H, W, 3] to float32 [1, 3, H, W] in channels_last format, in which a resize is much faster."""
    return torch.from_numpy(np.asarray(rgb, np.float32)).unsqueeze(0).permute(0, 3, 1, 2)


def _resize(values: Tensor, out: Pixels) -> None:
    """Resize float32 [1, 3, H, W] in [0, 255] into `out`, uint8 [height, width, 3].

    The resize is bilinear, in float32 and without antialiasing.
    """
    resized = F.interpolate(values, out.shape[:2], mode="bilinear", align_corners=False)
    torch.from_numpy(out).copy_(resized.round_()[0].permute(1, 2, 0))


class Molmo2Model(PretrainedModel):
    """The Molmo 2 model. `module` is transformers' `Molmo2ForConditionalGeneration`."""

    traits = Traits(
        vision_parts=("model.vision_tower",),
        projector_parts=(
            "model.multi_modal_projector.image_pooling_2d",
            "model.multi_modal_projector.image_projector",
        ),
        splice_adds=True,
        joins_items=True,
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: Molmo2Processor) -> None:
        text = module.model.language_model
        super().__init__(module, replace(spec, embedding_size=processor.num_embeddings), text, module.lm_head)
        self._processor = processor

    def bidirectional_spans(self, length: int, items: Sequence[MediaItem]) -> Tensor | None:
        """Return one span that covers the image tokens of all items.

        The span includes start, column and end tokens, but not the times of video frames.
        """
        return self._processor.token_types(length, items) - 1 if items else None

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        features: dict[MediaItem, Tensor] = {}
        for kind in PIXELS:  # each kind separately, because windows differ in size
            if own := [item for item in items if item.shape.kind == kind]:
                features.update(zip(own, self._features_of(own), strict=True))
        return [features[item] for item in items]

    def _features_of(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Return the features of each item. All items must be of one kind."""
        kind, inputs = items[0].shape.kind, self._processor.media_inputs([items], self.spec.device)
        return split_features(self._pooled(inputs[PIXELS[kind]], inputs[f"{kind}_token_pooling"].long()), items)

    def _pooled(self, patches: Tensor, windows: Tensor) -> Tensor:
        """Pool patches [n, patches, values] to features [features, hidden].

        `windows` is an int64 tensor [features, patches of a window] on the host. The computation is the same as in
        `Molmo2Model.get_image_features`, but does not wait for the device. The reference waits twice. First, it checks
        whether windows lack patches, and here the host can check this. Second, it checks whether a window is empty,
        and no window is ever empty.
        """
        model, device = self.module.model, self.spec.device
        states = model.vision_tower(patches, output_hidden_states=True).hidden_states
        layers = model.config.adapter_config.vision_feature_layer
        values = torch.cat([states[layer + 1 if layer >= 0 else layer] for layer in layers], dim=-1).flatten(0, 1)
        pooled = values[upload(windows.clamp(min=0), device)]
        present, seen = windows >= 0, None
        if not present.all():
            seen = upload(present, device)
            pooled = pooled * seen.unsqueeze(-1).to(pooled.dtype)
        counts = upload(present.sum(-1).to(pooled.dtype), device)
        query = pooled.sum(-2, keepdim=True) / counts.view(-1, 1, 1)
        adapter = model.multi_modal_projector
        # One mask row per head. With grouped keys, an NPU does not accept a mask that broadcasts over heads.
        mask = None if seen is None else seen[:, None, None].expand(-1, adapter.config.num_attention_heads, -1, -1)
        features: Tensor = adapter.image_projector(
            adapter.image_pooling_2d(query, pooled, attention_mask=mask)[0].squeeze(1)
        )
        return features


class Molmo2(PretrainedFamily):
    """Molmo 2 (Allen Institute for AI, 2025), run by transformers' modules."""

    model_types = ("molmo2",)
    published = "allenai/Molmo2-8B"
    kinds = ("image", "video")
    processor = Molmo2Processor
    module_name = "Molmo2ForConditionalGeneration"
    model_class = Molmo2Model
