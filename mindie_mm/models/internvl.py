"""InternVL: images as a grid of tiles and a thumbnail, videos as numbered frames.

Source: arXiv 2504.10479. Token ids, pixels and logits match transformers' `internvl`.

Checkpoints may have transformers' layout or the layout of OpenGVLab, whose model_type is internvl_chat. The
second layout is translated in memory by the rules of transformers' convert_internvl_weights_to_hf.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mindie_mm.errors import CorruptReference, InputError, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image, resize
from mindie_mm.media.image.preprocess import Size, check_output_size, check_settings, resample_of
from mindie_mm.media.image.tiles import closest_grid, cut
from mindie_mm.media.video.encoded_video import open_video
from mindie_mm.media.video.frames import Sampling, comes_sampled, stepped
from mindie_mm.nn.checkpoint.directory import Checkpoint, with_special_tokens
from mindie_mm.nn.checkpoint.renaming import Renaming, grouped, third
from mindie_mm.nn.family import Placeholder, Plan, PretrainedFamily, Processor, Spelling
from mindie_mm.nn.mindie import PLANES, InSegment, Layout
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.pictures import PictureModel
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD, Normalization
from mindie_mm.nn.splice import MediaItem, MediaShape, split_features
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import PretrainedModel, read_config
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.mindie import SegmentsView

_DEFAULTS: Mapping[str, Any] = {
    "resample": 3,
    "size": {"height": 384, "width": 384},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "min_patches": 1,
    "max_patches": 12,
    "initial_shift": True,
}
# Layouts of the handle words that MindIE's own processor writes. Each frame of a video has its own words.
_MINDIE: Mapping[Kind, Layout] = {
    kind: Layout((InSegment(PLANES, "uint8"),), per_run=kind == "video") for kind in ("image", "video")
}
_TOKENS = ("context_image_token", "start_image_token", "end_image_token", "video_token")

ORIGINAL = "internvl_chat"
"""model_type of checkpoints in OpenGVLab's layout."""
_CONVERTED = "use a repository in transformers' layout, such as OpenGVLab/InternVL3-1B-hf"
_SPELLED = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
"""Texts of special tokens in OpenGVLab's layout.

The original tokenizer has the first three tokens. The fourth occurs only in prompts and is replaced before encoding.
"""
_CHAT_DEFAULTS: Mapping[str, Any] = {
    "select_layer": -1,
    "force_image_size": None,
    "downsample_ratio": 0.5,
    "dynamic_image_size": False,
    "use_thumbnail": False,
    "ps_version": "v1",
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "pad2square": False,
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
}
"""Defaults of the original configuration class."""
_TRANSLATED = {*_CHAT_DEFAULTS, "template", "vision_config", "llm_config"}
"""Keys of the original config.json that transformers' configuration expresses differently."""
_VISION_DEFAULTS: Mapping[str, Any] = {
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 224,
    "qkv_bias": False,
    "hidden_size": 3200,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "qk_normalization": True,
    "num_hidden_layers": 48,
    "hidden_act": "gelu",
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
}
"""Defaults of the original tower. transformers has different defaults."""
_INTERNLM2 = "InternLM2ForCausalLM"
_TEXT_MODELS = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    _INTERNLM2: "llama",
}
"""transformers' model_type of each supported language model, by the name of its class in the original layout."""
_INTERNLM2_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 103168,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "bias": True,
}
"""Defaults of the InternLM2 configuration class."""
_ATTENTION_KEYS = {"attn_implementation", "_attn_implementation", "_attn_implementation_autoset"}
_CHATML = ("internvl2_5", "internlm2-chat", "Hermes-2")
"""Conversation templates of the original code that enclose turns in <|im_start|> and <|im_end|>."""
_TURN_END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template of transformers' conversion script. It adds no system message."""
_LAYER = r"model\.vision_tower\.encoder\.layer\.(\d+)\."
_PUBLISHED_LAYER = r"vision_model.encoder.layers.\1"
_RENAMINGS = (
    Renaming(r"model\.vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    Renaming(r"model\.vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    Renaming(
        r"model\.vision_tower\.embeddings\.patch_embeddings\.projection\.(\w+)",
        r"vision_model.embeddings.patch_embedding.\1",
    ),
    *(
        Renaming(rf"{_LAYER}attention\.{part}_proj\.(\w+)", rf"{_PUBLISHED_LAYER}.attn.qkv.\2", third(index))
        for index, part in enumerate("qkv")
    ),
    Renaming(rf"{_LAYER}attention\.projection_layer\.(\w+)", rf"{_PUBLISHED_LAYER}.attn.proj.\2"),
    Renaming(rf"{_LAYER}attention\.([qk]_norm)\.(\w+)", rf"{_PUBLISHED_LAYER}.attn.\2.\3"),
    Renaming(rf"{_LAYER}layernorm_before\.(\w+)", rf"{_PUBLISHED_LAYER}.norm1.\2"),
    Renaming(rf"{_LAYER}layernorm_after\.(\w+)", rf"{_PUBLISHED_LAYER}.norm2.\2"),
    Renaming(rf"{_LAYER}lambda_(\d)", rf"{_PUBLISHED_LAYER}.ls\2"),
    Renaming(rf"{_LAYER}mlp\.(.+)", rf"{_PUBLISHED_LAYER}.mlp.\2"),
    Renaming(r"model\.multi_modal_projector\.layer_norm\.(\w+)", r"mlp1.0.\1"),
    Renaming(r"model\.multi_modal_projector\.linear_1\.(\w+)", r"mlp1.1.\1"),
    Renaming(r"model\.multi_modal_projector\.linear_2\.(\w+)", r"mlp1.3.\1"),
)
_LANGUAGE_RENAMINGS = (
    Renaming(r"model\.language_model\.(.+)", r"language_model.model.\1"),
    Renaming(r"lm_head\.weight", "language_model.lm_head.weight"),
)
_INTERNLM2_LAYER = r"model\.language_model\.layers\.(\d+)\."
_INTERNLM2_PUBLISHED_LAYER = r"language_model.model.layers.\1"
_INTERNLM2_RENAMINGS = (
    Renaming(r"model\.language_model\.embed_tokens\.weight", "language_model.model.tok_embeddings.weight"),
    Renaming(rf"{_INTERNLM2_LAYER}self_attn\.o_proj\.(\w+)", rf"{_INTERNLM2_PUBLISHED_LAYER}.attention.wo.\2"),
    *(
        Renaming(rf"{_INTERNLM2_LAYER}{ours}\.weight", rf"{_INTERNLM2_PUBLISHED_LAYER}.{theirs}.weight")
        for ours, theirs in (
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.down_proj", "feed_forward.w2"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        )
    ),
    Renaming(r"lm_head\.weight", "language_model.output.weight"),
    _LANGUAGE_RENAMINGS[0],
)


class InternVLProcessor(Processor):
    """Processor for InternVL. A block contains `pixel_values`, uint8 [tiles, side, side, 3]. The grid is (tiles,).

    In MindIE's wire format, an image has `planes`, uint8 [tiles, 3, side, side], and so does each frame of a video.
    """

    traits = Traits(mindie_layouts=_MINDIE)

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = _translated(checkpoint)
        self._original = checkpoint.renamings is not None
        where = str(checkpoint.path)
        config = read_config("InternVLConfig", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        self.side, self.tile_features = _tile(config, where)
        check_settings(checkpoint.json("processor_config.json"), {"image_seq_length": self.tile_features}, where)
        spelled = {name: checkpoint.require_special_token(name) for name in _TOKENS}
        context, start, end = (checkpoint.token_id(spelled[name]) for name in _TOKENS[:3])
        if context != config.image_token_id:
            raise UnsupportedCheckpoint(
                f"{where}: image_token_id is {config.image_token_id}, but the tokenizer's id of "
                f"{spelled[_TOKENS[0]]!r} is {context}"
            )
        self.placeholders = {
            "image": Placeholder((), context, ()),
            "video": Placeholder((), context, (), spelled["video_token"]),
        }
        self._context, self._start, self._end = spelled["context_image_token"], start, end
        # crop_to_patches is ignored, because the reference's processor always asks for tiles.
        image = checkpoint.preprocessor("image", {"GotOcr2ImageProcessor": _DEFAULTS})
        video = checkpoint.preprocessor("video", {"InternVLVideoProcessor": _DEFAULTS})
        check_settings(video, {"do_resize": True, "do_center_crop": False}, where)
        for settings in (image, video):
            check_output_size(Size.read(settings["size"], where).fixed, self.side, where)
        self._least: int = image["min_patches"]
        self._most: int = image["max_patches"]
        self._resamples = {"image": resample_of(image, where), "video": resample_of(video, where)}
        self.normalizations: Mapping[Kind, Normalization] = {
            "image": Normalization.read(image),
            "video": Normalization.read(video),
        }
        self._shift: bool | float = video["initial_shift"]
        # Each frame also needs a start token and an end token.
        positions: int = config.get_text_config().max_position_embeddings
        self._sampling = Sampling.read(video, positions // (self.tile_features + 2))

    def template(self, own: str | None, tokenizers: str | None, kinds: Collection[Kind]) -> str | None:
        """Return the chat template.

        In OpenGVLab's layout, the tokenizer's template is ignored, because it handles only text.
        """
        return (own or CHAT_TEMPLATE) if self._original else super().template(own, tokenizers, kinds)

    def max_tokens(self, kind: Kind) -> int:
        tiles = self._sampling.limit if kind == "video" else _with_thumbnail(self._most)
        return tiles * self.tile_features

    def worst_case(self, kind: Kind) -> Data:
        if kind == "video":
            return np.zeros((self._sampling.limit, self.side, self.side, 3), np.uint8)
        return np.zeros((self.side, self._most * self.side, 3), np.uint8)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 1 or grid[0] * self.tile_features != num_features:
            return None
        tiles = grid[0]
        if kind == "image":
            return Spelling(runs=[self._run(tiles)])
        text = "\n".join(f"Frame{number}: {self._context}" for number in range(1, tiles + 1))
        return Spelling(text, [self._run(1)] * tiles)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> Plan:
        return self._plan_video(media, data) if media.kind == "video" else self._plan_image(data)

    def _run(self, tiles: int) -> Sequence[int]:
        return (self._start, *[self.placeholders["image"].token] * (tiles * self.tile_features), self._end)

    def _plan_image(self, data: Data) -> Plan:
        image = open_image(data)
        side, resample = self.side, self._resamples["image"]
        rows, columns = closest_grid(image.height, image.width, side, self._least, self._most)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb, tiles = image.decode(), _tiles(arrays)
            cut(resize(rgb, rows * side, columns * side, resample), tiles[: rows * columns])
            if len(tiles) > rows * columns:
                tiles[-1] = resize(rgb, side, side, resample)

        return self._plan(
            _with_thumbnail(rows * columns), f"{rows}x{columns} tiles of {side}, thumbnail, {resample}", write
        )

    def _plan_video(self, media: Media, data: Data) -> Plan:
        video = open_video(data, media.options.sample_fps)
        total, count = video.num_frames, self._sampling.count(video, media.options)
        whole = count == total and comes_sampled(video, media.options)
        indices = list(range(total)) if whole else self._sample(total, count)
        video.count(indices)
        side, resample = self.side, self._resamples["video"]

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            for place, frame in zip(_tiles(arrays), video.decode(indices), strict=True):
                place[...] = resize(frame, side, side, resample)

        return self._plan(len(indices), f"frames {indices} of {side}, {resample}", write)

    def _plan(self, tiles: int, settings: str, write: Any) -> Plan:
        side = self.side
        specs = {"pixel_values": ArraySpec((tiles, side, side, 3), "uint8")}
        planes = {PLANES: ArraySpec((tiles, 3, side, side), "uint8")}
        return Plan(tiles * self.tile_features, specs, settings, write, grid=(tiles,), mindie_specs=planes)

    def _sample(self, total: int, count: int) -> list[int]:
        """Return the indices of about `count` frames out of `total` frames, in ascending order.

        The first index is `initial_shift`. If `initial_shift` is True, the first index is the middle of the first of
        `count` equal parts.
        """
        indices = stepped(total, count, total / count / 2 if self._shift is True else self._shift)
        if not indices:
            raise InputError(
                f"initial_shift of the checkpoint is {self._shift}, which skips all {total} frames of the video; send "
                "a longer video"
            )
        return indices


def _tiles(arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return a writable view of the tiles in either wire format, [tiles, side, side, 3]."""
    return arrays[PLANES].transpose(0, 2, 3, 1) if PLANES in arrays else arrays["pixel_values"]


def _with_thumbnail(tiles: int) -> int:
    return tiles + 1 if tiles > 1 else tiles


def _tile(config: Any, where: str) -> tuple[int, int]:
    """Return the side of a tile in pixels and its number of features.

    Raise UnsupportedCheckpoint if the tower is not supported.
    """
    vision, ratio, layer = config.vision_config, config.downsample_ratio, config.vision_feature_layer
    for name, value, served in (
        ("the tower", vision.model_type, "internvl_vision"),
        ("vision_feature_select_strategy", config.vision_feature_select_strategy, "default"),
        ("image_size", vision.image_size[0], vision.image_size[1]),
        ("patch_size", vision.patch_size[0], vision.patch_size[1]),
    ):
        if value != served:
            raise UnsupportedCheckpoint(f"{where}: {name} is {value!r}; only {served!r} is supported")
    if not isinstance(layer, int):
        raise UnsupportedCheckpoint(f"{where}: vision_feature_layer is {layer!r}; only a single layer is supported")
    rows = vision.image_size[0] // vision.patch_size[0]
    if rows * ratio % 1:
        raise UnsupportedCheckpoint(
            f"{where}: downsample_ratio is {ratio}, which does not divide the {rows}x{rows} patches of a tile"
        )
    return vision.image_size[0], int(rows * ratio) ** 2


class InternVLModel(PictureModel, PretrainedModel):
    """The InternVL model. `module` is transformers' `InternVLForConditionalGeneration`."""

    traits = Traits(
        mindie_layouts=_MINDIE,
        vision_parts=("model.vision_tower",),
        projector_parts=("model.multi_modal_projector",),
    )

    def __init__(self, module: Any, spec: ModelSpec, processor: InternVLProcessor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head)
        self.normalizations = processor.normalizations
        self._token = processor.placeholders["image"].token
        self._side, self._tile_features = processor.side, processor.tile_features

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        if PLANES not in view:
            return super().describe_segments(view)
        tiles = len(view[PLANES])
        if view[PLANES].shape != (expected := (tiles, 3, self._side, self._side)):
            raise CorruptReference(
                f"the segment has the shape {view[PLANES].shape}; tiles of this model need {expected}"
            )
        return MediaShape("image", self._token, tiles * self._tile_features, (tiles,))

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        return split_features(self.module.model.get_image_features(self.pixels(items)).pooler_output, items)


class InternVL(PretrainedFamily):
    """InternVL 3 (Zhu et al., 2025, arXiv 2504.10479), run by transformers' modules."""

    model_types = ("internvl", ORIGINAL)
    published = "OpenGVLab/InternVL3-1B-hf"
    kinds = ("image", "video")
    processor = InternVLProcessor
    module_name = "InternVLForConditionalGeneration"
    model_class = InternVLModel
    unused_weights = ("language_model.model.layers.*.rotary_emb.inv_freq",)
    # Settings for training the original model, and for its attention kernel.
    other_keys = tuple(
        f"vision_config.{key}" for key in ("attention_dropout", "drop_path_rate", "dropout", "use_flash_attn")
    )

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return _translated(checkpoint)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        from transformers import PreTrainedTokenizerFast

        checkpoint = _translated(checkpoint)
        if checkpoint.renamings is None:
            return super().tokenizer(checkpoint)
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        template = checkpoint.path / "chat_template.jinja"
        return PreTrainedTokenizerFast(
            tokenizer_object=checkpoint.tokenizer(lambda token: token["special"]),
            clean_up_tokenization_spaces=False,
            chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
            **{name: token for name in names if (token := checkpoint.special_token(name)) is not None},
        )


def _translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint in transformers' layout.

    Raise UnsupportedCheckpoint for settings that this layout cannot express.
    """
    if checkpoint.renamings is not None or checkpoint.config.get("model_type") != ORIGINAL:
        return checkpoint
    where, config = str(checkpoint.path), checkpoint.config
    settings = {**_CHAT_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    vision = _vision_config(settings, where)
    text = _text_config(config.get("llm_config") or {}, where)
    _check_chat(settings, vision, where)
    described = with_special_tokens(_tokenizer_json(checkpoint), [_SPELLED["video_token"]])
    ids = {token["content"]: token["id"] for token in described["added_tokens"]}
    if missing := [token for token in (*_SPELLED.values(), _TURN_END) if token not in ids]:
        raise UnsupportedCheckpoint(f"{where}: the tokenizer has no added token {missing[0]}")
    translated = {
        **{key: value for key, value in config.items() if key not in _TRANSLATED},
        "model_type": "internvl",
        "architectures": None,
        "vision_config": vision,
        "text_config": text,
        "image_token_id": ids[_SPELLED["context_image_token"]],
        "downsample_ratio": settings["downsample_ratio"],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }
    side = vision["image_size"]
    pixels = {
        "size": {"height": side, "width": side},
        "resample": 3,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }
    tiled = settings["dynamic_image_size"]
    bounds = {f"{end}_patches": settings[f"{end}_dynamic_patch"] if tiled else 1 for end in ("min", "max")}
    generation = checkpoint.json("generation_config.json")
    stated = generation.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    files = {
        # The original code always ends an answer at the end of the turn.
        "generation_config.json": {**generation, "eos_token_id": [*ends, *({ids[_TURN_END]} - {*ends})]},
        # The original code hard-codes its preprocessing settings and reads no preprocessor files.
        "processor_config.json": {"image_processor": None},
        "preprocessor_config.json": {"image_processor_type": "GotOcr2ImageProcessor", **pixels, **bounds},
        "video_preprocessor_config.json": pixels,
        "tokenizer.json": described,
        "tokenizer_config.json": {**checkpoint.json("tokenizer_config.json"), **_SPELLED},
    }
    return checkpoint.translated(translated, files, (*_RENAMINGS, *_language_renamings(config["llm_config"], text)))


def _check_chat(settings: Mapping[str, Any], vision: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint for original settings that transformers' layout cannot express."""
    served = {
        "select_layer": -1,
        "ps_version": "v2",
        "pad2square": False,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        # Any other size would require interpolated position embeddings.
        "force_image_size": vision["image_size"],
    }
    if settings["dynamic_image_size"] and settings["max_dynamic_patch"] > 1:
        served["use_thumbnail"] = True
    for name, value in served.items():
        if (given := settings[name]) is not None and given != value:
            raise UnsupportedCheckpoint(
                f"{where}: {name} is {given!r}; with model_type {ORIGINAL}, only {value!r} is supported; {_CONVERTED}"
            )
    if (template := settings.get("template")) not in _CHATML:
        raise UnsupportedCheckpoint(
            f"{where}: template is {template!r}; with model_type {ORIGINAL}, only {', '.join(_CHATML)} are "
            f"supported; {_CONVERTED}"
        )


def _vision_config(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the original vision_config into transformers' vision_config.

    Raise UnsupportedCheckpoint for settings that transformers cannot express.
    """
    stated = settings.get("vision_config") or {}
    if (tower := stated.get("model_type", "intern_vit_6b")) != "intern_vit_6b":
        raise UnsupportedCheckpoint(
            f"{where}: vision_config.model_type is {tower!r}; with model_type {ORIGINAL}, only 'intern_vit_6b' "
            f"is supported; {_CONVERTED}"
        )
    vision = {key: default if (own := stated.get(key)) is None else own for key, default in _VISION_DEFAULTS.items()}
    bias, normalized = vision.pop("qkv_bias"), vision.pop("qk_normalization")
    if normalized:  # transformers hard-codes this epsilon in the query and key norms
        check_settings(vision, {"layer_norm_eps": 1e-6}, f"{where} (vision_config)")
    return {"model_type": "internvl_vision", "attention_bias": bias, "use_qk_norm": normalized, **vision}


def _text_config(language: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the original llm_config into transformers' text_config.

    Raise UnsupportedCheckpoint if the language model is not supported.
    """
    name = next(iter(language.get("architectures") or ()), None)
    if name not in _TEXT_MODELS:
        raise UnsupportedCheckpoint(
            f"{where}: the architecture in llm_config is {name}; with model_type {ORIGINAL}, only "
            f"{', '.join(_TEXT_MODELS)} are supported; {_CONVERTED}"
        )
    text = {key: value for key, value in language.items() if key not in _ATTENTION_KEYS}
    if name == _INTERNLM2:
        text = {**_INTERNLM2_DEFAULTS, **text}
        text["attention_bias"] = text.pop("bias")
    return {**text, "model_type": _TEXT_MODELS[name]}


def _language_renamings(language: Mapping[str, Any], text: Mapping[str, Any]) -> Sequence[Renaming]:
    """Return the renamings of the language model's weights. `text` is its configuration in transformers."""
    if language["architectures"][0] != _INTERNLM2:
        return _LANGUAGE_RENAMINGS
    heads = text["num_attention_heads"]
    queries, width = heads // (text.get("num_key_value_heads") or heads), text["hidden_size"] // heads
    parts = {"q": slice(queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}
    return (
        *(
            Renaming(
                rf"{_INTERNLM2_LAYER}self_attn\.{name}_proj\.(\w+)",
                rf"{_INTERNLM2_PUBLISHED_LAYER}.attention.wqkv.\2",
                grouped(part, queries, width),
            )
            for name, part in parts.items()
        ),
        *_INTERNLM2_RENAMINGS,
    )


def _tokenizer_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the contents of tokenizer.json, or convert a Qwen2 tokenizer from vocab.json and merges.txt.

    Raise UnsupportedCheckpoint if neither is possible.
    """
    if checkpoint.has("tokenizer.json"):
        return checkpoint.json("tokenizer.json")
    name = checkpoint.json("tokenizer_config.json").get("tokenizer_class")
    is_qwen2 = str(name).removesuffix("Fast") == "Qwen2Tokenizer"
    if not (is_qwen2 and checkpoint.has("vocab.json") and checkpoint.has("merges.txt")):
        if is_qwen2:
            files = "tokenizer.json, and does not have both vocab.json and merges.txt"
        elif name is None:
            files = "tokenizer.json, and no tokenizer_config.json with a tokenizer_class"
        else:
            files = f"tokenizer.json, which the tokenizer class {name} requires"
        raise UnsupportedCheckpoint(
            f"{checkpoint.path} has no {files}; copy the missing files from the original repository, or {_CONVERTED}"
        )
    from transformers import Qwen2Tokenizer  # imported late, because it is slow to import

    checkpoint.check_tokenizer()
    try:
        tokenizer = Qwen2Tokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedCheckpoint(f"{checkpoint.path} has no readable tokenizer: {error}") from error
    described: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return described
