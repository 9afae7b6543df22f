"""The base class of families whose network is a class of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch

from mindie_mm.device import Device
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.resolved import positions_of, settle
from mindie_mm.nn.checkpoint.unused_keys import original_keys, unused_keys
from mindie_mm.nn.family import Family
from mindie_mm.nn.model import Model
from mindie_mm.nn.paged_cache import Layer
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.nn.weights.build import renamed_weights
from mindie_mm.nn.weights.pretrained import load_pretrained


class PretrainedFamily(Family):
    """A family whose network is a transformers class. A subclass sets `module_name`, `processor` and `model_class`."""

    module_name: ClassVar[str]
    """Name of the transformers class of the complete model."""
    model_class: ClassVar[type[Any]]
    """The `Model` subclass. It is constructed with the loaded module, its `ModelSpec` and the processor."""
    unused_weights: ClassVar[tuple[str, ...]] = ()
    """Patterns (fnmatch) for names of weights that published checkpoints have and the module lacks."""
    default_theta: ClassVar[float | None] = None
    """Base of the rotary frequencies if config.json has none. None means the default of the installed transformers."""
    tp_plan: ClassVar[Mapping[str, str] | None] = None
    """Tensor-parallel plan for layers of the text model for which transformers has none."""
    other_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that the transformers class lacks. The family reads them, or they do not affect answers."""
    states: ClassVar[Mapping[str, Callable[[Any], Layer]]] = {}
    """Functions from the text model's configuration to what a layer keeps, by its type in `layer_types`.

    Layers of other types keep the keys and values that the configuration describes.
    """

    def __init_subclass__(cls) -> None:
        """Set `reference` to the transformers class unless the subclass sets it."""
        if "module_name" in vars(cls):  # missing in a base class of several families
            cls.reference = vars(cls).get("reference", f"transformers' {cls.module_name}")

    @classmethod
    def module_class(cls) -> type[Any]:
        """Return the transformers class named `module_name`."""
        import transformers  # imported late: takes seconds, and tokenizer processes do not need it

        module_class: type[Any] = getattr(transformers, cls.module_name)
        return module_class

    @classmethod
    def config_class(cls) -> type[Any]:
        """Return the configuration class of `module_class`.

        The modeling code is imported only if transformers maps none of the family's model types to a configuration.
        """
        from transformers import CONFIG_MAPPING  # imported late, as above

        mapped = [model_type for model_type in cls.model_types if model_type in CONFIG_MAPPING]
        # The last model type belongs to `module_name`.
        config_class: type[Any] = CONFIG_MAPPING[mapped[-1]] if mapped else cls.module_class().config_class
        return config_class

    @classmethod
    def configuration(cls, checkpoint: Checkpoint) -> Any:
        """Return transformers' configuration of a checkpoint that `translated` returned, corrected by `settle`."""
        config = cls.config_class().from_dict(deepcopy(dict(checkpoint.config)))  # it changes its argument
        settle(checkpoint, config, cls.default_theta)
        return config

    @classmethod
    def longest_prompt(cls, checkpoint: Checkpoint) -> int | None:
        """Return the maximum number of tokens of a prompt, or None if config.json does not state it.

        `checkpoint` is a checkpoint that `translated` returned.
        """
        return positions_of(cls.configuration(checkpoint))

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        translated = cls.translated(checkpoint)
        names = unused_keys(translated.config, lambda stated: cls.configuration(replace(translated, config=stated)))
        if translated.renamings is not None:
            names = original_keys(names, checkpoint, translated, cls.translated)
        return [name for name in names if name not in cls.other_keys]

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> Model | Seq2SeqModel:
        checkpoint = cls.translated(checkpoint)
        module_class = cls.module_class()
        module, spec = load_pretrained(
            module_class,
            checkpoint,
            device,
            dtype,
            unused=cls.unused_weights,
            tp_plan=cls.tp_plan,
            renamed=renamed_weights(module_class, checkpoint),
            default_theta=cls.default_theta,
            states=cls.states,
        )
        model: Model = cls.model_class(module, spec, processor)
        return model
