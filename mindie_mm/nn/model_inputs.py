"""The keyword arguments of transformers' model, from the ids and the media items of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mindie_mm.errors import InputError
from mindie_mm.inputs import Kind
from mindie_mm.nn.mindie import NORMALIZED, PLANES
from mindie_mm.nn.pixels import Normalization
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.shm.format.item import MediaShape

EMBEDDINGS = "embeddings"
"""Name of the array that holds the features if an item was given as embeddings, float [num_features, width]."""
PIXELS: Mapping[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Names of the arrays of pixels in transformers."""
TOKEN_TYPES: Mapping[str, int] = {"image": 1, "video": 2, "audio": 3}
"""Numbers of kinds in transformers' `mm_token_type_ids`. Text has 0."""


class Item(Protocol):
    """A media item of a prompt in the engine, or of a sample of an offline run."""

    @property
    def slots(self) -> NDArray[np.int64]:
        """Token indices of the item's placeholders, int64 [num_features]."""

    @property
    def view(self) -> Mapping[str, NDArray[Any]]:
        """Arrays of the item, by name."""

    @property
    def shape(self) -> MediaShape:
        """Kind, placeholder and geometry of the item."""


class ModelInputs:
    """The part of a processor that makes the inputs of transformers' model, as transformers' processor does."""

    traits: ClassVar[Traits]
    normalizations: Mapping[Kind, Normalization]
    """Normalization of the images of each kind, for families whose blocks contain whole images."""

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized pixels of an item on `device`.

        By default, a block contains `pixel_values`, uint8 [images, height, width, 3], and the result is float32
        [images, 3, height, width]. In MindIE's wire format, an item has `planes`, uint8 [images, 3, height, width], or
        `normalized`, float16 [1, images, 3, height, width].
        """
        view = item.view
        if NORMALIZED in view:
            return to_device(view, NORMALIZED, device).float().squeeze(0)
        if PLANES in view:
            pixels = to_device(view, PLANES, device).permute(0, 2, 3, 1)
        else:
            pixels = to_device(view, "pixel_values", device)
        return self.normalizations[item.shape.kind](pixels)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        """Return the arrays of one item as transformers' processor returns them for a prompt without other items.

        Pixels and spectrograms are on `device`, and all other arrays are on the host.
        """
        kind = item.shape.kind
        inputs = {PIXELS[kind]: self.normalized(item, device)}
        if self.traits.has_grid_thw:
            inputs[f"{kind}_grid_thw"] = torch.tensor([item.shape.grid[:3]])
        return inputs

    def join(self, name: str, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Join the arrays `name` of the items of each prompt.

        By default, concatenate all of them along the first axis, and pad the other axes with zeros.
        """
        return padded_cat([array for arrays in prompts for array in arrays])

    def media_inputs(self, prompts: Sequence[Sequence[Item]], device: torch.device) -> dict[str, Tensor]:
        """Return the arrays of the media items of a batch of prompts, by their names in transformers.

        Args:
            prompts: The items of each prompt, in order.
            device: Where the arrays are normalized.

        Raises:
            InputError: An item was given as embeddings.

        """
        found: dict[str, list[list[Tensor]]] = {}
        for index, items in enumerate(prompts):
            for item in items:
                if EMBEDDINGS in item.view:
                    raise InputError(
                        f"the {item.shape.kind} at token {item.slots[0]} was given as embeddings, which transformers' "
                        "model does not take; give its file instead"
                    )
                for name, array in self.item_inputs(item, device).items():
                    found.setdefault(name, [[] for _ in prompts])[index].append(array)
        return {name: self.join(name, arrays) for name, arrays in found.items()}

    def token_inputs(self, ids: NDArray[np.int64], items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the arrays with one entry for each token of a prompt.

        Args:
            ids: Token ids with placeholder ids at the positions of features, int64 [T].
            items: The media items of the prompt, in order.

        Returns:
            Arrays int64 [T], by their names in transformers.

        """
        types = {name: types_of_tokens(len(ids), items) for name in self.traits.token_types}
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.int64), **types}

    def position_ids(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the positions of the tokens of a batch, as transformers' model computes them for each prompt.

        Args:
            batch: Keyword arguments of the model. The prompts are padded on the right.

        Returns:
            Positions int64 [prompts, T], or [1 + axes, prompts, T] for a model that has positions on several axes. The
            first row is then the index of the token, where the model finds the samples of a packed row.

        """
        prompts, length = batch["input_ids"].shape
        return torch.arange(length).expand(prompts, -1)

    def model_inputs(
        self, ids: NDArray[np.int64], items: Sequence[Item], device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Return the keyword arguments of transformers' model for one prompt, as a batch of size 1.

        Args:
            ids: Token ids with placeholder ids at the positions of features, int64 [T].
            items: The media items of the prompt, in order.
            device: Where the arrays are normalized. None means the CPU.

        """
        device = device or torch.device("cpu")
        tokens = {name: array.unsqueeze(0) for name, array in self.token_inputs(ids, items).items()}
        inputs = tokens | writable(self.media_inputs([items], device), items)
        return {name: array.to(device).contiguous() for name, array in inputs.items()}


def writable(inputs: Mapping[str, Tensor], items: Sequence[Item]) -> dict[str, Tensor]:
    """Return `inputs` with copies of the arrays that still lie in the memory of an item, which may be read-only.

    Writing to a mapped file of a run would end the process with SIGSEGV.
    """
    mapped = {array.ctypes.data for item in items for array in item.view.values()}
    return {
        name: array.clone() if array.untyped_storage().data_ptr() in mapped else array for name, array in inputs.items()
    }


def padded_cat(arrays: Sequence[Tensor], value: float = 0) -> Tensor:
    """Concatenate arrays along the first axis. Pad other axes at their ends with `value`."""
    if len(arrays) == 1:
        return arrays[0]
    longest = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    return torch.cat([padded(array, longest, value) for array in arrays])


def padded_rows(prompts: Sequence[Sequence[Tensor]], value: float = 0) -> Tensor:
    """Concatenate the arrays of each prompt along the second axis. Return one row per prompt, padded with `value`."""
    empty = next(array for arrays in prompts for array in arrays)[:, :0]
    return padded_cat([torch.cat([empty, *arrays], 1) for arrays in prompts], value)


def padded(array: Tensor, sizes: Sequence[int], value: float = 0) -> Tensor:
    """Pad all axes of an array except the first at their ends to `sizes`, with `value`."""
    if list(array.shape[1:]) == list(sizes):
        return array
    ends = zip(reversed(sizes), reversed(array.shape[1:]), strict=True)
    missing = [count for size, own in ends for count in (0, size - own)]
    return torch.nn.functional.pad(array, missing, value=value)


def types_of_tokens(length: int, items: Sequence[Item]) -> Tensor:
    """Return the type of each token, int64 [length]: 0 for text, or the number of the kind in `TOKEN_TYPES`."""
    types = torch.zeros(length, dtype=torch.int64)
    for item in items:
        types[item.slots] = TOKEN_TYPES[item.shape.kind]
    return types
