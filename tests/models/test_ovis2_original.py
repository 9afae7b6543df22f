"""Tests for Ovis2 in AIDC-AI's layout against transformers' class, changed to compute what AIDC-AI's code computes."""

import re
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPImageProcessor, Ovis2Config, Ovis2ForConditionalGeneration

from mindie_mm.errors import LimitExceeded
from mindie_mm.inputs import Media
from mindie_mm.nn.splice import plain_ids
from tests.models.contract import IMAGE_PROMPTS, FamilyContract, noise, refusals
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import TEXT, save_json, save_tokenizer
from tests.models.test_ovis2 import FEATURES, INDICATORS, VISION
from tests.transformers_reference import AutoTokenizer

SIDE, TILES = VISION["image_size"], 9
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIXELS = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_center_crop": False,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": {"shortest_edge": SIDE},
}
BACKBONE = {
    "model_type": "aimv2",
    "qkv_bias": False,
    "use_bias": False,
    **{key: VISION[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    **{key: VISION[key] for key in ("image_size", "patch_size")},
}
VISUAL = {
    "model_type": "aimv2_visual_tokenizer",
    "backbone_config": BACKBONE,
    "backbone_kwargs": {},
    "depths": None,
    "drop_cls_token": False,
    "hidden_stride": VISION["hidden_stride"],
    "tau": 1.0,
    "tokenize_function": "softmax",
    "use_indicators": False,
    "vocab_size": VISION["vocab_size"],
}
NAMES = (
    (r"^model\.vision_tower\.transformer\.", "visual_tokenizer.backbone."),
    (r"embeddings\.patch_embedding", "preprocessor.patchifier.proj"),
    (r"embeddings\.rms_norm", "preprocessor.patchifier.norm"),
    (r"embeddings\.position_embedding\.weight", "preprocessor.pos_embed"),
    (r"backbone\.rms_norm", "backbone.trunk.post_trunk_norm"),
    (r"encoder\.layers", "trunk.blocks"),
    (r"rms_norm(\d)", r"norm_\1"),
    (r"attention\.out_proj", "attn.proj"),
    (r"attention\.qkv", "attn.qkv"),
    (r"ffn\.gate_proj", "mlp.fc1"),
    (r"ffn\.down_proj", "mlp.fc2"),
    (r"ffn\.up_proj", "mlp.fc3"),
    (r"^model\.vision_tower\.head_linear", "visual_tokenizer.head.0"),
    (r"^model\.vision_tower\.head_norm", "visual_tokenizer.head.1"),
    (r"^model\.visual_embeddings_table", "vte"),
    (r"^model\.language_model", "llm.model"),
    (r"^lm_head", "llm.lm_head"),
)
"""Parts of transformers' weight names, and the published names, as in transformers' conversion script."""


def published_weights(model):
    state = model.state_dict()
    for name in [name for name in state if "attention.q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        state[name.replace("q_proj", "qkv")] = torch.cat(parts)
    weights = {}
    for name, weight in state.items():
        published = name
        for pattern, replacement in NAMES:
            published = re.sub(pattern, replacement, published)
        weights[published] = (weight.unsqueeze(0) if published.endswith("pos_embed") else weight).clone().contiguous()
    return weights


def write(out, tied=False, **changes):
    """Write the checkpoint. Return a reference with the same weights."""
    save_tokenizer(out, TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<IMG_ATOM>", *INDICATORS]})
    text = {**TEXT, "vocab_size": 420, "tie_word_embeddings": tied}
    config = Ovis2Config(
        text_config={**text, "model_type": "qwen2"},
        vision_config=VISION,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids([*INDICATORS]),
        hidden_size=TEXT["hidden_size"],
        vocab_size=420,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = Ovis2ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1:
            weight.data += 0.2 * torch.randn_like(weight)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = 0
    weights = published_weights(model)
    if tied:
        del weights["llm.lm_head.weight"]
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    original = {
        "architectures": ["Ovis"],
        "model_type": "ovis",
        "auto_map": {"AutoConfig": "configuration_ovis.OvisConfig"},
        "conversation_formatter_class": "QwenConversationFormatter",
        "disable_tie_weight": False,
        "hidden_size": TEXT["hidden_size"],
        "llm_attn_implementation": "flash_attention_2",
        "llm_config": {**text, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "multimodal_max_length": 4096,
        "visual_tokenizer_config": VISUAL,
        **changes,
    }
    generation = {"eos_token_id": model.generation_config.eos_token_id}
    save_json(out, config=original, preprocessor_config=PIXELS, generation_config=generation)
    model.model.vision_tower.transformer.rms_norm = torch.nn.Identity()
    return Reference(model, tokenizer)


class Reference(BaseReference):
    markers: ClassVar = {"image": "<image>"}

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        self.images = CLIPImageProcessor(**PIXELS)

    def inputs(self, items):
        ids, tiles = [], []
        for item in items:
            if "text" in item:
                ids += self.processor(item["text"])["input_ids"]
                continue
            grid, crops = self.cropped(item["image"])
            rows = ["<IMG_COL>".join(["<IMG_ATOM>" * FEATURES] * grid[1])] * grid[0]
            cells = "<IMG_ROW>".join(rows) if len(crops) > 1 else ""
            ids += self.processor(f"<IMG_START>{'<IMG_ATOM>' * FEATURES}<IMG_GRID>{cells}<IMG_END>")["input_ids"]
            tiles += map(self.padded, crops)
        pixels = {"pixel_values": torch.cat(tiles)} if tiles else {}
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
            **pixels,
        }

    def cropped(self, image):
        """Return the grid (rows, columns) of an image, and the whole image followed by the cells of the grid."""
        height, width = image.shape[:2]
        found = []
        for rows, columns in ((i, j) for i in range(1, 10) for j in range(1, 10) if i * j <= TILES):
            downs = [row * (height // rows) for row in range(rows)] + [height]
            rights = [column * (width // columns) for column in range(columns)] + [width]
            boxes = [(a, b, c, d) for a, b in pairwise(downs) for c, d in pairwise(rights)]
            areas = [sorted((b - a, d - c)) for a, b, c, d in boxes]
            covered = [short / long * SIDE * SIDE if long > SIDE else short * long for short, long in areas]
            found.append(((rows, columns), sum(covered) / (height * width), boxes))
        good = [one for one in found if one[1] > 0.9]
        if good:
            grid, _, boxes = min(good, key=lambda one: (one[0][0] * one[0][1], -one[1]))
        else:
            grid, _, boxes = min(found, key=lambda one: (-one[1], one[0][0] * one[0][1]))
        cells = [image[a:b, c:d] for a, b, c, d in boxes]
        return grid, [image, *cells] if len(cells) > 1 else cells

    def padded(self, crop):
        height, width = crop.shape[:2]
        size = (SIDE, int(width / height * SIDE)) if height >= width else (int(height / width * SIDE), SIDE)
        settings = {"size": dict(zip(("height", "width"), size, strict=True)), "return_tensors": "pt"}
        pixels = self.images.preprocess(np.ascontiguousarray(crop), input_data_format="channels_last", **settings)
        top, left = (SIDE - size[0]) // 2, (SIDE - size[1]) // 2
        tile = torch.zeros(1, 3, SIDE, SIDE)
        tile[:, :, top : top + size[0], left : left + size[1]] = pixels["pixel_values"]
        return tile


class TestOvis2Original(FamilyContract):
    name = "ovis2"
    prompts: ClassVar = {**IMAGE_PROMPTS, "a long image": [{"image": noise(20, 300)}, {"text": "Where?"}]}
    references: ClassVar = {}

    @classmethod
    def write_checkpoint(cls, out):
        cls.references[out] = write(out)

    @classmethod
    def make_reference(cls, path):
        return cls.references[path]

    def test_images_of_any_size_have_the_references_ids(self, reference, model, tokenizer, path_file):
        for height, width in ((1, 1), (32, 32), (33, 70), (70, 33), (200, 201), (7, 200), (640, 100)):
            items = [{"image": noise(height, width)}, {"text": "?"}]
            expected = reference.inputs(items)
            ids = tokenizer.tokenize(items, path_file).numpy()
            media = model.read(ids)
            assert plain_ids(ids, media).tolist() == expected["input_ids"][0].tolist(), (height, width)
            self.assert_arrays(expected, media, model)

    def test_an_image_with_a_tile_without_pixels_is_refused(self, processor):
        image = noise(20, 900)
        with pytest.raises(LimitExceeded, match="900x20 pixels; one side of a tile would have no pixels"):
            processor.plan(Media("image", image), image, {})

    def test_tied_embeddings_may_be_stored_once(self, tmp_path, path_file):
        self.assert_same(tmp_path, write(tmp_path, tied=True), path_file)

    def test_a_conversation_is_formatted_as_in_the_original_code(self, reference, model, tokenizer, path_file):
        image = noise(40, 90)
        messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Hm?"}]}]
        ids = tokenizer.tokenize_chat(messages, path_file).numpy()
        opening = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        closing = "\nHm?<|im_end|>\n<|im_start|>assistant\n"
        expected = reference.inputs([{"text": opening}, {"image": image}, {"text": closing}])
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0].tolist()

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda w: w.pop("vte.weight"), "lacks 1 weights; the first is vte.weight"),
            (lambda w: w.update(answer=torch.zeros(2)), "does not have; the first is answer"),
        ],
        ids=["missing", "unknown"],
    )
    def test_bad_weights_are_refused_by_their_published_names(self, change, named, path, tmp_path):
        self.assert_weights_refused(path, tmp_path, change, named)

    test_a_changed_setting_is_refused = refusals(
        [
            ("preprocessor_config", {"do_center_crop": True}, "do_center_crop is True"),
            ("config", {"conversation_formatter_class": "GemmaConversationFormatter"}, "GemmaConversationFormatter"),
            ("config", {"llm_config": {"model_type": "gemma2"}}, "model_type is 'gemma2'"),
            ("config", {"llm_config": None}, "llm_config=None in config.json must be"),
            (
                "config",
                {"visual_tokenizer_config": {**VISUAL, "model_type": "siglip_visual_tokenizer"}},
                "siglip_visual",
            ),
            ("config", {"visual_tokenizer_config": {**VISUAL, "drop_cls_token": True}}, "drop_cls_token is True"),
        ]
    )
