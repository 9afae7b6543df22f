"""Tests for InternVL in OpenGVLab's layout against transformers' class with the same weights."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.models import load_model
from mindie_mm.nn.splice import plain_ids
from tests.models import test_internvl as plain
from tests.models.contract import ExtremeShapes, FamilyContract, noise
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import changed, save_json, save_tokenizer
from tests.models.test_internvl import TOKENS

PUBLISHED = json.loads((Path(__file__).parents[1] / "published" / "internvl_chat_2b" / "config.json").read_text())
SIDE, FEATURES, TILES = 28, 4, 6
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 7,
}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "_attn_implementation_autoset": True,
    "attn_implementation": "flash_attention_2",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "use_sliding_window": False,
}
"""Settings of InternVL3-1B's language model, without its dimensions."""
ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"),
)
NAMES = (
    (r"model\.vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"model\.vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"model\.vision_tower\.embeddings\.patch_embeddings\.projection\.", "vision_model.embeddings.patch_embedding."),
    (r"model\.vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"attention\.projection_layer", "attn.proj"),
    (r"attention\.(qkv|q_norm|k_norm)\.", r"attn.\1."),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_", "ls"),
    (r"model\.multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"model\.multi_modal_projector\.linear_1", "mlp1.1"),
    (r"model\.multi_modal_projector\.linear_2", "mlp1.3"),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
)
"""Parts of transformers' weight names, and the corresponding parts of the published names.

The pairs come from transformers' conversion script.
"""


INTERNLM2_NAMES = (
    (r"embed_tokens", "tok_embeddings"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"self_attn\.wqkv", "attention.wqkv"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"language_model\.lm_head", "language_model.output"),
)
"""Further replacements, which are applied after NAMES if the language model is InternLM2."""
CONFIGS = {
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "LlamaForCausalLM": LlamaConfig,
    "InternLM2ForCausalLM": LlamaConfig,
}


def published_weights(model: torch.nn.Module, internlm2: bool) -> dict[str, torch.Tensor]:
    """Return the weights of transformers' class under the published names."""
    state = model.state_dict()
    for name in [name for name in state if "vision_tower" in name and "attention.q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        state[name.replace("q_proj", "qkv")] = torch.cat(parts)
    for name in [name for name in state if internlm2 and "self_attn.q_proj" in name]:
        queries, keys, values = (state.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv")
        heads, width = TEXT["num_key_value_heads"], TEXT["hidden_size"] // TEXT["num_attention_heads"]
        shares = [part.chunk(heads) for part in (queries, keys, values)]
        assert shares[1][0].shape[0] == width
        state[name.replace("q_proj", "wqkv")] = torch.cat(
            [part for group in zip(*shares, strict=True) for part in group]
        )
    names = (*NAMES, *INTERNLM2_NAMES) if internlm2 else NAMES
    return {renamed(name, names): weight.clone().contiguous() for name, weight in state.items()}


def renamed(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for pattern, published in names:
        if not (name.startswith("vision_model") and (pattern, published) in INTERNLM2_NAMES):
            name = re.sub(pattern, published, name)
    return name


def save_qwen2_tokenizer(out: Path) -> dict[str, int]:
    """Write a Qwen2 tokenizer without tokenizer.json, as OpenGVLab publishes it. Return its added tokens."""
    save_tokenizer(out, ())
    model = json.loads((out / "tokenizer.json").read_text())["model"]
    for file in out.iterdir():
        file.unlink()
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (out / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    ids = {token: len(model["vocab"]) + index for index, token in enumerate(ADDED)}
    flags = {**dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False), "special": True}
    save_json(
        out,
        vocab=model["vocab"],
        added_tokens=ids,
        tokenizer_config={
            "add_prefix_space": False,
            "added_tokens_decoder": {str(index): {"content": token, **flags} for token, index in ids.items()},
            "additional_special_tokens": list(ADDED[1:]),
            "bos_token": None,
            "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 8192,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )
    return ids


def save_internlm2_tokenizer(out: Path) -> dict[str, int]:
    """Write the files of OpenGVLab's InternLM2 tokenizer and a tokenizer.json. Return the added tokens."""
    tokens = ("<unk>", "<s>", "</s>", *ADDED)
    save_tokenizer(out, tokens)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    classes = {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}
    save_json(out, tokenizer_config={"auto_map": classes, "tokenizer_class": "InternLM2Tokenizer", **named})
    return {token: index for index, token in enumerate(tokens)}


def config_of(language: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a published config.json with smaller dimensions."""
    sizes = {"force_image_size": SIDE, "max_dynamic_patch": TILES, "llm_config": {**language, **TEXT}}
    return PUBLISHED | sizes | {"vision_config": PUBLISHED["vision_config"] | VISION} | changes


def converted_vision(vision: dict[str, Any]) -> InternVLVisionConfig:
    """Convert the vision settings as transformers' conversion script does."""
    kept = {key: vision[key] for key in (*VISION, "hidden_act", "norm_type", "layer_norm_eps", "num_channels")}
    return InternVLVisionConfig(**kept, attention_bias=vision["qkv_bias"], use_qk_norm=vision["qk_normalization"])


def draw(config: InternVLConfig) -> InternVLForConditionalGeneration:
    """Return a model with random weights, including the norms, so that a swap of two weights is detected."""
    torch.manual_seed(0)
    model = InternVLForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += 0.2 * torch.randn_like(weight)
        else:
            weight.data = 0.1 * torch.randn_like(weight)
    return model


def write(out: Path, language: dict[str, Any] = QWEN2, **changes: Any) -> "Reference":
    """Write the checkpoint with `changes` to config.json.

    Return a reference that uses transformers' converted model.
    """
    language = deepcopy(language)  # transformers adds rope_theta to the given rope_scaling
    kind = language["architectures"][0]
    internlm2 = kind == "InternLM2ForCausalLM"
    ids = save_internlm2_tokenizer(out) if internlm2 else save_qwen2_tokenizer(out)
    config = config_of({**language, "vocab_size": 400 if internlm2 else max(ids.values()) + 1}, **changes)
    pixels = {"crop_size": 448, "feature_extractor_type": "CLIPFeatureExtractor"}
    save_json(out, config=config, preprocessor_config=pixels)
    dropped = ("_attn_implementation_autoset", "attn_implementation", "architectures", "torch_dtype", "model_type")
    text = {key: value for key, value in config["llm_config"].items() if key not in dropped}
    if internlm2:
        text["attention_bias"] = text.pop("bias")
    converted = InternVLConfig(
        vision_config=converted_vision(config["vision_config"]),
        text_config=CONFIGS[kind](**text),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=FEATURES,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    model = draw(converted)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    save_file(published_weights(model, internlm2), out / "model.safetensors")
    tokenizer = (PreTrainedTokenizerFast if internlm2 else Qwen2Tokenizer).from_pretrained(
        out, extra_special_tokens=TOKENS
    )
    return Reference(model, tokenizer, config["max_dynamic_patch"] if config["dynamic_image_size"] else 1)


class Reference(BaseReference):
    markers: ClassVar = plain.Reference.markers

    def __init__(self, model: Any, tokenizer: Any, tiles: int = TILES) -> None:
        settings = {
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        }
        images = GotOcr2ImageProcessor(**settings, max_patches=tiles, crop_to_patches=True)
        videos = InternVLVideoProcessor(**settings)
        super().__init__(model, InternVLProcessor(images, tokenizer, videos, image_seq_length=FEATURES))


class TestInternVLOriginal(ExtremeShapes, FamilyContract):
    name = "internvl"
    settings_file = None  # preprocessing depends on config.json and constants, as in the original
    prompts: ClassVar = plain.TestInternVL.prompts
    references: ClassVar[dict[Path, Reference]] = {}

    @classmethod
    def write_checkpoint(cls, out):
        cls.references[out] = write(out)

    @classmethod
    def make_reference(cls, path):
        return cls.references[path]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda w: w.pop("mlp1.3.bias"), "lacks 1 weights; the first is mlp1.3.bias"),
            (
                lambda w: w.pop("vision_model.encoder.layers.1.attn.qkv.bias"),
                "lacks 1 weights; the first is vision_model.encoder.layers.1.attn.qkv.bias",
            ),
            (lambda w: w.pop("language_model.lm_head.weight"), "the first is language_model.lm_head.weight"),
            (lambda w: w.update(answer=torch.zeros(2)), "does not have; the first is answer"),
            (
                lambda w: w.update({"vision_model.encoder.layers.1.attn.qkv.bias": torch.zeros(95)}),
                r"vision_model.encoder.layers.1.attn.qkv.bias, which has shape \[95\] instead of \[96\]",
            ),
        ],
        ids=["projector", "qkv", "untied", "unknown", "shape does not match"],
    )
    def test_bad_weights_are_refused_by_their_published_names(self, change, named, path, tmp_path):
        self.assert_weights_refused(path, tmp_path, change, named)

    @pytest.mark.parametrize(
        "language",
        [
            {**PUBLISHED["llm_config"], "pad_token_id": 2},
            {**PUBLISHED["llm_config"], "bias": True},
            {**QWEN2, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": None},
            {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
        ],
        ids=["InternLM2", "InternLM2 with biases", "Llama", "Qwen3"],
    )
    def test_other_language_models_are_served(self, language, tmp_path, path_file):
        self.assert_same(tmp_path, write(tmp_path, language), path_file)

    def test_the_6b_tower_and_one_tile_per_image_are_served(self, tmp_path, path_file):
        vision = {"norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False}
        vision = PUBLISHED["vision_config"] | VISION | vision
        self.assert_same(tmp_path, write(tmp_path, vision_config=vision, dynamic_image_size=False), path_file)

    def test_a_conversation_is_formatted_as_in_the_conversion_script(self, reference, model, tokenizer, path_file):
        image = noise(40, 90)
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Hm?"}]},
        ]
        ids = tokenizer.tokenize_chat(messages, path_file).numpy()
        opening = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        closing = "\nHm?<|im_end|>\n<|im_start|>assistant\n"
        expected = reference.inputs([{"text": opening}, {"image": image}, {"text": closing}])
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    @pytest.mark.parametrize(
        ("stated", "others"), [({}, []), ({"eos_token_id": None}, []), ({"eos_token_id": 7}, [7])], ids=str
    )
    def test_an_answer_ends_with_its_turn(self, stated, others, tmp_path):
        """The token that ends a turn is added to the EOS tokens.

        InternLM2's files list only the token that ends a text.
        """
        reference = write(tmp_path, PUBLISHED["llm_config"])
        save_json(tmp_path, generation_config=stated)
        turn = reference.model.generation_config.eos_token_id
        assert load_model(tmp_path, device="cpu").spec.eos_token_ids == (*others, turn, 2)

    def test_tied_embeddings_may_be_stored_once(self, tmp_path, path_file):
        reference = write(tmp_path, {**QWEN2, "tie_word_embeddings": True})
        weights = load_file(tmp_path / "model.safetensors")
        del weights["language_model.lm_head.weight"]
        torch.save(weights, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
        self.assert_same(tmp_path, reference, path_file)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"ps_version": "v1"}, "ps_version is 'v1'"),
            ({"ps_version": None}, "ps_version is 'v1'"),
            ({"select_layer": -4}, "select_layer is -4"),
            ({"force_image_size": 56}, "force_image_size is 56"),
            ({"use_thumbnail": False}, "use_thumbnail is False"),
            ({"pad2square": True}, "pad2square is True"),
            ({"use_llm_lora": 16}, "use_llm_lora is 16"),
            ({"template": "phi3-chat"}, "template is 'phi3-chat'"),
            ({"template": None}, "template is None"),
            (
                {"llm_config": {"architectures": ["Phi3ForCausalLM"]}},
                "the architecture in llm_config is Phi3ForCausalLM",
            ),
            ({"llm_config": None}, "the architecture in llm_config is None"),
            ({"vision_config": {"model_type": "siglip"}}, "vision_config.model_type is 'siglip'"),
        ],
        ids=str,
    )
    def test_unsupported_settings_are_refused_by_name(self, change, named, path, tmp_path):
        other = changed(path, tmp_path / "other", "config", change)
        self.assert_refused(other, f"{named}.*OpenGVLab/InternVL3-1B-hf")

    def test_another_patch_size_is_refused(self, path, tmp_path):
        self.assert_refused(changed(path, tmp_path / "other", "config", {"downsample_ratio": 0.3}), "downsample_ratio")

    @pytest.mark.parametrize(
        ("name", "gone", "named"),
        [
            (
                "Qwen2Tokenizer",
                "merges.txt",
                r"has no tokenizer\.json, and does not have both vocab\.json and merges\.txt; copy the missing files",
            ),
            (
                "InternLM2Tokenizer",
                "vocab.json",
                r"has no tokenizer\.json, which the tokenizer class InternLM2Tokenizer requires; copy",
            ),
            (None, "vocab.json", r"has no tokenizer\.json, and no tokenizer_config\.json with a tokenizer_class; copy"),
        ],
    )
    def test_a_missing_tokenizer_is_named(self, name, gone, named, path, tmp_path):
        other = changed(path, tmp_path / "other", "tokenizer_config", {"tokenizer_class": name})
        (other / gone).unlink()
        self.assert_refused(other, f"{named}.*OpenGVLab/InternVL3-1B-hf")

    def test_a_tokenizer_without_image_tokens_is_refused(self, path, tmp_path):
        added = json.loads((path / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        kept = {index: token for index, token in added.items() if token["content"] in ADDED[:3]}
        settings = {"added_tokens_decoder": kept, "additional_special_tokens": []}
        other = changed(path, tmp_path / "other", "tokenizer_config", settings)
        save_json(other, added_tokens={})
        self.assert_refused(other, "no added token <IMG_CONTEXT>")

    def test_added_tokens_may_be_in_added_tokens_json_alone(self, path, tmp_path, reference, path_file):
        other = changed(path, tmp_path / "other", "tokenizer_config", {"added_tokens_decoder": None})
        settings = json.loads((other / "tokenizer_config.json").read_text())
        del settings["added_tokens_decoder"]
        save_json(other, tokenizer_config=settings)
        self.assert_same(other, reference, path_file)

    def test_quantized_weights_are_refused(self, path, tmp_path):
        settings = {"quant_method": "awq", "bits": 4}
        other = changed(path, tmp_path / "other", "config", {"quantization_config": settings})
        with pytest.raises(UnsupportedCheckpoint, match=r"is quantized, .* only in transformers' layout"):
            load_model(other, device="cpu")
