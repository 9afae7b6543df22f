"""Gemma 3n: images of one size through MobileNetV5, and audio clips through a conformer.

Each layer of the decoder has its own embedding of each token, later layers read the keys of earlier layers, and several
versions of the hidden states pass through all layers. Token ids, pixels, spectrograms and logits match transformers'
`gemma3n`. The vision tower is the package timm's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mindie_mm.device import Device, upload
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.audio.usm import UsmSettings
from mindie_mm.media.image.encoded_image import Data
from mindie_mm.media.image.preprocess import Preprocess, Size, check_settings, resample_of
from mindie_mm.models._gemma import SPECTROGRAM, clip_inputs, enclosed, planned_clip, soft_capped
from mindie_mm.models._timm import require_timm, with_timm_tower
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Plan, Spelling, Write
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.one_size import OneSizeProcessor
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.pixels import HALF, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.splice import MediaItem, Splice
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.nn.weights.shares import refuse_shares
from mindie_mm.shm import ArraySpec

_PIXELS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": 768, "width": 768},  # of all published checkpoints, which state it
    "image_mean": HALF,
    "image_std": HALF,
}
_AUDIO: Mapping[str, Any] = {
    "feature_size": 128,
    "frame_length_ms": 32.0,
    "min_frequency": 125.0,
    "max_frequency": 7600.0,
    "mel_floor": 1e-5,
    "preemphasis": 0.97,
    "fft_overdrive": True,
}
_TEXTS: Mapping[Kind, Mapping[str, str]] = {
    "image": {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
    "audio": {"boa_token": "<start_of_audio>", "audio_token": "<audio_soft_token>", "eoa_token": "<end_of_audio>"},
}
"""Keys of tokenizer_config.json for the tokens before, of and after an item, with the usual texts of these tokens."""
_TOWER = "mobilenetv5_300m_enc"
_ARGUMENTS = {"msfa_output_resolution", "block_args", "layer_scale_init_value", "stem_size"}
"""Arguments of timm's tower that config.json may state. They determine the layers."""
_TOWER_WIDTH = 2048
"""Width of the features of timm's encoder, which no setting changes."""
_MAX_SAMPLES = 480_000
"""Maximum length of an audio clip in samples. No setting of the reference raises it."""


class Gemma3nProcessor(OneSizeProcessor):
    """Processor for Gemma 3n.

    The block of an image contains `pixel_values`, uint8 [1, side, side, 3], without a grid.

    The block of an audio clip contains `input_features`, float32 [frames, bins]. The grid is (frames,). Every clip has
    the same number of features, because the model pads short clips.
    """

    traits = Traits(needs_ids=True, token_types=("token_type_ids",))

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        require_timm()
        config = read_config("Gemma3nConfig", checkpoint)
        self.feature_width = config.text_config.hidden_size
        tokens = {"image": config.image_token_id, "audio": config.audio_token_id}
        self._enclosed = {kind: "".join(enclosed(checkpoint, kind, _TEXTS[kind], tokens[kind])) for kind in _TEXTS}
        self.placeholders = {kind: Placeholder((), tokens[kind], ()) for kind in _TEXTS}
        self.num_features = config.vision_soft_tokens_per_image
        self._most_audio: int = config.audio_soft_tokens_per_image
        _check_config(config, where)
        pixels = checkpoint.preprocessor("image", {"SiglipImageProcessor": _PIXELS})
        check_settings(pixels, {"do_resize": True}, where)
        size = Size.read(pixels["size"], where, square=True)
        if size.fixed is None:
            raise UnsupportedCheckpoint(f"{where}: size={pixels['size']} must have a height and a width")
        self.size, self.steps = size.fixed, Preprocess(size, resample_of(pixels, where))
        self.normalizations = {"image": Normalization.read(pixels)}
        settings = checkpoint.preprocessor("audio", {"Gemma3nAudioFeatureExtractor": _AUDIO})
        check_settings(settings, {"feature_size": config.audio_config.input_feat_size}, f"{where} (audio)")
        self._usm = UsmSettings.read(settings, _MAX_SAMPLES, f"{where} (audio)", semicausal=False)
        longest = _num_clip_features(config.audio_config, self._usm.num_frames(_MAX_SAMPLES))
        if longest > self._most_audio:
            raise UnsupportedCheckpoint(
                f"{where}: audio_soft_tokens_per_image is {self._most_audio}, but a clip of {_MAX_SAMPLES} samples has "
                f"{longest} features"
            )
        stated = checkpoint.json("processor_config.json")
        needed = {"image_seq_length": self.num_features, "audio_seq_length": self._most_audio}
        check_settings(stated, needed, where)

    def max_tokens(self, kind: Kind) -> int:
        return self._most_audio if kind == "audio" else self.num_features

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros(_MAX_SAMPLES, np.float32) if kind == "audio" else super().worst_case(kind)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if num_features != self.max_tokens(kind):
            return None
        if grid and not (kind == "audio" and len(grid) == 1 and 0 < grid[0] <= self._usm.num_frames(_MAX_SAMPLES)):
            return None
        return Spelling(f"\n\n{self._enclosed[kind]}\n\n", [(self.placeholders[kind].token,) * num_features])

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        if media.kind != "audio":
            return super().plan(media, data, counts)
        frames, settings, write = planned_clip(media, data, self._usm)
        plan = Plan(self._most_audio, self.specs_of("audio", (frames,)), f"gemma3n {settings}", (frames,))
        return plan, write

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        return clip_inputs(item, device) if item.shape.kind == "audio" else super().item_inputs(item, device)

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if kind != "audio":
            return super().specs_of(kind, grid)
        return {SPECTROGRAM: ArraySpec((grid[0], self._usm.num_bins), "float32")} if grid else {}


def _check_config(config: Any, where: str) -> None:
    """Raise UnsupportedCheckpoint if the towers and the embeddings do not fit together."""
    text, vision, audio = config.text_config, config.vision_config, config.audio_config
    check_settings(vision.to_dict(), {"architecture": _TOWER, "hidden_size": _TOWER_WIDTH}, f"{where}: vision_config")
    arguments = vision.model_args or {}
    if unknown := sorted(arguments.keys() - _ARGUMENTS):  # timm has others that load files and weights
        raise UnsupportedCheckpoint(
            f"{where}: model_args of vision_config has {unknown}; only {sorted(_ARGUMENTS)} are supported"
        )
    side = arguments.get("msfa_output_resolution", 16)
    check_settings(config.to_dict(), {"vision_soft_tokens_per_image": side**2}, where)
    stops = [embedder.vocab_offset + embedder.vocab_size for embedder in (vision, audio)]
    if stops != [audio.vocab_offset, text.vocab_size]:
        raise UnsupportedCheckpoint(
            f"{where}: the vocabularies of vision_config and audio_config stop before {stops}; they must stop where "
            f"those of audio_config and of text_config do, before {[audio.vocab_offset, text.vocab_size]}"
        )


def _num_clip_features(audio: Any, num_frames: int) -> int:
    """Return the number of features of an audio clip before padding. Convolutions and the tower reduce the frames."""
    for stride, _ in audio.sscp_conv_stride_size:
        num_frames = -(-num_frames // stride)
    num_features: int = -(-num_frames // audio.conf_reduction_factor)
    return num_features


class _SparseMLP(nn.Module):
    """A `Gemma3nTextMLP` with sparse activations. transformers' own copies a number to the device in each call."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )
        deviations = torch.tensor(NormalDist().inv_cdf(mlp.activation_sparsity), dtype=torch.float32)
        self._deviations = float(deviations.to(mlp.gate_proj.weight.dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.gate_proj(hidden)
        mean, deviation = gate.mean(-1, keepdim=True), gate.std(-1, keepdim=True, unbiased=False)
        sparse = torch.relu(gate - (mean + deviation * self._deviations))
        out: Tensor = self.down_proj(self.act_fn(sparse) * self.up_proj(hidden))
        return out


class Gemma3nModel(ImageModel, PretrainedModel):
    """The Gemma 3n model. `module` is transformers' `Gemma3nForConditionalGeneration`."""

    traits = Traits(needs_ids=True, vision_parts=("model.vision_tower",), projector_parts=("model.embed_vision",))

    def __init__(self, module: Any, spec: ModelSpec, processor: Gemma3nProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self._config = module.config
        self._media_rows = self._embed_media_tokens()
        for layer in self.text_model.layers:
            if layer.mlp.activation_sparsity:
                layer.mlp = _SparseMLP(layer.mlp)

    @torch.inference_mode()
    def _embed_media_tokens(self) -> Tensor:
        """Return the embeddings of the tokens of both vocabularies for media, [tokens, hidden]."""
        rows = []
        for embedder in (self.module.model.embed_vision, self.module.model.embed_audio):
            ids = torch.arange(embedder.vocab_size, device=self.spec.device) + embedder.vocab_offset
            rows.append(embedder(input_ids=ids))
        return torch.cat(rows)

    def embed(self, input_ids: Tensor) -> Tensor:
        places = input_ids - self._config.vision_config.vocab_offset
        media = self._media_rows[places.clamp(min=0)]
        return torch.where((places >= 0).unsqueeze(-1), media, super().embed(input_ids))

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for kind, encode in (("image", self._encode_images), ("audio", self._encode_audio)):
            indices = [index for index, item in enumerate(items) if item.shape.kind == kind]
            if indices:
                found |= dict(zip(indices, encode([items[index] for index in indices]), strict=True))
        return [found[index] for index in range(len(items))]

    def _encode_images(self, items: Sequence[MediaItem]) -> list[Tensor]:
        planes = self.module.model.vision_tower(self.pixels(items))
        rows = planes.flatten(2).transpose(1, 2) * math.sqrt(_TOWER_WIDTH)
        return list(self.module.model.embed_vision(inputs_embeds=rows))

    def _encode_audio(self, items: Sequence[MediaItem]) -> list[Tensor]:
        """Encode each clip as if it were alone. The features of the last token pad clips that have too few."""
        model, device, most = self.module.model, self.spec.device, self._config.audio_soft_tokens_per_image
        tower, config = model.audio_tower, self._config.audio_config
        clips = [to_device(item.view, SPECTROGRAM, device).to(self.spec.dtype) for item in items]
        # One by one, because the convolutions at the end of a clip must not see the padding of a batch.
        parts = [tower.subsample_conv_projection(clip.unsqueeze(0)).squeeze(0) for clip in clips]
        lengths = torch.tensor([len(part) for part in parts])
        hidden = pad_sequence(parts, batch_first=True)
        is_padding = upload(torch.arange(hidden.shape[1]) >= lengths.unsqueeze(1), device)
        for block in tower.conformer:
            hidden = block(hidden, is_padding)
        features = model.embed_audio(inputs_embeds=hidden[:, :: config.conf_reduction_factor])
        counts = [_num_clip_features(config, len(clip)) for clip in clips]
        filler = self._media_rows[-1:]
        return [
            torch.cat([rows[:count], filler.expand(most - count, -1)])
            for rows, count in zip(features, counts, strict=True)
        ]

    def layer_inputs(self, input_ids: Tensor, hidden: Tensor, splices: Sequence[Splice]) -> Tensor | None:
        """Return the embeddings of each token for all layers, [T, layers * width].

        Tokens for media have the embeddings of token 0.
        """
        ids = input_ids.masked_fill(input_ids >= self._config.text_config.vocab_size_per_layer_input, 0)
        embedded: Tensor = self.text_model.embed_tokens_per_layer(ids)
        return embedded

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        assert extra is not None, "`layer_inputs` always returns embeddings"
        per_layer = extra.view(1, len(hidden), self._config.text_config.num_hidden_layers, -1)
        return self.run_text_model(hidden, positions, paged, per_layer_inputs=per_layer)

    def head(self, hidden: Tensor) -> Tensor:
        return soft_capped(super().head(hidden), self._config.text_config.final_logit_softcapping)


class Gemma3n(PretrainedFamily):
    """Gemma 3n (Gemma Team, 2025), run by transformers' and timm's modules."""

    model_types = ("gemma3n",)
    published = "google/gemma-3n-E2B-it"
    kinds = ("image", "audio")
    processor = Gemma3nProcessor
    module_name = "Gemma3nForConditionalGeneration"
    model_class = Gemma3nModel

    @classmethod
    def module_class(cls) -> type[Any]:
        return with_timm_tower(super().module_class())

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Any:
        # The sparsity of a layer depends on all its activations, of which each rank would have a part.
        refuse_shares(checkpoint, "has sparse activations, which ranks cannot share")
        return super().model(checkpoint, processor, device, dtype)
