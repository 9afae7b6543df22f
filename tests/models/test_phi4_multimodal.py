"""Tests for Phi-4-multimodal against transformers, on random weights and adapters."""

import json
import math
import re
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalImageProcessor,
    Phi4MultimodalProcessor,
)

from mindie_mm.engine.core import Engine
from mindie_mm.errors import MediaError, UnsupportedCheckpoint
from mindie_mm.inputs import Media
from mindie_mm.models import family_of, load_model
from mindie_mm.models._phi4_multimodal_adapters import AdaptedLinear, AdapterChoice
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.splice import plain_ids
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from mindie_mm.tokenize import Tokenizer
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import request_of_items
from tests.audio_samples import tone
from tests.models.contract import NUM_TOKENS, ExtremeShapes, FamilyContract, noise, refusals, run
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import changed, save_json, save_model, save_tokenizer

NAMES = {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}
TOKENS = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", *NAMES.values())
WEIGHTS = {"initializer_range": 0.2}  # large enough for media to change the logits
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_blocks": 2,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 8,
    "input_size": 16,
    **WEIGHTS,
}
ORIGINAL_LENGTH = 325
"""Number of tokens up to which the short factors apply. Some prompts are longer, and an answer exceeds it."""
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
ADAPTERS = {"vision": (4, 8), "speech": (6, 9)}
"""Rank and alpha of each adapter."""
TARGETS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def write(out, **settings):
    tokenizer = save_tokenizer(
        out, TOKENS, bos_token="<|endoftext|>", eos_token="<|endoftext|>", extra_special_tokens=NAMES
    )
    ids = tokenizer.convert_tokens_to_ids
    config = Phi4MultimodalConfig(
        vision_config={**VISION, "image_token_id": ids(NAMES["image_token"])},
        audio_config={**AUDIO, "audio_token_id": ids(NAMES["audio_token"])},
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        original_max_position_embeddings=ORIGINAL_LENGTH,
        rope_parameters=ROPE,
        sliding_window=262144,
        tie_word_embeddings=False,
        bos_token_id=0,
        pad_token_id=0,
        eos_token_id=[0, 1],
        initializer_range=0.1,
        **settings,
    )
    save_model(out, Phi4MultimodalForCausalLM, config, [0, 1], 0)
    Phi4MultimodalProcessor(
        Phi4MultimodalImageProcessor(), Phi4MultimodalFeatureExtractor(feature_size=16), tokenizer
    ).save_pretrained(out)
    _scale_towers(out)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(out / "model.safetensors")
    for name, (rank, alpha) in ADAPTERS.items():
        adapter = {}
        for layer in range(2):
            for target in TARGETS:
                outputs, inputs = weights[f"model.layers.{layer}.{target}.weight"].shape
                for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    key = f"base_model.model.model.layers.{layer}.{target}.lora_{part}.weight"
                    adapter[key] = torch.randn(shape, generator=generator) * 0.1
        (out / f"{name}-lora").mkdir()
        save_file(adapter, out / f"{name}-lora" / "adapter_model.safetensors", {"format": "pt"})
        save_json(out / f"{name}-lora", adapter_config={"peft_type": "LORA", "r": rank, "lora_alpha": alpha})


def _scale_towers(out):
    """Scale the random weights of the towers, which transformers draws from wide distributions, or as zeros."""
    weights = load_file(out / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, weight in weights.items():
        if "feature_extensor" in name or name.endswith((".b1", ".b2", "global_mean")):
            weight.copy_(torch.randn(weight.shape, generator=generator))
        elif "img_processor" in name and weight.dim() > 1:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    save_file(weights, out / "model.safetensors", {"format": "pt"})


class Reference(BaseReference):
    """transformers' model, into whose weights the adapter of each prompt is merged."""

    markers: ClassVar = {"image": NAMES["image_token"], "audio": NAMES["audio_token"]}

    def __init__(self, path):
        model = Phi4MultimodalForCausalLM.from_pretrained(path, dtype=torch.float32)  # `_scale_towers` changed it
        # With sdpa, transformers' tower attends causally to tiles without padding.
        model.set_attn_implementation({"vision_config": "eager"})
        super().__init__(model, Phi4MultimodalProcessor.from_pretrained(path))
        own = {name: weight.clone() for name, weight in model.named_parameters() if "layers" in name}
        self.merged = {None: own}
        for name, (rank, alpha) in ADAPTERS.items():
            adapter = load_file(path / f"{name}-lora" / "adapter_model.safetensors")
            self.merged[name] = {}
            for layer in range(2):
                for target in TARGETS:
                    key = f"model.layers.{layer}.{target}"
                    a, b = (adapter[f"base_model.model.{key}.lora_{part}.weight"] for part in "AB")
                    self.merged[name][f"{key}.weight"] = own[f"{key}.weight"] + alpha / rank * (b @ a)

    def generate(self, items, count):
        # transformers drops its cache when a sequence exceeds the length of the short factors, but does not compute the
        # keys again. A second call to `generate` does.
        inputs = dict(self.inputs(items))
        inputs.pop("attention_mask")
        ids = inputs.pop("input_ids")
        length, stop = ids.shape[1], ids.shape[1] + count
        short = ORIGINAL_LENGTH + 1 if length <= ORIGINAL_LENGTH else stop
        for end in (min(short, stop), stop):
            if ids.shape[1] < end:
                more = end - ids.shape[1]
                ids = self.model.generate(ids, **inputs, max_new_tokens=more, do_sample=False)
        return ids[0, length:].tolist()

    def inputs(self, items):
        images = [Image.fromarray(item["image"]) for item in items if "image" in item]
        clips = [item["audio"] for item in items if "audio" in item]
        parameters = dict(self.model.named_parameters())
        for name, weight in self.merged["vision" if images else "speech" if clips else None].items():
            parameters[name].data.copy_(weight)
        return self.processor(
            text=[self.text(items)],
            images=images or None,
            audio=clips or None,
            sampling_rate=16_000,
            return_tensors="pt",
        )


class TestPhi4Multimodal(ExtremeShapes, FamilyContract):
    name = "phi4_multimodal"
    write_checkpoint = staticmethod(write)
    reference_class = Reference
    settings_file = "processor_config.json"
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "a clip": [{"text": "Listen: "}, {"audio": tone(1.53)}, {"text": "What is it?"}],
        "one image": [{"text": "Look: "}, {"image": noise(40, 800)}, {"text": "What is it?"}],
        "several tiles": [{"image": noise(460, 300)}, {"text": "and"}, {"image": noise(20, 90)}, {"text": "?"}],
        "mixed": [{"image": noise(30, 448)}, {"text": "and"}, {"audio": tone(0.4)}, {"audio": tone(0.4, hertz=900)}],
    }

    def test_an_answer_exceeds_the_length_of_the_short_factors(self, tokenized):
        """The contract compares its tokens with transformers, which computes all keys again at this length."""
        assert len(tokenized["mixed"]) <= ORIGINAL_LENGTH < len(tokenized["mixed"]) + NUM_TOKENS

    def test_keys_of_one_adapter_are_not_reused_with_another(self, reference, model, tokenizer, path_file):
        start = {"text": "What is in the image? A square, perhaps. " * 3}
        prompts = [[start], [start, {"audio": tone(0.4)}], [start, {"image": noise(30, 448)}]]
        ids = [tokenizer.tokenize(items, path_file) for items in prompts]
        engine = Engine(model, EngineConfig(kv_block_size=16))
        for items, one in zip(prompts, ids, strict=True):
            assert run(engine, [one], max_tokens=4) == ({0: reference.generate(items, 4)}, {})

    def test_a_clip_of_several_chunks_equals_the_reference(self, reference, model, tokenizer, path_file):
        items = [{"audio": tone(41.3)}, {"text": "?"}]
        ids = tokenizer.tokenize(items, path_file)
        assert len(ids) > 500
        assert (self.logits(model, ids) - reference.logits(items)).abs().max() <= self.tolerance

    def test_a_clip_keeps_the_adapter_of_its_projector_when_the_image_is_truncated(self, model, tokenizer, path_file):
        tail = [{"audio": tone(1.53)}, {"text": "What is it?"}]
        alone = tokenizer.answer(request_of_items(tail, chat=False, path_file=str(path_file)))
        options, items = PromptOptions(len(alone) + 1, truncate=True), [{"image": noise(30, 448)}, *tail]
        cut = tokenizer.answer(request_of_items(items, chat=False, path_file=str(path_file), options=options))
        adapters = [model.positions(len(made), model.read(made.ids)).prompt[1, 0].item() for made in (alone, cut)]
        assert adapters == [2, 1]

    def test_clips_of_one_prompt_do_not_affect_each_other(self, model, tokenizer, path_file):
        """Transformers pads the clips of a prompt to the same length, and its attention does not ignore the padding."""
        clips = [{"audio": tone(0.4)}, {"audio": tone(1.3)}, {"audio": tone(41.3)}]
        together = model.encode(model.read(tokenizer.tokenize(clips, path_file).numpy()))
        for clip, features in zip(clips, together, strict=True):
            (alone,) = model.encode(model.read(tokenizer.tokenize([clip], path_file).numpy()))
            assert (features - alone).abs().max() <= 1e-5

    def test_grids_of_large_images_equal_the_references(self, processor):
        theirs = Phi4MultimodalImageProcessor()
        ratios = {(i, j) for i in range(1, 37) for j in range(1, 37) if i * j <= 36}
        ratios = sorted(ratios, key=math.prod)
        for height in range(300, 9000, 611):
            for width in range(300, 9000, 487):
                data = np.broadcast_to(np.uint8(0), (height, width, 3))
                plan, _ = processor.plan(Media("image", b""), data, {"image": 1})
                assert processor.spelling("image", plan.num_features, plan.grid) is not None
                if math.ceil(height / 448) * math.ceil(width / 448) > 36:
                    expected = theirs.find_closest_aspect_ratio(width / height, ratios, width, height, 448)
                    assert processor._tiles(height, width)[::-1] == expected

    def test_a_clip_shorter_than_a_window_is_refused(self, processor):
        with pytest.raises(MediaError, match=r"399 samples at 16000 Hz; it must have at least 400"):
            processor.plan(Media("audio", b""), np.zeros(399, np.float32), {"audio": 1})

    @pytest.mark.parametrize(
        ("kind", "count", "grid"),
        [
            ("image", 300, (1, 1, 3)),
            ("image", 545, (1, 1, 33, 32)),
            ("image", 545, (6, 7, 32, 32)),
            ("image", 273 + 16 * 16, (1, 1, 31, 31)),
            ("audio", 3, (24, 2)),
            ("audio", 4, (24, 0)),
        ],
    )
    def test_embeddings_whose_grid_does_not_fit_are_refused(self, kind, count, grid, processor):
        assert processor.spelling(kind, count, grid) is None

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"vision_config": {**VISION, "image_size": 224}}, "image_size is 224; only 448"),
            ("config", {"audio_config": {**AUDIO, "chunk_size": 18}}, "chunk_size is 18; only -1"),
            ("processor_config", {"image_processor": {"resample": 2}}, "resample is 2; only 3"),
            ("processor_config", {"feature_extractor": {"feature_size": 80}}, "feature_size is 80; only 16"),
        ]
    )

    def test_missing_and_other_adapters_are_refused(self, path, tmp_path):
        """Without its adapters, the model would answer about images and clips, but badly."""

        def refused(change, named):
            out = tmp_path / "other"
            shutil.copytree(path, out)
            change(out / "speech-lora")
            with pytest.raises(UnsupportedCheckpoint, match=named):
                load_model(out, device="cpu")
            shutil.rmtree(out)

        def without(layer):
            def change(folder):
                weights = load_file(folder / "adapter_model.safetensors")
                save_file(
                    {name: one for name, one in weights.items() if layer not in name},
                    folder / "adapter_model.safetensors",
                )

            return change

        refused(shutil.rmtree, r"speech-lora has no readable adapter.*copy the folders vision-lora and speech-lora")
        refused(
            without("layers.1.mlp.down_proj.lora_B"), r"speech adapter: lora_B of layer 1, mlp.down_proj, is missing"
        )
        settings = {"peft_type": "LORA", "r": 6, "lora_alpha": 9}
        refused(lambda folder: save_json(folder, adapter_config={**settings, "use_dora": True}), "use_dora is True")
        refused(lambda folder: save_json(folder, adapter_config={"r": 6}), "numbers lora_alpha and r")

    def test_the_original_layout_gives_the_same_logits(self, path, model, tokenizer, tmp_path, path_file, monkeypatch):
        monkeypatch.setattr("mindie_mm.models._phi4_multimodal_original._TOWER", VISION)
        out = original(path, tmp_path / "original")
        family = family_of(checkpoint := Checkpoint.open(out))
        assert family.unknown_keys(checkpoint) == []
        checkpoint.config["audio_processor"]["config"]["widht"] = 1
        assert family.unknown_keys(checkpoint) == ["audio_processor.config.widht"]
        other = load_model(out, device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(out) as own:
            for name in ("text", "mixed"):
                expected = tokenizer.tokenize(self.prompts[name], path_file)
                ids = own.tokenize(self.prompts[name], tmp_path / "own")
                assert (other.logits(ids) - model.logits(expected).cpu()).abs().max() <= self.tolerance
            content = [{"type": "image", "image": noise(30, 448)}, {"type": "text", "text": "Hm"}]
            ids = own.tokenize_chat([{"role": "user", "content": content}], tmp_path / "own").numpy()
            plain = plain_ids(ids, other.read(ids)).tolist()
            release(tmp_path / "own")
        assert [plain[0], plain[-2], plain[-1]] == [
            TOKENS.index(f"<|{name}|>") for name in ("user", "end", "assistant")
        ]
        for change, named in (
            ({"speech_lora": {}}, "speech_lora in config.json must state"),
            ({"embd_layer": {}}, "no section image_embd_layer"),
        ):
            self.assert_weights_refused_with(changed(out, tmp_path / named[:6], "config", change), named)

    def assert_weights_refused_with(self, path, named):
        with pytest.raises(UnsupportedCheckpoint, match=named):
            load_model(path, device="cpu")


TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)


def original(path, out):
    """Write the checkpoint `path` in the layout of microsoft/Phi-4-multimodal-instruct, with its config.json's keys."""
    shutil.copytree(path, out)
    config = json.loads((path / "config.json").read_text())
    audio, rope = config.pop("audio_config"), config.pop("rope_parameters")
    config.pop("vision_config")
    same = ("activation", "chunk_size", "conv_activation", "conv_glu_type", "depthwise_multiplier", "dropout_rate")
    same += ("ext_pw_out_channel", "input_size", "kernel_size", "left_chunk", "num_blocks", "time_reduction")
    encoder = {
        **{name: audio[name] for name in same},
        "activation_checkpointing": {"interval": 1, "module": "transformer", "offload": False},
        "attention_dim": audio["hidden_size"],
        "attention_heads": audio["num_attention_heads"],
        "batch_norm": False,
        "bias_in_glu": True,
        "causal": True,
        "cnn_layer_norm": True,
        "ext_pw_kernel_size": 1,
        "depthwise_seperable_out_channel": audio["depthwise_separable_out_channel"],
        "encoder_embedding_config": {"input_size": audio["input_size"]},
        "input_layer": "nemo_conv",
        "linear_units": audio["intermediate_size"],
        "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
        "relative_attention_bias_args": {"t5_bias_max_distance": audio["bias_max_distance"], "type": "t5"},
    }
    save_json(
        out,
        config={
            **config,
            "model_type": "phi4mm",
            "architectures": ["Phi4MMForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig", "AutoTokenizer": "Xenova/gpt-4o"},
            "audio_processor": {"config": encoder, "name": "cascades"},
            "embd_layer": {
                "audio_embd_layer": {
                    "compression_rate": 8,
                    "downsample_rate": 1,
                    "embedding_cls": "audio",
                    "projection_cls": "mlp",
                    "enable_gradient_checkpointing": True,
                    "use_conv_downsample": False,
                    "use_qformer": False,
                },
                "embedding_cls": "image_audio",
                "image_embd_layer": {
                    "crop_size": 448,
                    "embedding_cls": "tune_image",
                    "enable_gradient_checkpointing": True,
                    "hd_transform_order": "sub_glb",
                    "image_token_compression_cls": "avg_pool_2d",
                    "projection_cls": "mlp",
                    "use_hd_transform": True,
                    "with_learnable_separator": True,
                },
            },
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "partial_rotary_factor": rope["partial_rotary_factor"],
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "longrope", **{name: rope[name] for name in ("short_factor", "long_factor")}},
            **{
                f"{name}_lora": {"dp": 0.0, "layer": "layers.*", "lora_alpha": alpha, "r": rank}
                for name, (rank, alpha) in ADAPTERS.items()
            },
        },
        preprocessor_config={
            "image_processor_type": "Phi4MMImageProcessor",
            "processor_class": "Phi4MMProcessor",
            "feature_extractor_type": "Phi4MMAudioFeatureExtractor",
            "audio_compression_rate": 8,
            "audio_downsample_rate": 1,
            "audio_feat_stride": 1,
            "dynamic_hd": 36,
            "feature_size": 16,
        },
        tokenizer_config={
            **{f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "pad", "unk")},
            "tokenizer_class": "GPT2Tokenizer",
            "chat_template": TEMPLATE,
        },
    )
    (out / "processor_config.json").unlink()
    renamed = {}
    for name, weight in load_file(path / "model.safetensors").items():
        published = name
        for old, new in (
            (r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+)\.weight", r"\1.base_layer.weight"),
            (r"(.*feed_forward_\w+)\.gate_up_proj", r"\1.net.0.linear"),
            (r"(.*feed_forward_\w+)\.down_proj", r"\1.net.2"),
            (r"(.*encoders.*self_attn)\.([qkv])_proj", r"\1.linear_\2"),
            (r"(.*encoders.*self_attn)\.o_proj", r"\1.linear_out"),
            (r"(.*)img_projection_up", r"\1img_projection.0"),
            (r"(.*)img_projection_down", r"\1img_projection.2"),
            (r"(.*)global_img_feature_extensor", r"\1glb_GN"),
            (r"(.*)sub_img_feature_extensor", r"\1sub_GN"),
            (r"(.*)up_proj_for_speech", r"\1audio_projection.speech.0"),
            (r"(.*)down_proj_for_speech", r"\1audio_projection.speech.2"),
            (r"(.*)up_proj_for_vision_speech", r"\1audio_projection.vision.0"),
            (r"(.*)down_proj_for_vision_speech", r"\1audio_projection.vision.2"),
        ):
            published = re.sub(f"^{old}", new, published)
        renamed[published] = weight
    for adapter in ADAPTERS:
        for name, weight in load_file(path / f"{adapter}-lora" / "adapter_model.safetensors").items():
            renamed[name.removeprefix("base_model.model.").replace(".weight", f".{adapter}.weight")] = weight
        shutil.rmtree(out / f"{adapter}-lora")
    save_file(renamed, out / "model.safetensors", {"format": "pt"})
    return out


def test_adapters_of_a_quantized_layer_have_the_dtype_of_the_model():
    base = torch.nn.Linear(4, 3)
    base.weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.int8), requires_grad=False)
    down, up = torch.rand(2, 4), torch.rand(3, 2)
    layer = AdaptedLinear(base, [(down, up)], AdapterChoice([2], torch.device("cpu"), torch.float32))
    assert torch.equal(layer.down, down)
    assert torch.equal(layer.up, up)
