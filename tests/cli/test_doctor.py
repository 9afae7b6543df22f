"""What doctor says of the settings: the checkpoint, the spool, the folder of media, variables that set nothing."""

import json
import shutil

import pytest

from mindie_mm.nn.checkpoint import Checkpoint
from tests.cli.shell import run_warm


def doctor(file, *, status=0, **environment):
    """Its findings by their subject."""
    said = run_warm("doctor", "--json", "--config", file, status=status, **environment)
    return {one["subject"]: one for one in json.loads(said)}


def test_folders_that_will_do(tmp_path):
    spool, file = tmp_path / "new" / "spool", tmp_path / "settings.toml"
    file.write_text(f'spool = "{spool}"\nallowed_media_dir = "{tmp_path}"\n')
    found = doctor(file, MINDIE_MM_MAX_IMAGE="a-value")
    assert (found["spool"]["status"], found["spool"]["found"]) == ("ok", f"{spool} can be made")
    assert not spool.parent.exists()
    assert found["media folder"]["status"] == "ok"
    assert found["settings"]["status"] == "warning"
    assert found["settings"]["found"] == "MINDIE_MM_MAX_IMAGE is not a setting; did you mean MINDIE_MM_MAX_IMAGES?"
    spool.mkdir(parents=True, mode=0o700)
    found = doctor(file)
    assert (found["spool"]["status"], found["spool"]["found"]) == ("ok", f"{spool} can be written")
    assert list(spool.iterdir()) == []
    assert "settings" not in found


def test_folders_that_will_not_do(tmp_path):
    file = tmp_path / "settings.toml"
    nothing = tmp_path / "nothing"
    for spool, why in (
        ("/proc/x", "cannot be written: "),
        (file, "is no directory"),
        (file / "x", "cannot be written: Not a directory"),
    ):
        file.write_text(f'spool = "{spool}"\nallowed_media_dir = "{nothing}"\n')
        found = doctor(file, status=1)
        assert found["spool"]["status"] == found["media folder"]["status"] == "error"
        assert str(spool) in found["spool"]["found"]
        assert why in found["spool"]["found"]
        assert found["media folder"]["found"] == f"allowed_media_dir is {nothing}, which is no folder"


def _lacks_a_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _resizes_nothing(folder):
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_resize": False}))


def _quantised_for_mindie(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantize": "w8a8"}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (_lacks_a_shard, "lacks 1 of 2 files of weights, first model-2.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (_resizes_nothing, "do_resize"),
        (_quantised_for_mindie, "quantize is 'w8a8'"),
    ],
)
def test_a_checkpoint_that_cannot_be_served(tmp_path, spoil, said):
    folder, file = tmp_path / "checkpoint", tmp_path / "settings.toml"
    shutil.copytree(Checkpoint.open().path, folder)
    file.write_text(f'model = "{folder}"\nspool = "{tmp_path / "spool"}"\n')
    found = doctor(file)["checkpoint"]
    assert (found["status"], found["advice"]) == ("ok", "")
    spoil(folder)
    found = doctor(file, status=1)["checkpoint"]
    assert found["status"] == "error"
    assert said in found["advice"]


def test_keys_that_the_family_does_not_use(tmp_path):
    folder, file = tmp_path / "checkpoint", tmp_path / "settings.toml"
    shutil.copytree(Checkpoint.open().path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embedings": True}))
    file.write_text(f'model = "{folder}"\nspool = "{tmp_path / "spool"}"\n')
    found = doctor(file)["checkpoint"]
    assert found["status"] == "ok"
    assert found["advice"] == "config.json has keys that the family qwen2_5_omni does not use: tie_word_embedings"
