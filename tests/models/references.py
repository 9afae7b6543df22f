"""Reference implementations with which the contracts compare the families."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image

from mindie_mm.inputs import KINDS
from tests.models.small_checkpoints import read_model

Items = Sequence[Mapping[str, Any]]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference of logits, relative to the norm of the expected logits without their mean."""
    is_open = expected > -1e30  # a family may mask tokens
    own = expected[is_open]
    return float((found[is_open] - own).norm() / (own - own.mean()).norm())


class Reference:
    """Model and processor of transformers for a checkpoint.

    Override `inputs` if the processor has other arguments.
    """

    markers: ClassVar[Mapping[str, str]] = {}
    """Text that represents an item of each kind in the processor's input."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model.eval()
        self.processor = processor

    def text(self, items: Items) -> str:
        return "".join(
            item["text"] if "text" in item else next(self.markers[kind] for kind in KINDS if kind in item)
            for item in items
        )

    def inputs(self, items: Items) -> Mapping[str, torch.Tensor]:
        """Run the processor on one `List[Dict]`, and return the batch of size 1, including input_ids [1, T]."""
        images = [Image.fromarray(item["image"]) for item in items if "image" in item]
        videos = [item["video"] for item in items if "video" in item]
        given = {"images": images, "videos": videos}
        sampling = {"do_sample_frames": False} if videos else {}
        return self.processor(
            text=[self.text(items)],
            return_tensors="pt",
            **{name: media for name, media in given.items() if media},
            **sampling,
        )

    @torch.inference_mode()
    def logits(self, items: Items) -> torch.Tensor:
        """Return the logits, float32 [T, vocabulary]."""
        return self.model(**self.inputs(items)).logits[0].float()

    def in_bfloat16(self) -> Reference | None:
        """Return a copy with bfloat16 weights, or None if the reference is golden data without a model."""
        half = copy(self)
        half.model = deepcopy(self.model)
        # transformers keeps buffers that no checkpoint stores, such as rotary frequencies, in float32.
        for weight in half.model.state_dict(keep_vars=True).values():
            if weight.is_floating_point():
                weight.data = weight.data.bfloat16()
        half.model.register_forward_pre_hook(_floats_in_bfloat16, with_kwargs=True)
        return half

    @torch.inference_mode()
    def generate(self, items: Items, count: int) -> list[int]:
        """Generate `count` tokens greedily, and return them."""
        inputs = self.inputs(items)
        out = self.model.generate(**inputs, max_new_tokens=count, do_sample=False)
        return out[0, inputs["input_ids"].shape[1] :].tolist()


class PretrainedReference(Reference):
    """A reference that reads transformers' model and processor from a checkpoint."""

    model_class: ClassVar[type[Any]]
    processor_class: ClassVar[type[Any]]
    parts: ClassVar[Sequence[type[Any]]]
    """Classes of the processor's parts, in the order of the processor's arguments."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the processor in addition to the settings in processor_config.json."""

    def __init__(self, path: Path) -> None:
        file = path / "processor_config.json"
        settings = {**(json.loads(file.read_text()) if file.is_file() else {}), **self.settings}
        parts = [part.from_pretrained(path) for part in self.parts]
        super().__init__(read_model(self.model_class, path), self.processor_class(*parts, **settings))


class Remembered:
    """Cache of a reference's logits and tokens.

    Many tests need the reference's results for the same items, so each result is computed only once.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._found: dict[object, tuple[Items, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reference, name)

    def logits(self, items: Items) -> torch.Tensor:
        return self._once(items, self._reference.logits)

    def generate(self, items: Items, count: int, **settings: Any) -> list[int]:
        return self._once(items, self._reference.generate, count, **settings)

    def _once(self, items: Items, compute: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        key = compute.__name__, id(items), arguments, tuple(settings.items())
        if key not in self._found:
            # Stores the items, so no other object gets the same id.
            self._found[key] = items, compute(items, *arguments, **settings)
        return self._found[key][1]


def _floats_in_bfloat16(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert floating-point inputs to bfloat16, because some towers do not convert their pixels themselves."""
    return args, {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in kwargs.items()
    }
