"""Mistral 3: a Pixtral tower whose patches are merged, and a Mistral or Ministral 3 text model.

Token ids, pixels and logits match transformers' `mistral3`.
"""

from __future__ import annotations

from torch import Tensor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models._pixtral_tower import PixtralTowerModel, PixtralTowerProcessor
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.weights.pretrained import read_config

_TEXT = ("mistral", "ministral3")


class Mistral3Processor(PixtralTowerProcessor):
    """Processor for Mistral 3."""

    config_name = "Mistral3Config"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = read_config(self.config_name, checkpoint)
        if not isinstance(config.vision_feature_layer, int):
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: vision_feature_layer={config.vision_feature_layer} must be a single "
                "number, because the projector of the reference takes one layer"
            )
        if (text := config.text_config.model_type) not in _TEXT:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: text_config.model_type is {text!r}; only {' and '.join(_TEXT)} are supported"
            )


class Mistral3Model(PixtralTowerModel):
    """The Mistral 3 model. `module` is transformers' `Mistral3ForConditionalGeneration`."""

    def project(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        features: Tensor = self.module.model.multi_modal_projector(patches.flatten(0, 1), [size] * len(patches))
        return features.view(len(patches), -1, features.shape[-1])


class Mistral3(PretrainedFamily):
    """Mistral Small 3.1 and later, Ministral 3 and Magistral (Mistral AI, 2025), run by transformers' modules."""

    model_types = ("mistral3",)
    published = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"
    kinds = ("image",)
    processor = Mistral3Processor
    module_name = "Mistral3ForConditionalGeneration"
    model_class = Mistral3Model
