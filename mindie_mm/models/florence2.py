"""Florence-2: an image as the cells of a coarse grid and their mean, in front of a task that is put in words.

Source: arXiv 2311.06242; transformers' florence2, whose ids, pixels and logits these are. An encoder-decoder. Places in
prompts and answers are tokens of their own, <loc_0> to <loc_999>; to make boxes of them is left to who asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import Device
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.media.preprocess import Preprocess, Size, check_settings, resample_of
from mindie_mm.nn.checkpoint import Checkpoint
from mindie_mm.nn.family import Placeholder, PretrainedFamily
from mindie_mm.nn.generation import GenerationRules
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.one_size import OneSizeProcessor
from mindie_mm.nn.pictures import PictureModel
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, Normalization
from mindie_mm.nn.pretrained import read_config
from mindie_mm.nn.seq2seq import Seq2SeqModel, load_seq2seq
from mindie_mm.nn.splice import MediaItem

_DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_ORIGINAL_TOWER = "davit"
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
"""What the model was taught to answer, by the names of the tasks."""
_TASKS_ON_INPUT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {input}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {input} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {input}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {input} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {input}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {input} describe?",
    "<REGION_TO_OCR>": "What text is in the region {input}?",
}
"""The same, of tasks that are given something: the text beside the name."""


class Florence2Processor(OneSizeProcessor):
    """The tokenizer's half."""

    inserted = True
    chat_template = (
        "{% if messages | length != 1 %}"
        "{{ raise_exception('this model answers one message, and remembers none before it') }}{% endif %}"
        "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
        "{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        where = str(checkpoint.path)
        if checkpoint.config.get("vision_config", {}).get("model_type") == _ORIGINAL_TOWER:
            raise UnsupportedCheckpoint(
                f"{where}: these are the weights of the code that came with Florence-2; what is served is their "
                "conversion for transformers' own, such as florence-community/Florence-2-base"
            )
        config = read_config("Florence2Config", checkpoint)
        self.feature_width = config.get_text_config().hidden_size
        settings = checkpoint.preprocessor("image", {"CLIPImageProcessor": _DEFAULTS})
        check_settings(settings, {"do_resize": True}, where)
        size = Size.read(settings["size"], where)
        crop = Size.read(settings["crop_size"], where, square=True).fixed if settings["do_center_crop"] else None
        self.steps = Preprocess(size, resample_of(settings, where), crop)
        if self.steps.made is None:
            raise UnsupportedCheckpoint(f"{where}: its preprocessing makes images of several sizes, one is served")
        self.size = self.steps.made
        self.normalizations = {"image": Normalization.read(settings)}
        self.num_features = _num_features(config.vision_config, self.size, where)
        check_settings(settings, {"image_seq_length": self.num_features}, where)
        self.placeholders = {"image": Placeholder((), config.image_token_id, ())}
        self._around = [_named_token(checkpoint, name) for name in ("bos_token", "eos_token")]

    def limits(self) -> Mapping[Kind, int]:
        return {"image": 1}

    def prompt_text(self, text: str) -> str:
        """A task's name replaced by what the model was taught to answer."""
        for name, question in _TASKS.items():
            if name in text:
                if text != name:
                    raise InputError(f"the task {name} takes no other text; the prompt is {text[:100]!r}")
                return question
        for name, question in _TASKS_ON_INPUT.items():
            if name in text:
                return question.format(input=text.replace(name, "").strip())
        return text

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Between BOS and EOS if there is an image, else bare: whatever the tokenizer does."""
        bos, eos = self._around
        bare = ids[ids[:1] == [bos] :]
        bare = bare[: len(bare) - (bare[-1:] == [eos])]
        return [bos, *bare, eos] if num_items else bare


class Florence2Model(PictureModel, Seq2SeqModel):
    """Tower, encoder and decoder; `module` is transformers' Florence2ForConditionalGeneration."""

    vision_parts = ("model.vision_tower",)
    projector_parts = ("model.multi_modal_projector",)

    def __init__(self, module: Any, spec: ModelSpec, rules: GenerationRules, processor: Florence2Processor) -> None:
        super().__init__(module, spec, module.model.language_model, module.lm_head, rules)
        self.normalizations = processor.normalizations

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        features: Tensor = self.module.get_image_features(self.pixels(items)).pooler_output
        return list(features)


class Florence2(PretrainedFamily):
    """Florence-2 (Xiao et al., 2023, arXiv 2311.06242) over transformers' own modules."""

    model_types = ("florence2",)
    published = "florence-community/Florence-2-base"
    kinds = ("image",)
    processor = Florence2Processor
    module_name = "Florence2ForConditionalGeneration"

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Florence2Model:
        longest = read_config("Florence2Config", checkpoint).text_config.max_position_embeddings
        module, spec, rules = load_seq2seq(cls.module_class(), checkpoint, device, dtype, longest)
        return Florence2Model(module, spec, rules, processor)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        """Places and the marks of tasks are text, in prompts and answers, though tokenizer.json calls them special."""
        from transformers import PreTrainedTokenizerFast

        if not checkpoint.json("tokenizer.json"):
            return super().tokenizer(checkpoint)
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        named = {name: token for name in names if (token := checkpoint.special_token(name)) is not None}
        image = checkpoint.config.get("image_token_id")
        backend = checkpoint.tokenizer(
            lambda token: token["id"] == image or (token["special"] and token["content"] in named.values())
        )
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def _num_features(vision: Any, made: tuple[int, int], where: str) -> int:
    """Features of an image of this height and width: one for each cell that the tower leaves, and one for all."""
    height, width = made
    for size, stride, padding in zip(vision.patch_size, vision.patch_stride, vision.patch_padding, strict=True):
        height, width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
    if max(height, width) > vision.max_position_embeddings:
        raise UnsupportedCheckpoint(
            f"{where}: images of {made} pixels come to {height} x {width} cells, the tower has positions for "
            f"{vision.max_position_embeddings} a side"
        )
    return height * width + 1


def _named_token(checkpoint: Checkpoint, name: str) -> int:
    if (token := checkpoint.special_token(name)) is None:
        raise UnsupportedCheckpoint(f"{checkpoint.path}: tokenizer_config.json has no {name}")
    return checkpoint.token_id(token)
