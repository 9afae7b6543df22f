"""Tests for bitsandbytes checkpoints, mostly of families with their own layers, against the dequantized weights."""

import re
import shutil
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from mindie_mm.device import QuantizedLinear
from mindie_mm.device.cpu import decode_step
from mindie_mm.engine.core import Engine
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.model import packed_logits
from mindie_mm.nn.placement import Placement
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import request_directory
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import noise, run
from tests.models.golden import GOLDEN, drawn_weights, write_checkpoint
from tests.models.packing import pack
from tests.models.steps import step_logits
from tests.models.test_qwen_vl import position_table

FAMILIES = {
    "molmo": (GOLDEN / "molmo" / "d", r"model\.(vision_backbone\..*|transformer\.blocks\..*(att|ff).*)"),
    "qwen_vl": (GOLDEN / "qwen_vl", r"transformer\.(h|visual)\..*(?<!in_proj_)"),
    "deepseek_vl2": (GOLDEN / "deepseek_vl2" / "latent", r"(vision|projector|language\.model\.layers)\..*(?<!gate\.)"),
}
"""Golden checkpoint of each family, and a pattern for the weights that are in linear layers in the authors' code."""
SETTINGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "bfloat16",
    },
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 6.0},
}
TEXT = [{"text": "What is in the picture?"}]
MEDIA = [{"text": "What is in "}, {"image": noise(20, 29)}, {"text": "?"}]
# In the published NF4 checkpoint, only the layers of the decoder's blocks are quantized. They compute in float16.
MOLMO_NF4 = {
    "_load_in_4bit": True,
    "bnb_4bit_compute_dtype": "float16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "llm_int8_skip_modules": ["model.vision_backbone", "model.transformer.ff_out", "model.transformer.ln_f"],
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
}
MOLMO_NF4_NAMES = re.compile(
    r"model\.transformer\.blocks\.\d+\.(att_proj|attn_out|ff_proj|ff_out)\.weight"
    r"\.(absmax|quant_map|quant_state\.bitsandbytes__nf4)"
)


def write(family, folder):
    folder.mkdir()
    golden, _ = FAMILIES[family]
    weights = drawn_weights(golden)
    if family == "qwen_vl":
        weights["transformer.visual.attn_pool.pos_embed"] = position_table(16, 256)
    write_checkpoint(golden, folder, weights)


def pair(family, settings, folder, pattern=None):
    """Return a model with packed weights, and a model with the same numbers as ordinary weights."""
    packed, plain = folder / "packed", folder / "plain"
    write(family, packed)
    shutil.copytree(packed, plain)
    linear = re.compile(rf"(?:{pattern or FAMILIES[family][1]})weight")
    weights = pack(packed, settings, lambda name, weight: weight.ndim == 2 and linear.fullmatch(name) is not None)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, plain / "model.safetensors")
    return load_model(packed, device="cpu"), load_model(plain, device="cpu")


def largest_difference(found, expected):
    """Return the largest difference in standard deviations of `expected`.

    An absolute difference would depend on the scale of the weights, which are larger than trained weights.
    """
    return ((found - expected).abs().max() / expected.std()).item()


def layers(model, kind):
    return [name for name, layer in model.module.named_modules() if isinstance(layer, kind)]


@pytest.fixture
def tokenized(tmp_path):
    """Yield a function that tokenizes the prompts for the checkpoint at a path."""
    with ExitStack() as stack:
        directory = stack.enter_context(request_directory(tmp_path / "spool"))

        def ids_of(path):
            tokenizer = stack.enter_context(Tokenizer.from_pretrained(path))
            return [tokenizer.tokenize(items, directory.path_file) for items in (TEXT, MEDIA)]

        yield ids_of


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_dequantised_weights_alone_and_in_a_batch(family, settings, tmp_path, tokenized):
    packed, plain = pair(family, SETTINGS[settings], tmp_path)
    linears = layers(plain, torch.nn.Linear)
    kept = {*layers(packed, torch.nn.Linear), *layers(packed, QuantizedLinear)}
    assert len(layers(packed, QuantizedLinear)) >= 20
    assert kept.issuperset(linears)
    prompts = tokenized(tmp_path / "packed")
    expected = [plain.logits(ids) for ids in prompts]
    for found in (
        map(packed.logits, prompts),
        packed_logits(packed, prompts),
        packed_logits(packed, prompts[::-1])[::-1],
    ):
        for own, other in zip(found, expected, strict=True):
            assert largest_difference(own, other) <= 1e-4
    config = EngineConfig(max_num_batched_tokens=64)
    tokens = [run(Engine(model, config), prompts, max_tokens=8, ignore_eos=True) for model in (packed, plain)]
    alone = [run(Engine(packed, config), [ids], max_tokens=8, ignore_eos=True)[0][0] for ids in prompts]
    assert tokens[0] == tokens[1]
    assert [*tokens[0][0].values()] == alone


def test_the_published_nf4_checkpoint_is_served(tmp_path, tokenized):
    packed, plain = pair("molmo", MOLMO_NF4, tmp_path, r"model\.transformer\.blocks\..*")
    names = [name for name in load_file(tmp_path / "packed" / "model.safetensors") if ".weight." in name]
    assert all(MOLMO_NF4_NAMES.fullmatch(name) for name in names)
    assert len(names) == 3 * 4 * 3
    assert len(layers(packed, QuantizedLinear)) == 3 * 3, "the blocks of 64 numbers of ff_out extend over two rows"
    assert not [name for name in layers(packed, QuantizedLinear) if "blocks" not in name]
    for ids in tokenized(tmp_path / "packed"):
        assert largest_difference(packed.logits(ids), plain.logits(ids)) <= 1e-4


@pytest.mark.parametrize("settings", SETTINGS)
def test_checkpoints_that_transformers_saves_are_served(settings, random_checkpoint, tmp_path, caplog):
    config = Qwen2VLConfig.from_pretrained(random_checkpoint)
    config.text_config.hidden_size, config.text_config.intermediate_size = 128, 256
    config.text_config.num_attention_heads = 8
    config.vision_config.hidden_size = 128
    sized, folder = tmp_path / "sized", tmp_path / "packed"
    shutil.copytree(random_checkpoint, sized)
    Qwen2VLForConditionalGeneration(config).save_pretrained(sized)
    reference = Qwen2VLForConditionalGeneration.from_pretrained(
        sized,
        quantization_config=BitsAndBytesConfig(**SETTINGS[settings]),
        device_map={"": "cpu"},
        dtype=torch.float32,
    )
    shutil.copytree(sized, folder)
    reference.save_pretrained(folder)
    with caplog.at_level("INFO"):
        model = load_model(folder, device="cpu")
    dtypes = {layer.values.dtype for layer in model.module.modules() if isinstance(layer, QuantizedLinear)}
    assert dtypes == {torch.int8 if settings == "int8" else torch.uint8}
    reference.dequantize(torch.float32)
    ids = torch.arange(10, 40)
    with torch.no_grad():
        expected = reference.float()(ids[None]).logits[0]
    assert largest_difference(model.logits(ids), expected) <= 1e-4
    if decode_step._load(decode_step._best()) is None:
        pytest.skip("the package was installed without a C compiler")
    assert "compiled code" in caplog.text
    assert (step_logits(model, ids) - model.logits(ids)[-1]).abs().max() <= 1e-4


def spoil(folder, name, change):
    weights = load_file(folder / "model.safetensors")
    if (value := change(weights.pop(name))) is not None:
        weights[name] = value
    save_file(weights, folder / "model.safetensors")


PROJECTION = "model.transformer.blocks.0.att_proj"


@pytest.mark.parametrize(
    ("settings", "name", "change", "message"),
    [
        ("nf4", "weight.absmax", lambda _: None, "absmax"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda _: None, "quant_state"),
        ("nf4", "weight", lambda numbers: numbers[:-4].clone(), "the weight has 16380 numbers"),
        ("nf4", "weight.absmax", lambda scales: scales[:-1].clone(), "the weight has 511 absmax"),
        ("nf4", "weight", lambda _: None, f"lacks {PROJECTION}.weight, which"),
        ("nf4", "weight.quant_map", lambda codes: codes[:-1].clone(), "quant_map is float32 [15]"),
        ("fp4", "weight.nested_absmax", lambda scales: scales[:-1].clone(), "nested_absmax"),
        ("int8", "SCB", lambda scales: scales[:-1].clone(), "SCB is float32 [255]; it must be float32 [256]"),
        ("int8", "weight_format", lambda _: torch.tensor(2, dtype=torch.uint8), "weight_format is 2"),
        ("int8", "weight", lambda numbers: numbers[:-1].clone(), "SCB is float32 [256]; it must be float32 [255]"),
    ],
)
def test_a_layer_with_damaged_quantisation_data_is_named(settings, name, change, message, tmp_path):
    write("molmo", tmp_path / "packed")
    pack(tmp_path / "packed", SETTINGS[settings], lambda name, _: name == f"{PROJECTION}.weight")
    spoil(tmp_path / "packed", f"{PROJECTION}.{name}", change)
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(PROJECTION)) as error:
        load_model(tmp_path / "packed", device="cpu")
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_weight_of_8_bits_without_its_scales_is_refused(tmp_path):
    write("molmo", tmp_path / "packed")
    pack(tmp_path / "packed", SETTINGS["int8"], lambda name, _: name == f"{PROJECTION}.weight")
    spoil(tmp_path / "packed", f"{PROJECTION}.SCB", lambda _: None)
    spoil(tmp_path / "packed", f"{PROJECTION}.weight_format", lambda _: None)
    with pytest.raises(UnsupportedCheckpoint, match="none of its weights is quantized"):
        load_model(tmp_path / "packed", device="cpu")


def test_weights_kept_for_training_are_refused(tmp_path):
    write("molmo", tmp_path / "packed")
    pack(tmp_path / "packed", {**SETTINGS["int8"], "llm_int8_has_fp16_weight": True}, lambda *_: False)
    with pytest.raises(UnsupportedCheckpoint, match="llm_int8_has_fp16_weight"):
        load_model(tmp_path / "packed", device="cpu")


@pytest.mark.parametrize("settings", ["fp4", "int8"])
def test_another_dtype_for_a_quantised_tower_is_refused(settings, tmp_path):
    write("molmo", tmp_path / "packed")
    pack(tmp_path / "packed", SETTINGS[settings], lambda name, _: name.endswith("resblocks.0.feed_forward.w1.weight"))
    with pytest.raises(InputError, match="quantized"):
        load_model(tmp_path / "packed", device="cpu", vision=Placement(bits=16))
