"""Tests for doctor's findings about the checkpoint, the spool, the media folder and misspelled variables."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindie_mm.doctor.machine import checkpoint_finding
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.settings.config import WorkerConfig
from tests.cli.shell import run_warm
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint


def doctor(file, *, status=0, **environment):
    """Run `doctor` with the settings file `file`, and return its findings by subject."""
    output = run_warm("doctor", "--json", "--config", file, status=status, **environment)
    return {one["subject"]: one for one in json.loads(output)}


def test_usable_folders_and_files_are_ok(tmp_path):
    spool, file, keys = tmp_path / "new" / "spool", tmp_path / "settings.toml", tmp_path / "keys.toml"
    file.write_text(f'spool = "{spool}"\nallowed_media_dir = "{tmp_path}"\napi_key_file = "{keys}"\n')
    keys.write_text("[alice]\nkey = 'secret'\n")
    found = doctor(file, MINDIE_MM_MAX_MEDIA_ITEM="a-value")
    assert (found["spool"]["status"], found["spool"]["found"]) == ("ok", f"{spool} can be created")
    assert not spool.parent.exists()
    assert found["media folder"]["status"] == found["API keys"]["status"] == "ok"
    assert found["settings"]["status"] == "warning"
    assert (
        found["settings"]["found"]
        == "MINDIE_MM_MAX_MEDIA_ITEM is not a setting; did you mean MINDIE_MM_MAX_MEDIA_ITEMS?"
    )
    spool.mkdir(parents=True, mode=0o700)
    found = doctor(file)
    assert (found["spool"]["status"], found["spool"]["found"]) == ("ok", f"{spool} can be written")
    assert list(spool.iterdir()) == []
    assert "settings" not in found


def test_unusable_folders_and_files_are_errors(tmp_path):
    file = tmp_path / "settings.toml"
    nothing = tmp_path / "nothing"
    for spool, why in (
        ("/proc/x", "cannot be written: "),
        (file, "is not a directory"),
        (file / "x", "cannot be written: Not a directory"),
    ):
        file.write_text(f'spool = "{spool}"\nallowed_media_dir = "{nothing}"\nssl_certfile = "{nothing}"\n')
        found = doctor(file, status=1)
        assert found["spool"]["status"] == found["media folder"]["status"] == "error"
        assert str(spool) in found["spool"]["found"]
        assert why in found["spool"]["found"]
        assert found["media folder"]["found"] == f"allowed_media_dir is {nothing}, which is not a folder"
        assert (found["certificate"]["status"], found["certificate"]["found"]) == ("error", f"{nothing} cannot be used")


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
    ("spoil", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (
            _lacks_a_shard,
            "lacks 1 of the 2 weight files that model.safetensors.index.json lists: model-2.safetensors",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (_resizes_nothing, "do_resize"),
        (_quantised_for_mindie, "quantize is 'w8a8'"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_an_error(tmp_path, spoil, message):
    folder, file = tmp_path / "checkpoint", tmp_path / "settings.toml"
    shutil.copytree(Checkpoint.open().path, folder)
    file.write_text(f'model = "{folder}"\nspool = "{tmp_path / "spool"}"\n')
    found = doctor(file)["checkpoint"]
    assert (found["status"], found["advice"]) == ("ok", "")
    spoil(folder)
    found = doctor(file, status=1)["checkpoint"]
    assert found["status"] == "error"
    assert message in found["advice"]


def _stored_as(dtype):
    def spoil(folder):
        file = folder / "model.safetensors"
        weights = load_file(file)
        name = next(name for name in weights if name.endswith("q_proj.weight"))
        save_file(weights | {name: weights[name].to(dtype)}, file, {"format": "pt"})

    return spoil


def _quantised_by(method):
    def spoil(folder):
        file = folder / "config.json"
        settings = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        _stored_as(torch.int8),
        _stored_as(torch.float8_e4m3fn),
        _stored_as(torch.int32),
        _quantised_by("gptq"),
        _quantised_by("squeezed"),
    ],
    ids=["int8", "fp8", "int32", "gptq", "unknown"],
)
@pytest.mark.parametrize("own_layers", [False, True])
def test_unsupported_weights_are_refused_with_the_message_of_the_loader(own_layers, spoil, random_checkpoint, tmp_path):
    folder = tmp_path / "checkpoint"
    if own_layers:
        folder.mkdir()
        write_checkpoint(GOLDEN / "deepseek_vl2" / "plain", folder, drawn_weights(GOLDEN / "deepseek_vl2" / "plain"))
    else:
        shutil.copytree(random_checkpoint, folder)
    config = WorkerConfig(model=str(folder))
    assert checkpoint_finding(config).status == "ok"
    spoil(folder)
    with pytest.raises(UnsupportedCheckpoint) as refused:
        load_model(folder, device="cpu")
    found = checkpoint_finding(config)
    assert (found.status, found.advice) == ("error", str(refused.value))


def test_keys_that_the_family_does_not_use_are_listed(tmp_path):
    folder, file = tmp_path / "checkpoint", tmp_path / "settings.toml"
    shutil.copytree(Checkpoint.open().path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embedings": True}))
    file.write_text(f'model = "{folder}"\nspool = "{tmp_path / "spool"}"\n')
    found = doctor(file)["checkpoint"]
    assert found["status"] == "ok"
    assert found["advice"] == "config.json has keys that the family qwen2_5_omni does not use: tie_word_embedings"
