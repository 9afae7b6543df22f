"""Tests for Gemma 3n against transformers, on random weights. `make test-gemma3n` runs them, because they need timm."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers  # which imports the classes of Gemma 3n when they are first used: after `import_timm`
from PIL import Image
from tokenizers.processors import TemplateProcessing

from mindie_mm.errors import InputError, MediaError
from mindie_mm.inputs import Media
from mindie_mm.models._timm import import_timm
from mindie_mm.nn.paged_cache import KVLayer, SharedLayer
from tests.audio_samples import tone
from tests.models.contract import IMAGE_PROMPTS, ExtremeShapes, FamilyContract, noise, refusals
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import read_model, save_json, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

pytestmark = pytest.mark.skipif(not find_spec("timm"), reason="needs timm; run `make test-gemma3n`")

NAMES = {
    "boi_token": "<start_of_image>",
    "boa_token": "<start_of_audio>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "eoa_token": "<end_of_audio>",
    "audio_token": "<audio_soft_token>",
}
TOKENS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<start_of_audio>")
TEXT = {
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    "altup_num_inputs": 3,
    "head_dim": 16,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "initializer_range": 0.1,
    "intermediate_size": 96,
    "laurel_rank": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "model_type": "gemma3n_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
}


def block(kind, width, **settings):
    """Return the description of a block of the vision tower, as timm decodes it from its own short form."""
    own = {
        "er": {"exp_kernel_size": 3, "pw_kernel_size": 1, "exp_ratio": 2.0, "force_in_chs": 0, "se_ratio": 0.0},
        "uir": {"dw_kernel_size_mid": 0, "dw_kernel_size_start": 0, "dw_kernel_size_end": 0, "exp_ratio": 2.0},
        "mqa": {"dw_kernel_size": 3, "num_heads": 2, "key_dim": 8, "value_dim": 8, "kv_stride": 2},
    }[kind]
    return {"block_type": kind, "out_chs": width, "stride": 1, "act_layer": None, "noskip": False, **own, **settings}


VISION = {
    "architecture": "mobilenetv5_300m_enc",
    "do_pooling": False,
    "hidden_size": 2048,
    "initializer_range": 0.2,
    "label_names": ["LABEL_0", "LABEL_1"],
    "model_args": {
        "block_args": [
            [block("er", 8, stride=2)],
            [block("uir", 16, stride=2, dw_kernel_size_start=3, dw_kernel_size_mid=5)],
            [block("uir", 16, stride=2, dw_kernel_size_mid=5), block("mqa", 16), block("uir", 16)],
            [block("uir", 24, stride=2, dw_kernel_size_mid=5), block("mqa", 24, kv_stride=1), block("uir", 24)],
        ],
        "layer_scale_init_value": 1.0,
        "msfa_output_resolution": 4,
        "stem_size": 8,
    },
    "model_type": "gemma3n_vision",
    "vocab_size": 2,
}
AUDIO = {
    "conf_attention_chunk_size": 4,
    "conf_attention_context_left": 5,
    "conf_num_attention_heads": 4,
    "conf_num_hidden_layers": 2,
    "conf_reduction_factor": 16,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "input_feat_size": 16,
    "model_type": "gemma3n_audio",
    "sscp_conv_channel_size": [8, 4],
    "vocab_size": 2,
}
ROOT = Path(__file__).parents[2]
SIDE, IMAGE_FEATURES, CLIP_FEATURES = 128, 16, 50


def write(out):
    import_timm()
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = save_tokenizer(out, TOKENS, **settings, extra_special_tokens=NAMES)
    ids = tokenizer.convert_tokens_to_ids
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids("<bos>"))]
    )
    tokenizer.save_pretrained(out)
    first = ids("<end_of_image>")  # the first token of the vocabularies for media
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": {**TEXT, "vocab_size": first + 4, "vocab_size_per_layer_input": first},
        "vision_config": {**VISION, "vocab_offset": first},
        "audio_config": {**AUDIO, "vocab_offset": first + 2},
        "vision_soft_tokens_per_image": IMAGE_FEATURES,
        "audio_soft_tokens_per_image": CLIP_FEATURES,
        **{f"{name}_id": ids(text) for name, text in NAMES.items()},
    }
    transformers.Gemma3nProcessor(
        transformers.Gemma3nAudioFeatureExtractor(feature_size=16),
        transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE}, resample=2, do_normalize=False),
        AutoTokenizer.from_pretrained(out),
        audio_seq_length=CLIP_FEATURES,
        image_seq_length=IMAGE_FEATURES,
    ).save_pretrained(out)
    save_json(out, config=config)
    read, ends = transformers.Gemma3nConfig.from_pretrained(out), [ids("<eos>"), ids("<end_of_turn>")]
    save_model(out, randomized, read, ends, ids("<pad>"), seed=1)
    save_json(out, config=config)


def randomized(config):
    """Return a model with random weights where transformers and timm initialize them to constants."""
    model = transformers.Gemma3nForConditionalGeneration(config)
    model.config.vision_config.model_args = VISION["model_args"]  # timm has changed them
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            # Smaller updates in the decoder keep its error in bfloat16 below the limit of the contract.
            mean = 0.5 if "language_model.layers" in name and ".post_" in name else 1.0
            torch.nn.init.normal_(weight, 0.0 if "per_dim_scale" in name else mean, 0.1)
    # The head shares the embedding's weights. Larger weights would make the model repeat the same token forever.
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, 0.0, 0.05)
    return model


class Reference(BaseReference):
    markers: ClassVar = {"image": "<image_soft_token>", "audio": "<audio_soft_token>"}

    def __init__(self, path):
        model = read_model(transformers.Gemma3nForConditionalGeneration, path)
        super().__init__(model, transformers.Gemma3nProcessor.from_pretrained(path))

    def inputs(self, items):
        given = {
            "images": [Image.fromarray(item["image"]) for item in items if "image" in item],
            "audio": [item["audio"] for item in items if "audio" in item],
        }
        given = {name: media for name, media in given.items() if media}
        return self.processor(text=[self.text(items)], return_tensors="pt", **given)


PROMPTS = {
    **{name: IMAGE_PROMPTS[name] for name in ("text", "one image", "a long image")},
    "an audio clip": [{"audio": tone(0.61)}, {"text": "What is said?"}],
    "everything": [
        {"audio": tone(0.3)},
        {"image": noise(50, 70)},
        {"text": " and "},
        {"image": noise(90, 40)},
        {"audio": tone(0.3)[::-1].copy()},
        {"text": "?"},
    ],
}


class TestGemma3n(ExtremeShapes, FamilyContract):
    name = "gemma3n"
    reference_class = Reference
    prompts: ClassVar = PROMPTS
    settings_file = "processor_config.json"

    @classmethod
    def write_checkpoint(cls, out):
        write(out)

    def test_layers_have_their_own_keys_or_those_of_an_earlier_layer(self, model):
        assert model.spec.layers == (KVLayer(2, 16), KVLayer(2, 16), SharedLayer(0), SharedLayer(1))

    def test_torchvision_is_not_needed(self, path, model):
        """tests/stubs, which this process has, replace only the part of torchvision that transformers needs."""
        code = (
            "import sys, torch; from mindie_mm.models import load_model;"
            f"model = load_model({str(path)!r}, device='cpu', dtype='float32');"
            f"planes = torch.linspace(0, 1, {3 * SIDE**2}).view(1, 3, {SIDE}, {SIDE});"
            "print('torchvision' in sys.modules, *model.module.model.vision_tower(planes)[0, :4, 0, 0].tolist())"
        )
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(import_timm().__file__).parents[1]}"}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        has_torchvision, *found = ended.stdout.split()
        planes = torch.linspace(0, 1, 3 * SIDE**2).view(1, 3, SIDE, SIDE).to(model.spec.device)
        expected = model.module.model.vision_tower(planes)[0, :4, 0, 0].tolist()
        assert has_torchvision == "False"
        assert [float(number) for number in found] == pytest.approx(expected, abs=1e-4)

    def test_a_clip_shorter_than_a_frame_is_refused(self, processor):
        samples = np.zeros(512, np.float32)
        with pytest.raises(MediaError, match="512 samples at 16000 Hz; it must have at least 513"):
            processor.plan(Media("audio", samples), samples, {})
        samples = np.zeros(513, np.float32)
        assert processor.plan(Media("audio", samples), samples, {})[0].grid == (1,)

    def test_embeddings_of_text_are_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match="prompt_embeds are not supported"):
            tokenizer.tokenize([{"prompt_embeds": torch.zeros(3, 64)}], path_file)

    test_unsupported_settings_are_refused_by_name = refusals(
        [
            ("config", {"image_token_id": 2}, "image_token_id is 2, but "),
            ("config", {"audio_token_id": 2}, "audio_token_id is 2, but "),
            ("config", {"vision_soft_tokens_per_image": 256}, "vision_soft_tokens_per_image is 256; only 16"),
            ("config", {"audio_soft_tokens_per_image": 40}, "is 40, but a clip of 480000 samples has 47 features"),
            ("config", {"vision_config": {"architecture": "resnet50"}}, "architecture is 'resnet50'"),
            (
                "config",
                {"vision_config": {"model_args": {"checkpoint_path": "x"}}},
                r"has \['checkpoint_path'\]; only ",
            ),
            ("config", {"audio_config": {"vocab_offset": 1}}, "must stop where"),
        ]
    )
