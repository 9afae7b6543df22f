"""Generator of checkpoints with random weights: `python -m tools.random_checkpoint OUT [SIZE]` (see SIZES).

They are of Qwen2-VL, or with `--config FOLDER` of the family of the published config.json in FOLDER, with small sizes.
Parity tests and benchmarks use them. The weights are seeded and untrained. The tokenizer is byte-level, with about 300
tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD
from tools.arguments import parser
from tools.shrunk import write_shrunk

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Size:
    """The widths and numbers of layers of a checkpoint."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tower: int
    tower_depth: int
    tower_heads: int


SIZES = {
    "tiny": Size(64, 2, 4, 2, 128, 64, 2, 4),
    "wide": Size(256, 2, 2, 1, 512, 64, 2, 4),
    "small": Size(256, 4, 4, 2, 512, 256, 4, 4),
    "mid": Size(512, 8, 8, 2, 1536, 320, 8, 4),
    "big": Size(896, 24, 14, 2, 4864, 640, 16, 8),
}
"""Sizes of about 0.4, 2, 7, 37 and 447 million parameters. `wide` has a head size of 128, like most published models.
The layers of `big` are as large as those of Qwen2 with 0.5 billion parameters."""


def write_checkpoint(out: Path, size: str = "tiny", *, seed: int = 0, max_pixels: int = 12845056) -> Path:
    """Write the checkpoint to the directory `out`, and return `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(out)
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(_config(tokenizer, SIZES[size]))
    model.generation_config.eos_token_id = tokenizer.token_to_id("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.token_to_id("<|endoftext|>")
    model.save_pretrained(out)
    pixels = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "processor_class": "Qwen2VLProcessor",
    }
    images = {**pixels, "min_pixels": 3136, "max_pixels": max_pixels, "image_processor_type": "Qwen2VLImageProcessor"}
    videos = {**pixels, "min_pixels": 3136, "max_pixels": max_pixels, "video_processor_type": "Qwen2VLVideoProcessor"}
    (out / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    (out / "video_preprocessor_config.json").write_text(json.dumps(videos), encoding="utf-8")
    return out


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(SPECIAL_TOKENS)
    )
    corpus = ["What is in the image? Describe this picture. a red square, a blue circle. system user assistant"]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _config(tokenizer: Tokenizer, size: Size) -> Qwen2VLConfig:
    half = size.hidden // size.heads // 2
    sections = [half // 4, half * 3 // 8, half - half // 4 - half * 3 // 8]
    text = {
        "vocab_size": -(-tokenizer.get_vocab_size() // 8) * 8,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e6},
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    vision = {
        "depth": size.tower_depth,
        "embed_dim": size.tower,
        "num_heads": size.tower_heads,
        "hidden_size": size.hidden,
        "mlp_ratio": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
    )


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("out", type=Path, metavar="OUT")
    options.add_argument("size", nargs="?", choices=SIZES, metavar="SIZE", default="tiny", help=", ".join(SIZES))
    options.add_argument("--config", type=Path, metavar="FOLDER", help="folder with a published config.json")
    given = options.parse_args()
    if given.config is None:
        write_checkpoint(given.out, given.size)
    else:
        write_shrunk(given.config, given.out)
