"""Tests for how the family of a checkpoint is selected: from config.json, or by name."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindie_mm import LLM, SamplingParams, models
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.models import family_named, family_names, family_of, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Family
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import FamilyContract

RANDOM = "qwen2_vl"  # the family of the checkpoint that tools/random_checkpoint.py writes


@pytest.fixture
def renamed(random_checkpoint, tmp_path):
    """Return a function that copies the random checkpoint and changes or removes model_type in config.json."""

    def make(model_type: str | None) -> Path:
        folder = tmp_path / f"{model_type}"
        shutil.copytree(random_checkpoint, folder)
        config = json.loads((folder / "config.json").read_text())
        del config["model_type"]
        (folder / "config.json").write_text(json.dumps(config | ({"model_type": model_type} if model_type else {})))
        return folder

    return make


def test_names_are_listed_without_importing_a_family():
    code = (
        "import sys, mindie_mm.models as models; names = models.family_names(); "
        "assert names == sorted(set(names)) and names, names; "
        "loaded = [name for name in names if f'mindie_mm.models.{name}' in sys.modules]; "
        "assert not loaded and 'transformers' not in sys.modules, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_every_family_declares_its_model_types_kinds_and_reference():
    for name in family_names():
        family = family_named(name)
        assert family.model_types, name
        assert set(family.kinds) <= {"image", "video", "audio"}, name
        assert family.reference, name


def test_configuration_classes_match_the_modules():
    for name in family_names():
        if name == "gemma3n" and not find_spec("timm"):
            continue
        if issubclass(family := family_named(name), PretrainedFamily):
            assert family.config_class() is family.module_class().config_class, family


@pytest.mark.parametrize("model_type", ["llama", None])
def test_another_model_type_is_refused_by_name(renamed, model_type):
    folder = renamed(model_type)
    found = f"model_type '{model_type}'" if model_type else "no model_type"
    with pytest.raises(UnsupportedCheckpoint) as error:
        family_of(Checkpoint.open(folder))
    assert found in str(error.value)
    assert f"the nearest family by name is {RANDOM}, for checkpoints such as" in str(error.value)
    assert sum(name in str(error.value) for name in family_names()) == 1, "the list is linked, not repeated"
    assert "docs/families.md" in str(error.value)
    assert "docs/adding-a-model.md" in str(error.value)


@pytest.mark.usefixtures("copied_workers")
def test_a_named_family_serves_a_config_without_a_model_type(renamed):
    folder, name = renamed(None), RANDOM
    with Tokenizer.from_pretrained(folder, family=name) as tokenizer:
        ids = tokenizer.tokenize([{"text": "a red square"}])
    assert load_model(folder, device="cpu", family=name).logits(ids).isfinite().all()
    with LLM(folder, family=name) as llm:
        (output,) = llm.generate(["a red square"], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.token_ids) in (1, 2)


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"model_type": "gemma3_audio"}, "gemma3"),
        ({"model_type": "llava_next_video"}, "llava_next"),
        ({"architectures": ["Idefics2ForConditionalGeneration"]}, "idefics3"),
        ({"model_type": "lfm2-vl"}, "lfm2_vl"),
        ({"model_type": "minicpmv", "architectures": ["MiniCPMV"]}, "minicpmv4_6"),
    ],
)
def test_a_refusal_names_the_nearest_model_type_or_architecture(config, nearest):
    family = family_named(nearest)
    with pytest.raises(
        UnsupportedCheckpoint, match=f"by name is {nearest}, for checkpoints such as {family.published}"
    ):
        family_of(Checkpoint(Path("/nowhere"), config))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("voxtral", "only the package mistral-common"),
        ("voxtral_realtime", "only the package mistral-common"),
        ("ernie4_5_moe_vl", "a tokenizer that needs remote code; download a revision in transformers' layout"),
    ],
)
def test_a_model_type_that_is_not_supported_is_refused_with_the_reason(renamed, model_type, reason):
    with pytest.raises(UnsupportedCheckpoint, match=rf"model_type '{model_type}'.*not supported, because .*{reason}"):
        family_of(Checkpoint.open(renamed(model_type)))


def test_a_named_family_refuses_another_model_type(renamed):
    with pytest.raises(UnsupportedCheckpoint, match=r"model_type 'llama'.*the family qwen2_vl does not support"):
        family_of(Checkpoint.open(renamed("llama")), RANDOM)


@pytest.mark.usefixtures("copied_workers")
@pytest.mark.parametrize("name", ["nothing", "", "../qwen2_vl", "__init__", "os"])
def test_an_unknown_family_is_refused_by_name(random_checkpoint, name):
    with pytest.raises(InputError, match=r"the nearest name is .*docs/families\.md lists all families"):
        family_of(Checkpoint.open(random_checkpoint), name)
    with pytest.raises(InputError, match=r"the nearest name is " if name else "family is '', which is empty"):
        LLM(random_checkpoint, family=name)


def install(folder, name):
    """Install a package whose entry point refers to a family called `name`."""
    info = folder / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[mindie_mm.models]\n{name} = broken_family:Mine\n")


def test_a_family_that_is_installed_after_a_lookup_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert "mine" not in family_names()
    install(tmp_path, "mine")
    assert "mine" in family_names()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise OSError('no luck')", "cannot be loaded: no luck"),
        ("Mine = 5", "is 5; it must be a Family"),
        (None, "cannot be loaded"),
    ],
)
def test_an_entry_point_that_is_not_a_family_is_named(tmp_path, monkeypatch, module, message):
    install(tmp_path, "mine")
    if module is not None:
        (tmp_path / "broken_family.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    assert "mine" in family_names()
    with pytest.raises(InputError, match=f"the entry point 'mine' of mindie_mm.models.*{message}"):
        family_named("mine")
    assert family_of(Checkpoint.open()).__module__ == "mindie_mm.models.qwen2_5_omni", "others are served all the same"
    sys.modules.pop("broken_family", None)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("", "defines 0 Family classes"),
        ("from mindie_mm.nothing import x", "cannot be imported: ModuleNotFoundError"),
        (
            "from mindie_mm.nn.family import Family\nclass A(Family): ...\nclass B(Family): ...",
            "defines 2 Family classes",
        ),
    ],
)
def test_a_file_without_exactly_one_family_is_named(tmp_path, monkeypatch, module, message):
    (tmp_path / "zz_new.py").write_text(module)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    with pytest.raises(InputError, match=f"zz_new.*{message}"):
        family_named("zz_new")
    assert family_of(Checkpoint.open()).__module__ == "mindie_mm.models.qwen2_5_omni", "others are served all the same"
    sys.modules.pop("mindie_mm.models.zz_new", None)


def test_an_error_in_a_familys_code_is_logged_with_its_traceback(caplog):
    with (
        caplog.at_level("DEBUG", "mindie_mm.models"),
        pytest.raises(UnsupportedCheckpoint, match="cannot be read as Family: ZeroDivisionError"),
        models.reading(Checkpoint.open(), Family),
    ):
        _ = 1 / 0
    assert "test_families.py" in caplog.text


@pytest.mark.parametrize("name", [name for name in family_names() if name != "qwen2_5_omni"])
def test_another_familys_checkpoint_is_refused_without_an_unexpected_error(name):
    with pytest.raises(UnsupportedCheckpoint):
        load_model(None, device="cpu", family=name)
    with contextlib.suppress(UnsupportedCheckpoint):
        Tokenizer.from_pretrained(None, family=name).close()


@pytest.mark.parametrize("name", family_names())
def test_every_family_has_a_contract_test(name):
    module = importlib.import_module(f"tests.models.test_{name}")
    own = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, FamilyContract)]
    assert any(getattr(value, "name", None) == name for value in own)
