"""Tests for embeddings as values of items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mindie_mm import Embeddings
from mindie_mm.errors import InputError
from mindie_mm.inputs import Media, parse_inputs

ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
"""Features that bfloat16 can represent."""
FORMS = [
    ROWS,
    ROWS.astype(np.float16),
    ROWS[None],
    torch.from_numpy(ROWS),
    torch.from_numpy(ROWS).bfloat16().requires_grad_(),
    torch.from_numpy(ROWS).half().unsqueeze(0),
    torch.from_numpy(np.ascontiguousarray(ROWS.T)).T,
    [ROWS],
    Embeddings(ROWS),
]


def given(**part: Any) -> list[Embeddings]:
    """Return the embeddings of an item."""
    items = parse_inputs([part])
    assert all(isinstance(item, Media) and not item.is_embeddings for item in items)
    return [item.source for item in items]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["image_embeds", "video_embeds", "audio_embeds"])
def test_every_form_of_an_items_features_is_accepted(key: str, form: Any) -> None:
    (embeddings,) = given(**{key: form})
    assert (embeddings.array == ROWS).all()
    assert embeddings.array.dtype in ("float16", "float32")
    assert embeddings.grid == ()


@pytest.mark.parametrize("batch", [[ROWS, ROWS + 1], np.stack([ROWS, ROWS + 1]), torch.stack([torch.tensor(ROWS)] * 2)])
def test_a_list_or_a_batch_becomes_several_items(batch: Any) -> None:
    grids = [(1, 2, 8), (1, 4, 4)]
    for part in (
        {"image_embeds": batch, "image_grid_thw": torch.tensor(grids)},
        {"image_embeds": {"image_embeds": batch, "grid": grids}},
        {"image_embeds": Embeddings(batch, grids)},
        {"image_embeds": [Embeddings(rows, grid) for rows, grid in zip(batch, grids, strict=True)]},
        {"image": Embeddings(batch, grids)},
    ):
        embeddings = given(**part)
        assert [one.grid for one in embeddings] == grids
        assert all((one.array == np.asarray(rows)).all() for one, rows in zip(embeddings, batch, strict=True))
    assert [one.grid for one in given(image_embeds=batch)] == [(), ()]


@pytest.mark.parametrize("grid", [[1, 4, 4], (1, 4, 4), [(1, 4, 4)], np.array([1, 4, 4]), torch.tensor([[1, 4, 4]])])
def test_every_form_of_a_grid_is_accepted(grid: Any) -> None:
    (embeddings,) = given(video_embeds=ROWS, video_grid_thw=grid)
    assert embeddings.grid == (1, 4, 4)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"image_embeds": ROWS.astype(np.float64)}, r"inputs\[0\]\.image_embeds: .* dtype float64 and shape \[4, 2\]"),
        ({"image_embeds": ROWS[0]}, r"shape \[2\]; they must be float16, bfloat16 or float32 \[rows, width\]"),
        ({"image_embeds": ROWS[None, None]}, r"shape \[1, 1, 4, 2\]"),
        ({"image_embeds": ROWS[:0]}, "at least one row"),
        ({"image_embeds": [ROWS, ROWS[None, None]]}, r"shape \[1, 1, 4, 2\]"),
        ({"image_embeds": [ROWS, [ROWS]]}, "of type list"),
        ({"image_embeds": []}, "an empty list; give at least one array"),
        ({"image_embeds": ["a.safetensors"]}, "of type list"),
        ({"image_embeds": 5}, "of type int"),
        ({"image_embeds": ROWS * np.nan}, "infinite values or NaN"),
        ({"image_embeds": torch.tensor(ROWS) / 0}, "infinite values or NaN"),
        ({"image_embeds": torch.eye(2).to_sparse()}, "cannot be read"),
        ({"image_embeds": torch.zeros(4, 2, device="meta")}, "cannot be read"),
        ({"image_embeds": ROWS, "grid": "1,4,4"}, "the grid of the embeddings is 1,4,4; it must be a list of integers"),
        ({"image_embeds": ROWS, "grid": 4}, "must be a list of integers"),
        ({"image_embeds": ROWS, "grid": [1.0, 4.0]}, "must be a list of integers"),
        ({"image_embeds": ROWS, "grid": [[1], [2]]}, "must be a list of integers"),
        ({"image_embeds": [ROWS, ROWS], "grid": [1, 4, 4]}, "a list of 2 lists of integers, one for each item"),
        ({"image_embeds": ROWS, "grid": [1], "image_grid_thw": [1]}, "give only one grid"),
        ({"image_embeds": ROWS, "video_grid_thw": [1]}, "unknown key 'video_grid_thw'"),
        ({"image_embeds": ROWS, "max_pixels": 5}, "embeddings have no options except their grid"),
        ({"image_embeds": {"image_embeds": ROWS, "fps": 5}}, "unknown key 'fps'"),
        ({"image_embeds": "a.safetensors", "grid": "b.safetensors"}, "is a file, whose grid cannot be given as grid"),
        ({"image_embeds": "a.safetensors", "image_grid_thw": (1, 4, 4)}, "its image_grid_thw is of type tuple"),
        ({"image_embeds": ROWS, "image": "a.png"}, "exactly one of"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_error_describes_a_mistake_in_embeddings(part: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_inputs([part])
