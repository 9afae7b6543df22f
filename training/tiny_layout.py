"""Files of the embedded checkpoint except its weights: tokenizer, template and configurations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD
from training.phrasings import QUESTIONS
from training.questions import CLIPS, NOUNS, RECORDINGS, plural
from training.samples import SYSTEM_PROMPTS
from training.scenes import COLOURS, DIRECTIONS, SHAPES, SIDES
from training.small_talk import CHAT, CHAT_ANSWERS
from training.sounds import PITCHES
from training.speech import DIGITS

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|AUDIO|>",
)
VOCABULARY = 1000
PATCH, MERGE, TEMPORAL = 14, 2, 2
# A little over 112 * 112 and 84 * 112. The resize rounds down, and a root of 111.999 must not
# reduce a side to 84.
IMAGE_PIXELS = (84 * 84, 12800)
VIDEO_PIXELS = (56 * 84, 9800)

# Qwen2's split of text into words, which precedes the merges of byte pairs.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MELS, HOP, RATE = 64, 160, 16_000
# Mel frames in half an attention window, as the configuration counts them. A window is three seconds.
HALF_WINDOW = 150
# Steps of the time axis per second. At two frames per second, temporal patches are one second apart.
POSITIONS_PER_SECOND = 2

_MEDIUM = (
    "{{% {if_} content['type'] in ('{kind}', '{kind}_url') or '{kind}' in content or '{kind}_url' in content %}}"
    "<|{sense}_bos|><|{token}|><|{sense}_eos|>"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    + _MEDIUM.format(if_="if", kind="image", sense="vision", token="IMAGE")
    + _MEDIUM.format(if_="elif", kind="audio", sense="audio", token="AUDIO").replace(
        "'audio_url')", "'audio_url', 'input_audio')"
    )
    + _MEDIUM.format(if_="elif", kind="video", sense="vision", token="VIDEO")
    + "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus() -> list[str]:
    """Return the tokenizer's training text: every template with several choices of nouns, and every answer."""
    rng = random.Random(0)
    lines = list(SYSTEM_PROMPTS) * 20 + list(CHAT_ANSWERS.values()) * 20
    lines += [*COLOURS, *SHAPES, *SIDES, *DIRECTIONS, "yes", "no", "and", "assistant"] * 20
    lines += [*DIGITS, *PITCHES, *(f"Is it the {word}? A {word} tone." for word in (*DIGITS, *PITCHES)), "beeps"] * 20
    lines += ["user", "system", "Answer in one word. Please be short."] * 20
    for phrasings in QUESTIONS.values():
        for template in phrasings.train:
            for _ in range(8):
                thing = rng.choice(("shape", "object", "thing", *SHAPES))
                named = f"{rng.choice(list(COLOURS))} {thing}" if rng.random() < 0.5 else thing
                noun = rng.choice((*NOUNS, *CLIPS, *RECORDINGS))
                lines.append(template.format(n=noun, t=named, p=plural(named)))
    lines += [line for phrasings in CHAT.values() for line in phrasings.train] * 4
    return lines + [line[0].lower() + line[1:] for line in lines]


def build_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer with Qwen2's design on the corpus."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model's config.json, in the format of Qwen2.5-Omni's thinker."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    size = tokenizer.get_vocab_size()
    return {
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "user_token_id": tokenizer.token_to_id("user"),
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "seconds_per_chunk": 2,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 128,
            "initializer_range": 0.02,
            "intermediate_size": 384,
            "max_position_embeddings": 4096,
            "max_window_layers": 4,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            # An image has few positions, and its columns use the slowest rotations. With the usual base of
            # 10,000 they rotate by 0.003 per column, and no layer can tell left from right.
            "rope_theta": 10.0,
            "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]},
            "sliding_window": 4096,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": (size + 7) // 8 * 8,
        },
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            "depth": 4,
            "hidden_size": 128,
            "out_hidden_size": 128,
            "intermediate_size": 512,
            "hidden_act": "silu",
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            "num_mel_bins": MELS,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 384,
            "d_model": 128,
            "output_dim": 128,
            "max_source_positions": 1500,
            "n_window": HALF_WINDOW,
            "activation_function": "gelu",
        },
    }


def _pixels(kind: str, pixels: tuple[int, int]) -> dict[str, Any]:
    return {
        f"{kind}_processor_type": f"Qwen2VL{kind.capitalize()}Processor",
        "processor_class": "Qwen2_5OmniProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
        "min_pixels": pixels[0],
        "max_pixels": pixels[1],
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "merge_size": MERGE,
    }


HEARING: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": MELS,
    "sampling_rate": RATE,
    "hop_length": HOP,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_side": "right",
    "padding_value": 0.0,
    "dither": 0.0,
    "return_attention_mask": True,
}


def write_layout(path: Path) -> Tokenizer:
    """Write every file except the weights, and return the tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = model_config(tokenizer)
    video = _pixels("video", VIDEO_PIXELS)
    video |= {"fps": 2.0, "min_frames": 4, "max_frames": 768, "do_sample_frames": True}
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": [config["eos_token_id"], config["bos_token_id"]],
            "pad_token_id": config["pad_token_id"],
            "temperature": 0,
            "max_new_tokens": 256,
        },
        "preprocessor_config.json": _pixels("image", IMAGE_PIXELS),
        "video_preprocessor_config.json": video,
        # Qwen2.5-Omni's processor reads the size of videos from this file only.
        "processor_config.json": {
            "processor_class": "Qwen2_5OmniProcessor",
            "feature_extractor": HEARING,
            "videos_kwargs": {"size": {"shortest_edge": VIDEO_PIXELS[0], "longest_edge": VIDEO_PIXELS[1]}},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2TokenizerFast",
            "processor_class": "Qwen2_5OmniProcessor",
            "added_tokens_decoder": {
                str(tokenizer.token_to_id(token)): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for token in SPECIAL
            },
            "additional_special_tokens": list(SPECIAL[1:]),
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": 4096,
            "chat_template": CHAT_TEMPLATE,
            "image_token": "<|IMAGE|>",
            "video_token": "<|VIDEO|>",
            "audio_token": "<|AUDIO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
            **special,
        },
        "special_tokens_map.json": {
            "additional_special_tokens": list(SPECIAL[1:]),
            "eos_token": special["eos_token"],
            "pad_token": special["pad_token"],
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer
