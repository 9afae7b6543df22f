"""Tests for the order in which ranks read the rows of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindie_mm.batch import Dataset
from mindie_mm.errors import CorruptReference, InputError
from tests.batch.conftest import run_in_process, settings, written


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return a run of 40 rows in 20 shards. The rows 3 and 17 have failed."""
    here = tmp_path_factory.mktemp("rows")
    rows = [{"image": "gone.png"} if row in (3, 17) else {"text": f"Row {row}"} for row in range(40)]
    run_in_process(settings(written(here / "rows.jsonl", rows), shard_rows=2), here / "run")
    return Dataset(here / "run")


def test_an_epoch_contains_each_row_once_without_failed_rows(dataset: Dataset) -> None:
    epochs = [[*dataset.order(seed=5, epoch=epoch)] for epoch in range(3)]
    for rows in epochs:
        assert sorted(rows) == [row for row in range(40) if row not in (3, 17)]
    assert len({*map(tuple, epochs)}) == 3
    assert epochs[0] == [*dataset.order(seed=5)] != [*dataset.order(seed=6)]
    assert epochs[0][:6] == [14, 2, 39, 20, 36, 15], "the order is the same in every release"


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 50])
@pytest.mark.parametrize("consumed", [0, 12, 37, 38])
def test_any_number_of_ranks_resumes_an_epoch(num_ranks: int, consumed: int, dataset: Dataset) -> None:
    whole = [*dataset.order(seed=1)]
    orders = [dataset.order(seed=1, consumed=consumed, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    turns = [row for turn in zip(*orders, strict=True) for row in turn]
    left = whole[consumed:]
    assert turns[: len(left)] == left
    assert turns[len(left) :] == (whole * 2)[: len(turns) - len(left)], "ranks have as many samples"
    assert {len(order) for order in orders} == {len(turns) // num_ranks}


def test_wrong_numbers_and_a_wrong_list_of_errors_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rank=2 must be at least 0 and less than num_ranks=2"):
        dataset.order(rank=2, num_ranks=2)
    with pytest.raises(InputError, match="consumed=39 must be from 0 to 38"):
        dataset.order(consumed=39)
    for content, reason in (("", "has 0 rows, but 2 rows failed"), ("{", "is damaged")):
        (tmp_path / "errors.jsonl").write_text(content)
        with pytest.raises(CorruptReference, match=reason):
            dataset.manifest.failed_rows(tmp_path)


@pytest.mark.parametrize("name", ["seed", "epoch", "consumed", "rank", "num_ranks"])
@pytest.mark.parametrize("value", ["1", 1.0, None, True, [1]])
def test_numbers_of_another_type_are_refused_by_the_call(name: str, value: Any, dataset: Dataset) -> None:
    with pytest.raises(InputError, match=f"^{name}(=| is ).* must be an integer"):
        dataset.order(**{name: value})
    assert [*dataset.order(**{"num_ranks": 2, name: np.int64(1)})] == [*dataset.order(**{"num_ranks": 2, name: 1})]
