"""Tests for Florence-2 in microsoft's layout against transformers' class with the same weights."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import CLIPImageProcessor, Florence2Config, Florence2ForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.florence2.processing_florence2 import Florence2Processor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.text.detokenizer import load_tokenizer
from tests.models import test_florence2 as plain
from tests.models.contract import noise, run
from tests.models.seq2seq_contract import Seq2SeqContract
from tests.models.small_checkpoints import changed, save_json, save_tokenizer
from tests.models.test_florence2 import FEATURES, SIDE, Florence2Reference

PUBLISHED = Path(__file__).parents[1] / "cases" / "florence2"
TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
BOS, EOS = 0, 2
ADDED = [
    *("<od>", "</od>", "<ocr>", "</ocr>"),
    *(f"<loc_{x}>" for x in range(1000)),
    *("<cap>", "</cap>", "<ncap>", "</ncap>", "<dcap>", "</dcap>", "<grounding>", "</grounding>", "<seg>", "</seg>"),
    *("<sep>", "<region_cap>", "</region_cap>", "<region_to_desciption>", "</region_to_desciption>", "<proposal>"),
    *("</proposal>", "<poly>", "</poly>", "<and>"),
]
"""Tokens that microsoft's processor adds to the tokenizer."""
TEXT = {
    "d_model": 32,
    "encoder_layers": 2,
    "num_hidden_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
VISION = {
    "depths": [1, 1, 2, 1],
    "dim_embed": [8, 16, 16, 32],
    "num_heads": [2, 2, 2, 4],
    "num_groups": [2, 2, 2, 4],
    "window_size": 4,
    "projection_dim": 32,
}


def read(name: str, file: str) -> dict[str, Any]:
    return json.loads((PUBLISHED / name / f"{file}.json").read_text())


def shrunk(name: str, vocab_size: int) -> dict[str, Any]:
    """Return a published config.json with smaller dimensions."""
    config = read(name, "config")
    sizes = {"vocab_size": vocab_size, "projection_dim": 32}
    text, vision = config["text_config"] | TEXT | {"vocab_size": vocab_size}, config["vision_config"] | VISION
    return config | sizes | {"text_config": text, "vision_config": vision}


def published_names(config: dict[str, Any]) -> dict[str, str]:
    """Map published weight names to names in transformers' class, as transformers' conversion script does."""
    names: dict[str, str] = {}
    for stage, depth in enumerate(config["vision_config"]["depths"]):
        ours, theirs = f"model.vision_tower.convs.{stage}", f"vision_tower.convs.{stage}"
        pairs = [("proj", "conv"), ("norm", "norm")]
        names |= {f"{theirs}.{old}": f"{ours}.{new}" for old, new in pairs}
        for block in range(depth):
            for kind, attention in (("spatial_block", "window_attn"), ("channel_block", "channel_attn")):
                at = f"vision_tower.blocks.{stage}.{block}.{kind}"
                pairs = [
                    ("conv1.fn.dw", "conv1"),
                    (f"{attention}.norm", "norm1"),
                    (f"{attention}.fn.qkv", f"{attention}.qkv"),
                    (f"{attention}.fn.proj", f"{attention}.proj"),
                    ("conv2.fn.dw", "conv2"),
                    ("ffn.norm", "norm2"),
                    ("ffn.fn.net.fc1", "ffn.fc1"),
                    ("ffn.fn.net.fc2", "ffn.fc2"),
                ]
                names |= {f"{at}.{old}": f"model.{at}.{new}" for old, new in pairs}
    names = {f"{old}.{part}": f"{new}.{part}" for old, new in names.items() for part in ("weight", "bias")}
    projector = "model.multi_modal_projector"
    return names | {
        "image_projection": f"{projector}.image_projection.weight",
        "image_proj_norm.weight": f"{projector}.image_proj_norm.weight",
        "image_proj_norm.bias": f"{projector}.image_proj_norm.bias",
        "image_pos_embed.row_embeddings.weight": f"{projector}.image_position_embed.row_embeddings.weight",
        "image_pos_embed.column_embeddings.weight": f"{projector}.image_position_embed.column_embeddings.weight",
        "visual_temporal_embed.pos_idx_to_embed": f"{projector}.visual_temporal_embed.pos_idx_to_embed",
    }


def published_weights(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of transformers' class under the published names."""
    state = model.state_dict()
    weights = {old: state.pop(new) for old, new in published_names(config).items()}
    weights["image_projection"] = weights["image_projection"].T
    weights["language_model.lm_head.weight"] = state.pop("lm_head.weight")
    text = "model.language_model."
    assert all(name.startswith(text) for name in state)
    weights |= {name.replace(text, "language_model.model."): weight for name, weight in state.items()}
    weights["language_model.final_logits_bias"] = torch.zeros(1, config["vocab_size"])
    return {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}


def converted_config(config: dict[str, Any], image_token_id: int) -> Florence2Config:
    vision, text = dict(config["vision_config"]), dict(config["text_config"])
    vision["embed_dim"] = vision.pop("dim_embed")
    vision["max_temporal_embeddings"] = vision.pop("visual_temporal_embedding")["max_temporal_embeddings"]
    vision["max_position_embeddings"] = vision.pop("image_pos_embed")["max_pos_embeddings"]
    vision["model_type"], text["model_type"] = "florence_vision", "bart"
    tied, text["tie_word_embeddings"] = text.get("tie_word_embeddings", True), True
    return Florence2Config(
        vision_config=vision, text_config=text, image_token_id=image_token_id, tie_word_embeddings=tied
    )


def write(out: Path, name: str = "large_ft", seed: int = 0, **changes: Any) -> Florence2Reference:
    """Write the checkpoint, and return a reference that uses transformers' converted model.

    `changes` are applied to sections of config.json.
    """
    tokenizer = save_tokenizer(out, TOKENS, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    frame = TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    tokenizer.backend_tokenizer.post_processor = frame
    tokenizer.save_pretrained(out)
    config = shrunk(name, len(tokenizer) + len(ADDED))
    config |= {part: config[part] | change for part, change in changes.items()}
    files = {file: read(name, file) for file in ("generation_config", "preprocessor_config")}
    files["preprocessor_config"] |= {"size": {"height": SIDE, "width": SIDE}, "image_seq_length": FEATURES}
    save_json(out, config=config, tokenizer_config={"model_max_length": 1024}, **files)

    tokenizer.add_tokens([token for token in ADDED if token not in tokenizer.get_vocab()], special_tokens=True)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    torch.manual_seed(seed)
    converted = converted_config(config, tokenizer.convert_tokens_to_ids("<image>"))
    converted.text_config.init_std, converted.vision_config.initializer_range = 0.2, 0.1
    model = Florence2ForConditionalGeneration(converted)
    for weight in model.parameters():
        if weight.ndim == 1:  # if all norms had the same weights, a swap of two norms would not be detected
            weight.data += 0.2 * torch.randn_like(weight)
    save_file(published_weights(model, config), out / "model.safetensors")

    model.resize_token_embeddings(len(tokenizer), 64)
    model.lm_head.weight.data[config["vocab_size"] :] = 0  # the last rows belong to added tokens, which no text spells
    rules = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id")
    for rule in (*rules, "forced_eos_token_id", "no_repeat_ngram_size"):
        setattr(model.generation_config, rule, config["text_config"][rule])
    return Reference(out, model, tokenizer)


class Reference(Florence2Reference):
    """Reference whose logits are truncated to the published vocabulary."""

    def __init__(self, path: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
        images = CLIPImageProcessor.from_pretrained(path)
        images.image_seq_length = FEATURES
        super(Florence2Reference, self).__init__(model, Florence2Processor(images, tokenizer))
        self.vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]

    def answer_logits(self, items, decoder_input_ids):
        return super().answer_logits(items, decoder_input_ids)[:, : self.vocab_size]


class TestFlorence2Original(Seq2SeqContract):
    name = "florence2"
    embeds_media_tokens = False
    unspelled = True
    decoder_input_ids = plain.TestFlorence2.decoder_input_ids
    prompts: ClassVar = plain.TestFlorence2.prompts
    references: ClassVar[dict[Path, Reference]] = {}

    @classmethod
    def write_checkpoint(cls, out):
        cls.references[out] = write(out)

    @classmethod
    def make_reference(cls, path):
        return cls.references[path]

    @pytest.mark.parametrize("name", ["amd", "oracle"])
    def test_other_published_configurations_are_served(self, name, tmp_path, path_file):
        """Each config.json has wrong token ids at its top level and does not give the name of the tower."""
        reference = write(tmp_path, name, seed=1)
        self.assert_same(tmp_path, reference, path_file)
        model = load_model(tmp_path, device="cpu", dtype="float32")
        items = self.prompts["a task"]
        with Tokenizer.from_pretrained(tmp_path) as tokenizer:
            outputs, errors = run(self.engine(model), [tokenizer.tokenize(items, path_file)], max_tokens=24)
        assert not errors
        assert outputs[0] == reference.generate(items, 24)
        assert model.spec.eos_token_ids == (EOS,)

    def test_logits_under_other_settings_equal_the_references(self, tmp_path, path_file):
        text = {"tie_word_embeddings": False, "scale_embedding": True, "activation_function": "relu"}
        vision = {
            "patch_prenorm": [False, True, False, True],
            "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 9},
            "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 7},
            "window_size": 5,
        }
        reference = write(tmp_path, text_config=text, vision_config=vision)
        names = load_file(tmp_path / "model.safetensors")
        assert not torch.equal(names["language_model.lm_head.weight"], names["language_model.model.shared.weight"]), (
            "not tied"
        )
        self.assert_same(tmp_path, reference, path_file)

    def test_a_tower_of_another_kind_is_refused_by_name(self, tmp_path):
        write(tmp_path)
        save_json(tmp_path, config=read("04rr", "config"))
        self.assert_refused(tmp_path, "microsoft/swinv2-large.*supported only with the tower davit")

    @pytest.mark.parametrize(
        ("part", "change", "named"),
        [
            ("vision_config", {"image_feature_source": ["last_frame"]}, "image_feature_source is"),
            ("vision_config", {"image_pos_embed": {"type": "sine"}}, "image_pos_embed.type is 'sine'"),
            ("vision_config", {"image_pos_embed": None}, "image_pos_embed.type is 'none'"),
            ("vision_config", {"visual_temporal_embedding": {"type": "LEARNED"}}, "visual_temporal_embedding.type is"),
            ("text_config", {"model_type": "t5"}, "text_config.model_type is 't5'"),
            (
                "vision_config",
                {"projection_dim": 48},
                r"projection_dim=48 must equal text_config.d_model \(32\)",
            ),
        ],
        ids=str,
    )
    def test_unsupported_settings_are_refused_by_name(self, part, change, named, path, tmp_path):
        config = json.loads((path / "config.json").read_text())
        other = changed(path, tmp_path / "other", "config", {part: config[part] | change})
        self.assert_refused(other, named)

    def change_text_config(self, path, **changes):
        config = json.loads((path / "config.json").read_text())
        config["text_config"] |= changes
        save_json(path, config=config)

    def test_quantized_weights_are_refused(self, path, tmp_path):
        settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        other = changed(path, tmp_path / "other", "config", {"quantization_config": settings})
        with pytest.raises(UnsupportedCheckpoint, match=r"is quantized, .* only in transformers' layout"):
            load_model(other, device="cpu")

    def test_a_missing_tokenizer_is_named(self, path, tmp_path):
        shutil.copytree(path, tmp_path / "other")
        (tmp_path / "other" / "tokenizer.json").unlink()
        self.assert_refused(tmp_path / "other", "has no tokenizer.json")

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda weights: weights.pop("image_proj_norm.bias"), "lacks 1 weights; the first is image_proj_norm.bias"),
            (
                lambda weights: weights.pop("vision_tower.blocks.2.1.channel_block.channel_attn.fn.qkv.weight"),
                "the first is vision_tower.blocks.2.1.channel_block.channel_attn.fn.qkv.weight",
            ),
            (lambda weights: weights.update(answer=torch.zeros(2)), "does not have; the first is answer"),
            (
                lambda weights: weights.update(image_projection=torch.zeros(5, 32)),
                r"the first is image_projection, which has shape \[5, 32\] instead of \[32, 32\]",
            ),
        ],
        ids=["a norm", "a block's", "unknown", "shape does not match"],
    )
    def test_bad_weights_are_refused_by_their_published_names(self, change, named, path, tmp_path):
        self.assert_weights_refused(path, tmp_path, change, named)

    @pytest.mark.parametrize("kept", ["language_model.lm_head.weight", "language_model.model.shared.weight"])
    def test_tied_weights_are_stored_once_under_any_of_their_names(self, kept, path, tmp_path, reference, path_file):
        shutil.copytree(path, tmp_path / "other")
        weights = load_file(path / "model.safetensors")
        names = ["language_model.lm_head.weight"]
        names += [
            f"language_model.model.{part}.weight" for part in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
        ]
        for name in set(names) - {kept}:
            del weights[name]
        save_file(weights, tmp_path / "other" / "model.safetensors")
        self.assert_same(tmp_path / "other", reference, path_file)

    def test_weights_in_a_bin_file_are_served(self, path, tmp_path, reference, path_file):
        """`final_logits_bias` is added to the logits, as in the original. In the published checkpoints, it is zero."""
        shutil.copytree(path, tmp_path / "other")
        weights = load_file(path / "model.safetensors")
        (tmp_path / "other" / "model.safetensors").unlink()
        bias = torch.randn(1, reference.vocab_size)
        weights["language_model.final_logits_bias"] = bias
        torch.save(weights, tmp_path / "other" / "pytorch_model.bin")
        model = load_model(tmp_path / "other", device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(tmp_path / "other") as tokenizer:
            for items in self.prompts.values():
                ids = tokenizer.tokenize(items, path_file)
                expected = reference.logits(items) + bias
                assert (self.logits(model, ids) - expected).abs().max() <= self.tolerance

    def test_locations_are_tokens_in_prompts_and_answers(self, path, tokenizer, path_file):
        """Location tokens that tokenizer.json lacks are added. Their ids follow the last id in tokenizer.json."""
        first = json.loads((path / "config.json").read_text())["vocab_size"] - len(ADDED)
        items = [{"image": noise(30, 30)}, {"text": "<loc_7></s><image><s><od><and>"}]
        text = tokenizer.tokenize(items, path_file, parse_special=False)[FEATURES:].tolist()
        spelled = [first + 4 + 7, first, first + len(ADDED) - 1]
        assert [token for token in text if token < len(TOKENS) or token >= first] == [BOS, *spelled, EOS]
        decoder = load_tokenizer(Checkpoint.open(path), shown_tokens=tokenizer.prompts.traits.shown_tokens)
        assert decoder.decode([BOS, *spelled, EOS], skip_special_tokens=True) == "<loc_7><od><and>"

    def test_the_placeholder_without_an_image_is_refused(self, model, path, path_file, tokenizer):
        engine = self.engine(model)
        beyond = model.spec.vocab_size
        for ids in ([BOS, beyond, EOS], [*tokenizer.tokenize([{"image": noise(30, 30)}, {"text": "?"}], path_file)]):
            _, errors = run(engine, [torch.tensor([beyond, *ids] if len(ids) > 3 else ids)], max_tokens=2)
            (error,) = errors.values()
            assert error.name == "TokenOutOfRange"
