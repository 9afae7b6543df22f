"""A test with a run that was moved to another machine, where another user reads it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindie_mm.batch import Dataset
from mindie_mm.cli import main
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import EMBEDDED

NOBODY = 65534


@contextmanager
def as_another_user() -> Iterator[None]:
    """Give up root's rights. Do nothing if the process does not have them or its user namespace has no other user."""
    with suppress(OSError):
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        with suppress(OSError):
            os.seteuid(0)
            os.setegid(0)


@pytest.fixture
def moved(eight_rows: Path) -> Iterator[Path]:
    """Return a folder with the run and its checkpoint, which cannot be written. The run names paths that are gone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # another user cannot enter the folder of `tmp_path`
        run, model = Path(name, "run"), Path(name, "model")
        shutil.copytree(eight_rows, run)
        shutil.copytree(EMBEDDED, model)
        for file in (run / "manifest.json", run / "run.json"):
            text = file.read_text().replace('"model": ""', '"model": "/gone/model"')
            file.write_text(text.replace(str(eight_rows.parent), "/gone"))
        for path in (Path(name), run, model, *run.iterdir(), *model.iterdir()):
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield Path(name)
        for path in (Path(name), run, model):
            path.chmod(0o755)


def shown(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_another_user_can_read_a_moved_run_without_its_input(moved: Path, eight_rows: Path) -> None:
    """The tests' own user reads first, so that all modules are imported."""
    run, model = moved / "run", moved / "model"
    own = Dataset(eight_rows)
    for user in (nullcontext(), as_another_user()):
        with user:
            dataset = Dataset(run, model=model)
            assert [sample.id for sample in dataset] == [sample.id for sample in own]
            for found, expected in zip(dataset[5].model_inputs().values(), own[5].model_inputs().values(), strict=True):
                assert found.equal(expected)
            assert "are intact" in shown("verify", run)
            assert "model /gone/model, inputs /gone/rows.jsonl" in shown("inspect", run)
            assert "Both?" in shown("inspect", run, 5, "--model", model)
            text = shown("inspect", run, 5)
            assert text.splitlines()[1].startswith("token ids are shown instead of text, because /gone/model is not ")
            assert str(own[5].ids[:3].tolist())[:-1] in text
            assert text.count("image at tokens") == 2
            refused = CliRunner().invoke(main, ["inspect", str(run), "5", "--png", str(moved / "row.png")])
            assert (refused.exit_code, "/gone/model is not a checkpoint" in refused.stderr) == (2, True)
            with pytest.raises(UnsupportedCheckpoint):
                Dataset(run)[5].model_inputs()
