"""LLaVA v1: a LLaVA of transformers with one linear layer as its projector.

Source: arXiv 2304.08485, 4.1. Transformers' class has the projector of LLaVA 1.5, which has two layers.
"""

from __future__ import annotations

from typing import Any

from mindie_mm.models.llava import Llava


class LlavaV1(Llava):
    """LLaVA v1 (Liu et al., 2023), with transformers' LLaVA."""

    model_types = ("llava_v1",)
    module_name = "LlavaForConditionalGeneration"
    reference = "transformers' LLaVA, with a linear layer as its projector"

    @classmethod
    def module_class(cls) -> type[Any]:
        # Imported late, because tokenizer processes do not need it.
        from torch import nn

        base: type[Any] = super().module_class()

        class WithLinearProjector(base):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                width_in = config.vision_config.hidden_size
                width_out = config.text_config.hidden_size
                self.model.multi_modal_projector = nn.Linear(width_in, width_out)

        return WithLinearProjector
