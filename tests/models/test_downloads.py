"""Tests that incomplete downloads and other formats are refused. The error says which file to add or replace."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import family_named, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.weights.shards import weight_files
from mindie_mm.tokenize import Tokenizer

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(copy):
    """Return the copy, with its weights split into two shards and an index."""
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, copy / shard, {"format": "pt"})
    where = {name: shard for shard, held in shards.items() for name in held}
    (copy / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return copy


def refused(folder) -> str:
    """Load the tokenizer and then the model from `folder`, and return the message of the last error."""
    messages = []
    for start in (lambda: Tokenizer.from_pretrained(folder).close(), lambda: load_model(folder, device="cpu")):
        try:
            start()
        except UnsupportedCheckpoint as error:
            messages.append(str(error))
    assert messages
    return messages[-1]


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "preprocessor_config.json"),
        *("video_preprocessor_config.json", "generation_config.json", "processor_config.json", "chat_template.json"),
        *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt"),
    ],
)
def test_a_git_lfs_pointer_in_place_of_a_file_is_named(copy, name):
    (copy / name).write_text(POINTER)
    message = refused(copy)
    assert f"{copy / name} is a Git-LFS pointer" in message
    assert "git lfs pull" in message
    assert "hf download" in message


@pytest.mark.parametrize("name", ["qwen.tiktoken", "preprocessor_config.json"])
def test_a_git_lfs_pointer_in_place_of_a_familys_own_file_is_named(copy, name):
    (copy / name).write_text(POINTER)
    family = family_named("qwen_vl" if name == "qwen.tiktoken" else "molmo")
    with pytest.raises(UnsupportedCheckpoint, match=rf"{name} is a Git-LFS pointer"):
        (family.tokenizer if name == "qwen.tiktoken" else family.processor)(Checkpoint.open(copy))


def test_an_unread_git_lfs_pointer_is_ignored(copy):
    for name in ("tokenizer.model", "pytorch_model.bin", "consolidated.safetensors"):
        (copy / name).write_text(POINTER)
    Tokenizer.from_pretrained(copy).close()
    load_model(copy, device="cpu")


def test_a_git_lfs_pointer_among_shards_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").write_text(POINTER)
    assert "model-00002-of-00002.safetensors is a Git-LFS pointer" in refused(sharded)


def test_shards_are_loaded(sharded):
    load_model(sharded, device="cpu")


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    message = refused(sharded)
    assert (
        "lacks 1 of the 2 weight files that model.safetensors.index.json lists: model-00001-of-00002.safetensors. "
        in message
    )
    assert INDEX in message


def test_a_weight_that_its_shard_lacks_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00002-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"{INDEX} assigns the weight model.extra.weight to model-00002-of-00002.safetensors" in refused(sharded)


@pytest.mark.parametrize("weight_map", [["a"], {"a": 1}])
def test_a_malformed_index_is_refused(sharded, weight_map):
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert f"{INDEX}: weight_map does not have a file" in refused(sharded)


def test_a_missing_index_is_named(sharded):
    (sharded / INDEX).unlink()
    message = refused(sharded)
    assert "has model-00001-of-00002.safetensors, but lacks model.safetensors.index.json" in message


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:5], "is truncated: it has 5 bytes"),
        (lambda data: data[:100], "is truncated: it has 100 bytes"),
        (lambda data: data[:-1], "is truncated"),
        (lambda data: b"<!DOCTYPE html><html>not found</html>", "not a safetensors file: it begins with b'<!DOCTYP'"),
        (lambda data: (16).to_bytes(8, "little") + b"no JSON at all !" + data, "not a valid safetensors header"),
        (lambda data: (2).to_bytes(8, "little") + b"[]" + data, "not a valid safetensors header"),
    ],
    ids=["empty", "5 bytes", "in the header", "one byte short", "a page", "no JSON", "a list"],
)  # fmt: skip
def test_a_damaged_safetensors_file_is_named(copy, cut, message):
    file = copy / "model.safetensors"
    file.write_bytes(cut(file.read_bytes()))
    found = refused(copy)
    assert message in found
    assert str(file) in found
    assert "Download it again" in found


def test_weights_saved_by_torch_are_loaded(copy):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / "pytorch_model.bin")
    model = load_model(copy, device="cpu", dtype="float32")
    assert model.logits(torch.arange(10, 20)).isfinite().all()
    assert weight_files(Checkpoint.open(copy)) == [copy / "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda data: data[:-100], "is truncated"),
        (lambda data: data[:1000], "is truncated"),
        (lambda data: b"", "is empty"),
        (
            lambda data: b"<!DOCTYPE html><html>not found</html>",
            "not written by torch.save: it begins with b'<!DOCTYP'",
        ),
    ],
    ids=["100 bytes short", "1000 bytes", "empty", "a page"],
)
def test_a_damaged_torch_file_is_named(copy, cut, message):
    (copy / "model.safetensors").unlink()
    file = copy / "pytorch_model.bin"
    torch.save({"weight": torch.zeros(1000)}, file)
    file.write_bytes(cut(file.read_bytes()))
    found = refused(copy)
    assert message in found
    assert str(file) in found
    assert "Download it again" in found


def test_the_older_torch_format_is_loaded(copy):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert load_model(copy, device="cpu", dtype="float32").logits(torch.arange(10, 20)).isfinite().all()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "preprocessor_config.json"])
def test_a_broken_link_is_named(copy, name):
    """Broken links remain when a snapshot in the Hugging Face cache is copied without its blobs."""
    (copy / name).unlink()
    (copy / name).symlink_to("../../blobs/0123")
    found = refused(copy)
    assert f"{copy / name} is a link to ../../blobs/0123, which does not exist" in found
    assert "hf download" in found


def test_a_broken_link_to_a_shard_is_named(sharded):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../../blobs/0123")
    assert f"{shard} is a link to" in refused(sharded)


@pytest.mark.parametrize("content", ["", '{"model": {', "[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_tokenizer_file_is_named(copy, name, content):
    (copy / name).write_text(content)
    with pytest.raises(UnsupportedCheckpoint, match=rf"/{name} (is not valid JSON|does not contain a JSON object)"):
        Tokenizer.from_pretrained(copy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("consolidated.00.pth", "consolidated.00.pth, which is not supported"),
        ("tf_model.h5", "tf_model.h5, which is not supported"),
        ("model-q4.gguf", "a GGUF file, a format of llama.cpp"),
        ("pytorch_model-00001-of-00002.bin", "lacks pytorch_model.bin.index.json"),
    ],
)
def test_weights_of_another_format_are_named(copy, name, message):
    (copy / "model.safetensors").rename(copy / name)
    found = refused(copy)
    assert message in found
    assert "has no weights: neither model.safetensors nor pytorch_model.bin" in found


def test_a_missing_tokenizer_is_named(copy):
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"has no tokenizer\.json\. Copy it from"):
        Tokenizer.from_pretrained(copy)
    with pytest.raises(UnsupportedCheckpoint, match=r"has no tokenizer\.json"):
        Checkpoint.open(copy).token_id("<image>")
    with pytest.raises(UnsupportedCheckpoint, match=r"neither qwen\.tiktoken nor tokenizer\.json; copy qwen\.tiktoken"):
        family_named("qwen_vl").tokenizer(Checkpoint.open(copy))


def test_all_missing_files_are_listed(sharded):
    kept = {"config.json", INDEX}
    for file in sharded.iterdir():
        if file.name not in kept:
            file.unlink()
    shards = "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    with pytest.raises(UnsupportedCheckpoint, match=rf"also lacks tokenizer\.json, {shards}$"):
        Checkpoint.open(sharded).preprocessor("image", {"Any": {}})
    with pytest.raises(
        UnsupportedCheckpoint, match=rf"{shards}\. .*also lacks tokenizer\.json, preprocessor_config\.json$"
    ):
        weight_files(Checkpoint.open(sharded))
    (sharded / "config.json").unlink()
    assert "no config.json. The folder also lacks tokenizer.json, preprocessor_config.json, " in no_checkpoint(sharded)


def no_checkpoint(path) -> str:
    with pytest.raises(UnsupportedCheckpoint) as error:
        Checkpoint.open(path)
    assert str(path) in str(error.value)
    return str(error.value)


def test_the_path_of_a_file_is_refused_with_its_folder(copy):
    assert f"give its directory, {copy}" in no_checkpoint(copy / "model.safetensors")
    assert f"give its directory, {copy}" in no_checkpoint(copy / "config.json")


def test_a_gguf_file_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "unnamed").write_bytes(b"GGUF\x03\x00\x00\x00")
    for path in (tmp_path, tmp_path / "model.gguf", tmp_path / "unnamed"):
        assert "GGUF" in no_checkpoint(path)


def test_a_folder_of_the_hub_cache_is_refused_with_its_snapshot(copy, tmp_path):
    repository = tmp_path / "hub" / "models--Qwen--Qwen2-VL-2B-Instruct"
    older, newer = (repository / "snapshots" / commit for commit in ("a" * 40, "b" * 40))
    shutil.copytree(copy, newer)
    shutil.copytree(copy, older)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    for path in (repository, repository / "snapshots", tmp_path / "hub"):
        assert str(newer) in no_checkpoint(path)
    assert Checkpoint.open(newer)
    (repository / "refs" / "main").unlink()
    shutil.rmtree(newer)
    assert f"give {older}" in no_checkpoint(repository)
    (older / "config.json").unlink()
    assert "hf download Qwen/Qwen2-VL-2B-Instruct" in no_checkpoint(repository)


def test_a_folder_above_a_checkpoint_is_refused_with_the_checkpoint(copy, tmp_path):
    assert f"give {copy}, which has a config.json" in no_checkpoint(tmp_path)


def test_an_adapter_is_refused_with_its_base_model(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "If it is an adapter" in no_checkpoint(tmp_path)
    settings = {"base_model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert "is an adapter of Qwen/Qwen3-VL-8B-Instruct" in no_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    assert "is an adapter of its base model" in no_checkpoint(tmp_path)
