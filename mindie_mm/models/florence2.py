"""Florence-2: an encoder-decoder that receives an image as the cells of a coarse grid and their mean.

Source: arXiv 2311.06242. Token ids, pixels and logits match transformers' `florence2`. The prompt is a task in the
form of a question or an instruction. In prompts and answers, the tokens <loc_0> to <loc_999> denote
locations, which callers convert to boxes.

Checkpoints may have transformers' layout, or the layout of Microsoft's repositories and of models fine-tuned from
them. The second layout is translated in memory by the rules of transformers'
convert_florence2_original_pytorch_to_hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mindie_mm.device import Device
from mindie_mm.errors import InputError, TokenOutOfRange, UnsupportedCheckpoint
from mindie_mm.media.image.preprocess import Preprocess, Size, check_settings, resample_of
from mindie_mm.nn.checkpoint.directory import Checkpoint, tokenizer_length, with_special_tokens
from mindie_mm.nn.checkpoint.renaming import TRANSPOSED, Renaming
from mindie_mm.nn.family import Placeholder
from mindie_mm.nn.generation import GenerationRules
from mindie_mm.nn.images import ImageModel
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.one_size import OneSizeProcessor
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.seq2seq import Decoding, Seq2SeqModel, load_seq2seq
from mindie_mm.nn.splice import MediaItem, Splice
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.build import renamed_weights
from mindie_mm.nn.weights.pretrained import read_config

_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_TASKS = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
"""Prompts that the model was trained on, by task name."""
_TASKS_ON_INPUT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {input}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {input} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {input}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {input} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {input}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {input} describe?",
    "<REGION_TO_OCR>": "What text is in the region {input}?",
}
"""Prompts of tasks that have an input, by task name. The input is the text before and after the task name."""
_ORIGINAL_KEYS = frozenset({"dim_embed", "image_pos_embed", "visual_temporal_embedding"})
"""Settings of the tower that only the original layout has. Their presence identifies that layout."""
_VISION_DEFAULTS: Mapping[str, Any] = {
    "patch_size": [7, 3, 3, 3],
    "patch_stride": [4, 2, 2, 2],
    "patch_padding": [3, 1, 1, 1],
    "patch_prenorm": [False, True, True, True],
    "dim_embed": [256, 512, 1024, 2048],
    "num_heads": [8, 16, 32, 64],
    "num_groups": [8, 16, 32, 64],
    "depths": [1, 1, 9, 1],
    "window_size": 12,
    "projection_dim": 1024,
    "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
}
"""Defaults of the original tower. transformers has different defaults."""
_TEXT_KEYS = (
    "vocab_size",
    "max_position_embeddings",
    "d_model",
    "encoder_layers",
    "encoder_ffn_dim",
    "encoder_attention_heads",
    "decoder_layers",
    "decoder_ffn_dim",
    "decoder_attention_heads",
    "activation_function",
    "scale_embedding",
)
"""Keys of the original text_config that transformers' BART configuration has under the same names."""
_GENERATION_DEFAULTS: Mapping[str, Any] = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    "forced_bos_token_id": None,
    "no_repeat_ngram_size": None,
    "encoder_no_repeat_ngram_size": None,
    "repetition_penalty": None,
    "min_length": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "diversity_penalty": None,
    "num_beams": None,
}
"""Generation settings that the original layout has in text_config, with their defaults."""
_OTHER_KEYS = (
    # Settings for training the original model.
    *(f"text_config.{key}dropout" for key in ("", "activation_", "attention_", "classif_", "classifier_")),
    *(f"text_config.{key}" for key in ("decoder_layerdrop", "encoder_layerdrop", "init_std")),
    *("vision_config.drop_path_rate", "vision_config.enable_checkpoint"),
    # The original code reads none of these keys. encoder_layers sets its number of layers.
    *(f"text_config.{key}" for key in ("add_bias_logits", "add_final_layer_norm", "normalize_before")),
    *("text_config.num_hidden_layers", "vision_config.tie_word_embeddings"),
)
"""Keys of the original config.json that do not affect answers."""
_NAMED_TOKENS: Mapping[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
"""Special tokens of BART, which the original tokenizer_config.json leaves out."""
_PAIRED = ("cap", "ncap", "dcap", "grounding", "seg", "region_cap", "region_to_desciption", "proposal", "poly")
_ADDED_TOKENS = (
    *("<od>", "</od>", "<ocr>", "</ocr>"),
    *(f"<loc_{place}>" for place in range(1000)),
    *(f"<{slash}{name}>" for name in _PAIRED[:5] for slash in ("", "/")),
    "<sep>",
    *(f"<{slash}{name}>" for name in _PAIRED[5:] for slash in ("", "/")),
    "<and>",
)
"""Tokens that the original processor adds to BART's tokenizer, in this order and with the misspelled "desciption"."""
_TOWER = r"model\.vision_tower\."
_BLOCK = rf"{_TOWER}(blocks\.\d+\.\d+\.(spatial|channel)_block)\."
_ATTENTION = r"(window_attn|channel_attn)"
_PROJECTOR = r"model\.multi_modal_projector\."
_RENAMINGS = (
    Renaming(rf"{_TOWER}(convs\.\d+)\.conv\.(\w+)", r"vision_tower.\1.proj.\2"),
    Renaming(rf"{_BLOCK}(conv[12])\.(\w+)", r"vision_tower.\1.\3.fn.dw.\4"),
    Renaming(rf"{_TOWER}(blocks\.\d+\.\d+\.spatial_block)\.norm1\.(\w+)", r"vision_tower.\1.window_attn.norm.\2"),
    Renaming(rf"{_TOWER}(blocks\.\d+\.\d+\.channel_block)\.norm1\.(\w+)", r"vision_tower.\1.channel_attn.norm.\2"),
    Renaming(rf"{_BLOCK}norm2\.(\w+)", r"vision_tower.\1.ffn.norm.\3"),
    Renaming(rf"{_BLOCK}{_ATTENTION}\.(qkv|proj)\.(\w+)", r"vision_tower.\1.\3.fn.\4.\5"),
    Renaming(rf"{_BLOCK}ffn\.(fc[12])\.(\w+)", r"vision_tower.\1.ffn.fn.net.\3.\4"),
    Renaming(rf"{_TOWER}(.+)", r"vision_tower.\1"),
    Renaming(rf"{_PROJECTOR}image_projection\.weight", "image_projection", TRANSPOSED),
    Renaming(rf"{_PROJECTOR}image_position_embed\.(.+)", r"image_pos_embed.\1"),
    Renaming(rf"{_PROJECTOR}(.+)", r"\1"),
    Renaming(r"model\.language_model\.(.+)", r"language_model.model.\1"),
    Renaming(r"lm_head\.weight", "language_model.lm_head.weight"),
)
_LOGITS_BIAS = "language_model.final_logits_bias"
"""Weight of original checkpoints that transformers' class lacks."""
_CHAT_TEMPLATE = (
    "{% if messages | length != 1 %}{{ raise_exception('this model accepts only one message, without earlier "
    "turns') }}{% endif %}{% if messages[0].content is string %}{{ messages[0].content }}{% else %}{% for "
    "part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
)


class Florence2Processor(OneSizeProcessor):
    """Processor for Florence-2."""

    traits = Traits(
        chat_template=_CHAT_TEMPLATE,
        inserted_at=0,
        max_items={"image": 1},
        not_packed="its encoder attends to the whole row",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint = _translated(checkpoint)
        where = str(checkpoint.path)
        config = read_config("Florence2Config", checkpoint)
        text = config.get_text_config()
        self.feature_width = text.hidden_size
        # The placeholder id may be beyond the embedding table. Such an id is valid only as an image's placeholder.
        self.num_embeddings = max(text.vocab_size, config.image_token_id + 1)
        settings = checkpoint.preprocessor("image", {"CLIPImageProcessor": _DEFAULTS})
        check_settings(settings, {"do_resize": True}, where)
        size = Size.read(settings["size"], where)
        crop = Size.read(settings["crop_size"], where, square=True).fixed if settings["do_center_crop"] else None
        self.steps = Preprocess(size, resample_of(settings, where), crop)
        if self.steps.output_size is None:
            raise UnsupportedCheckpoint(
                f"{where}: the preprocessor resizes images to several sizes; only a single size is supported"
            )
        self.size = self.steps.output_size
        self.normalizations = {"image": Normalization.read(settings)}
        self.num_features = _num_features(config.vision_config, self.size, where)
        check_settings(settings, {"image_seq_length": self.num_features}, where)
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        self._around = [
            checkpoint.token_id(checkpoint.require_special_token(name)) for name in ("bos_token", "eos_token")
        ]

    def prompt_text(self, text: str) -> str:
        """Replace a task name by the prompt that the model was trained on."""
        for name, question in _TASKS.items():
            if name in text:
                if text != name:
                    raise InputError(f"the task {name} does not accept further text; the prompt is {text[:100]!r}")
                return question
        for name, question in _TASKS_ON_INPUT.items():
            if name in text:
                return question.format(input=text.replace(name, "").strip())
        return text

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Enclose the ids in BOS and EOS if there is an image. Otherwise, remove both."""
        bos, eos = self._around
        bare = ids[ids[:1] == [bos] :]
        bare = bare[: len(bare) - (bare[-1:] == [eos])]
        return [bos, *bare, eos] if num_items else bare


class Florence2Model(ImageModel, Seq2SeqModel):
    """The Florence-2 model. `module` is transformers' `Florence2ForConditionalGeneration`."""

    traits = Traits(vision_parts=("model.vision_tower",), projector_parts=("model.multi_modal_projector",))

    def __init__(self, module: Any, spec: ModelSpec, rules: GenerationRules, processor: Florence2Processor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head, rules)

    def read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        items = super().read(ids)
        # The placeholder id may be beyond the embedding table. Such an id is valid only as an image's placeholder.
        beyond = np.flatnonzero(ids >= self.spec.vocab_size)
        if len(stray := np.setdiff1d(beyond, [slot for item in items for slot in item.slots])):
            raise TokenOutOfRange(f"token id {ids[stray[0]]} is not in [0, {self.spec.vocab_size})")
        return items

    def encode_prompt(self, input_ids: Tensor, splices: Sequence[Splice]) -> Decoding:
        return super().encode_prompt(input_ids.clamp(max=self.spec.vocab_size - 1), splices)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        features: Tensor = self.module.get_image_features(self.pixels(items)).pooler_output
        return list(features)


class Florence2(PretrainedFamily):
    """Florence-2 (Xiao et al., 2023, arXiv 2311.06242), run by transformers' modules."""

    model_types = ("florence2",)
    published = "florence-community/Florence-2-base"
    kinds = ("image",)
    processor = Florence2Processor
    module_name = "Florence2ForConditionalGeneration"
    other_keys = _OTHER_KEYS

    @classmethod
    def translated(cls, checkpoint: Checkpoint) -> Checkpoint:
        return _translated(checkpoint)

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Florence2Model:
        checkpoint = _translated(checkpoint)
        config = read_config("Florence2Config", checkpoint)
        renamed = renamed_weights(cls.module_class(), checkpoint)
        bias = renamed.others.pop(_LOGITS_BIAS, None) if renamed else None
        longest = config.text_config.max_position_embeddings
        module, spec, rules = load_seq2seq(cls.module_class(), checkpoint, device, dtype, longest, renamed)
        if bias is not None and bias.any():
            module.lm_head.bias = nn.Parameter(bias.flatten().to(device.torch_device, dtype), requires_grad=False)
        spec = replace(spec, embedding_size=processor.num_embeddings)
        return Florence2Model(module, spec, rules, processor)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        """Return the tokenizer of the checkpoint.

        Location and task tokens are decoded as text, although tokenizer.json marks them as special.
        """
        from transformers import PreTrainedTokenizerFast

        checkpoint = _translated(checkpoint)
        if not checkpoint.json("tokenizer.json"):
            return super().tokenizer(checkpoint)
        named = {name: token for name in _NAMED_TOKENS if (token := checkpoint.special_token(name)) is not None}
        image = checkpoint.config.get("image_token_id")
        backend = checkpoint.tokenizer(
            lambda token: token["id"] == image or (token["special"] and token["content"] in named.values())
        )
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def _num_features(vision: Any, output_size: tuple[int, int], where: str) -> int:
    """Return the number of features of an image: one for each cell of the tower's output, and one for their mean.

    Raise UnsupportedCheckpoint if the tower has too few position embeddings.
    """
    height, width = output_size
    for size, stride, padding in zip(vision.patch_size, vision.patch_stride, vision.patch_padding, strict=True):
        height, width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
    if max(height, width) > vision.max_position_embeddings:
        raise UnsupportedCheckpoint(
            f"{where}: images of {output_size} pixels give {height} x {width} patches, but the tower has "
            f"position embeddings for at most {vision.max_position_embeddings} x {vision.max_position_embeddings}"
        )
    return height * width + 1


def _translated(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint in transformers' layout.

    Raise UnsupportedCheckpoint for settings that this layout cannot express.
    """
    vision = checkpoint.config.get("vision_config") or {}
    if checkpoint.renamings is not None or not (vision.get("model_type") == "davit" or _ORIGINAL_KEYS & vision.keys()):
        return checkpoint
    where = str(checkpoint.path)
    tower = _vision_config(vision, where)
    text = {key: value for key, value in checkpoint.config.get("text_config", {}).items() if value is not None}
    if (kind := text.get("model_type") or "florence2_language") not in ("florence2_language", "bart"):
        raise UnsupportedCheckpoint(
            f"{where}: text_config.model_type is {kind!r}; only florence2_language is supported"
        )
    width = text.get("d_model", 1024)
    if tower["projection_dim"] != width:
        raise UnsupportedCheckpoint(
            f"{where}: vision_config.projection_dim={tower['projection_dim']} must equal text_config.d_model ({width})"
        )
    described = with_special_tokens(checkpoint.tokenizer_json(), _ADDED_TOKENS)
    known = {key: text[key] for key in _TEXT_KEYS if key in text}
    config = {
        **{key: value for key, value in checkpoint.config.items() if key not in ("vision_config", "text_config")},
        "architectures": ["Florence2ForConditionalGeneration"],
        "vision_config": tower,
        # Encoder and decoder always share their embeddings. tie_word_embeddings only concerns the head.
        "text_config": {"model_type": "bart", "vocab_size": 51289, "tie_word_embeddings": True, **known},
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
        "image_token_id": tokenizer_length(described),
    }
    # The original code generates with the settings in text_config. It ignores generation_config.json and the token ids
    # at the top level of config.json, which are wrong in re-saved checkpoints.
    generation = {key: text.get(key, value) for key, value in _GENERATION_DEFAULTS.items()}
    files = {
        "generation_config.json": {key: value for key, value in generation.items() if value is not None},
        "tokenizer.json": described,
        "tokenizer_config.json": {
            **_NAMED_TOKENS,
            **{key: value for key, value in checkpoint.json("tokenizer_config.json").items() if value is not None},
        },
    }
    return checkpoint.translated(config, files, _RENAMINGS)


def _vision_config(vision: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the original vision_config into transformers' vision_config.

    Raise UnsupportedCheckpoint for settings that transformers cannot express.
    """
    # Re-saved configurations lack the name of the tower. The original code supports no other tower.
    if (tower := vision.get("model_type") or "davit") != "davit":
        raise UnsupportedCheckpoint(
            f"{where}: vision_config.model_type is {tower!r}; Florence-2 is supported only with the tower davit"
        )
    settings = {**_VISION_DEFAULTS, **{key: value for key, value in vision.items() if value is not None}}
    stated = {
        "image_feature_source": list(settings.pop("image_feature_source")),
        "image_pos_embed.type": (settings.get("image_pos_embed") or {}).get("type", "none"),
        "visual_temporal_embedding.type": (settings.get("visual_temporal_embedding") or {}).get("type", "none"),
    }
    served = {
        "image_feature_source": _VISION_DEFAULTS["image_feature_source"],
        "image_pos_embed.type": "learned_abs_2d",
        "visual_temporal_embedding.type": "COSINE",
    }
    check_settings(stated, served, f"{where} (vision_config)")
    return {
        "model_type": "florence_vision",
        **{key: settings[key] for key in _VISION_DEFAULTS.keys() & settings.keys() - {"dim_embed"}},
        "embed_dim": settings["dim_embed"],
        "max_position_embeddings": settings["image_pos_embed"]["max_pos_embeddings"],
        "max_temporal_embeddings": settings["visual_temporal_embedding"]["max_temporal_embeddings"],
    }
