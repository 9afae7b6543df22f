"""Qwen-VL, first generation: images of 448 x 448 pixels, which a resampler turns into 256 features each.

Source: arXiv 2308.12966. Token ids, pixels and logits match the code that came with the checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mindie_mm.device import Device, upload
from mindie_mm.errors import CorruptReference, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image
from mindie_mm.models._qwen_vl_network import Network
from mindie_mm.models._tiktoken import bpe_tokenizer, read_ranks
from mindie_mm.nn.checkpoint.config_keys import Keys, Required, words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from mindie_mm.nn.family import Family, Placeholder, Plan, Processor, Write
from mindie_mm.nn.layers import rotary_angles
from mindie_mm.nn.mindie import InSegment, Layout
from mindie_mm.nn.model import Model, ModelSpec, Positions
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.paged_cache import KVLayer
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD, normalize_images
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.build import build
from mindie_mm.shm import ArraySpec
from mindie_mm.shm.format.item import MediaShape
from mindie_mm.shm.mindie import SegmentsView

_BYTES = "image"
_PIXELS = "pixel_values"
_MINDIE: Mapping[Kind, Layout] = {"image": Layout((InSegment(_PIXELS, "float32"),))}
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KEYS = Keys(  # the defaults come from QWenConfig and VisionTransformer of the original code
    read={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "intermediate_size": 22016,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 8192,
        "seq_length": Required(int),
        "rotary_emb_base": 10000.0,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
    },
    only={
        "rotary_pct": (1.0,),
        "no_bias": (True,),
        "tie_word_embeddings": (False,),
        "rope_scaling": (),
        # Keys of text-only models with the same model_type. The original code of Qwen-VL does not have them.
        "use_cache_quantization": (False,),
        "softmax_in_fp32": (False,),
        "n_embd": (),
        "n_head": (),
        "n_inner": (),
        "n_layer": (),
        "ffn_hidden_size": (),
    },
    unused=words(  # the original code always scales attention scores, and --dtype sets the precision
        "attn_dropout_prob emb_dropout_prob scale_attn_weights bf16 fp16 fp32 use_flash_attn onnx_safe tokenizer_type",
        "use_cache_kernel",
    ),
    sections={
        "visual": Keys(
            read={
                "image_size": Required(int),
                "patch_size": Required(int),
                "width": Required(int),
                "layers": Required(int),
                "heads": Required(int),
                "mlp_ratio": Required(float),
                "image_start_id": Required(int),
                "n_queries": 256,
                "output_dim": 512,
            }
        )
    },
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
# Prompts and answers contain these tokens, so the tokenizer decodes them as text. Each has a single id.
_TAGS = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
_IMAGE = ("<img>", "</img>", "<imgpad>")
_CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- set pictures = namespace(count=0) %}
{%- for part in message.content or [] %}
{%- if part.type == 'text' %}{{ part.text }}
{%- else %}
{%- set pictures.count = pictures.count + 1 %}
{{- 'Picture ' ~ pictures.count ~ ': <img><imgpad></img>\\n' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class QwenVLProcessor(Processor):
    """Processor for Qwen-VL.

    The block of an image contains `image`, uint8 [size, size, 3]. In MindIE's wire format, an image has normalized
    `pixel_values`, float32 [1, 3, size, size].
    """

    traits = Traits(
        chat_template=_CHATML,
        mindie_layouts=_MINDIE,
        not_packed="transformers does not have this model, and the original code does not separate samples",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = configuration(checkpoint)
        visual = config["visual"]
        start = visual["image_start_id"]
        self.feature_width: int = config["hidden_size"]
        self.num_embeddings = config["vocab_size"]
        self.size: int = visual["image_size"]
        self.num_queries: int = visual["n_queries"]
        self.placeholders = {"image": Placeholder((start,), start + 2, (start + 1,), caption=("Picture {}: ", "\n"))}

    def max_tokens(self, kind: Kind) -> int:
        return self.num_queries

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((self.size, self.size, 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image, size = open_image(data, drop_alpha=True), self.size  # like `convert("RGB")` in the original code

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            resized = np.asarray(Image.fromarray(image.decode()).resize((size, size), Image.Resampling.BICUBIC))
            if _PIXELS in arrays:
                arrays[_PIXELS][...] = normalize_images(torch.tensor(resized).unsqueeze(0), CLIP_MEAN, CLIP_STD).numpy()
            else:
                arrays[_BYTES][...] = resized

        plan = Plan(
            num_features=self.num_queries,
            specs=self.specs_of(media.kind, ()),
            settings=f"image {size}x{size}, Pillow's bicubic",
            mindie_specs={_PIXELS: ArraySpec((1, 3, size, size), "float32")},
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        return {_BYTES: ArraySpec((self.size, self.size, 3), "uint8")}

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return the normalized pixels of an item in either wire format, float32 [1, 3, size, size]."""
        if _PIXELS in item.view:
            return to_device(item.view, _PIXELS, device)
        image = to_device(item.view, _BYTES, device)
        return normalize_images(image.unsqueeze(0), CLIP_MEAN, CLIP_STD)


class QwenVLModel(Model):
    """The Qwen-VL model.

    Positions have two axes: the index of the token, and the factor for the rotary base. The factor is the same for all
    tokens of a prompt.
    """

    traits = Traits(
        mindie_layouts=_MINDIE,
        vision_parts=("transformer.visual",),
        projector_parts=("transformer.visual.attn_pool",),
    )

    def __init__(
        self, network: Network, spec: ModelSpec, processor: QwenVLProcessor, config: Mapping[str, Any]
    ) -> None:
        self.spec = spec
        self.module = network
        self._size = processor.size
        self._shape = MediaShape("image", processor.placeholders["image"].token, processor.num_queries)
        self._trained_length: int = config["seq_length"]
        self._dynamic_ntk: bool = config["use_dynamic_ntk"]
        logn: bool = config["use_logn_attn"]
        self._head_dim: int = config["kv_channels"]
        # These tables are computed on the host in float64 as in the reference, because an NPU has no float64.
        exponent, most = self._head_dim / (self._head_dim - 2), self._factor(spec.max_model_len)
        base: float = config["rotary_emb_base"]
        # float32 [most + 1], indexed by factor.
        self._rotary_bases = upload([base * factor**exponent for factor in range(most + 1)], spec.device)
        # float32 [max_model_len], indexed by position. Beyond the trained length, queries are scaled by the logarithm
        # of their position.
        scales = [max(math.log(i + 1, self._trained_length), 1.0) if logn else 1.0 for i in range(spec.max_model_len)]
        self._query_scales = upload(scales, spec.device)

    def describe_segments(self, view: SegmentsView) -> MediaShape:
        if _PIXELS not in view:
            return super().describe_segments(view)
        if view[_PIXELS].shape != (expected := (1, 3, self._size, self._size)):
            raise CorruptReference(f"the segment has the shape {view[_PIXELS].shape}, but this model needs {expected}")
        return self._shape

    def positions(self, length: int, items: Sequence[MediaItem]) -> Positions:
        return Positions(torch.stack([torch.arange(length), torch.full((length,), self._factor(length))]), held_axes=1)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        pixels = torch.cat([self.normalized(item) for item in items])
        return list(self.module.transformer["visual"](pixels.to(self.spec.dtype)))

    def text_modules(self) -> list[nn.Module]:
        return [self.module.transformer["h"], self.module.lm_head]

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.module.transformer["wte"](input_ids)
        return hidden

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        index, factor = positions
        angles = rotary_angles(index, self._head_dim, self._rotary_bases.index_select(0, factor))
        scale = self._query_scales.index_select(0, index).unsqueeze(1)
        for block in self.module.transformer["h"].children():
            hidden = block(hidden, angles, scale, paged)
        normed: Tensor = self.module.transformer["ln_f"](hidden)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.lm_head(hidden)
        return logits.float()

    def _factor(self, length: int) -> int:
        """Return the factor for the rotary base in a prompt of `length` tokens."""
        if not self._dynamic_ntk or not length:
            return 1
        return max(int(2 ** math.ceil(math.log2(length / self._trained_length) + 1)) - 1, 1)


class QwenVL(Family):
    """Qwen-VL (Bai et al., 2023, arXiv 2308.12966), run by mindie_mm's own modules."""

    model_types = ("qwen",)
    published = "Qwen/Qwen-VL-Chat"
    kinds = ("image",)
    reference = "the code that comes with Qwen-VL-Chat (golden data)"
    processor = QwenVLProcessor

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        return [*KEYS.unknown(checkpoint.config)]

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        # The text-only Qwen models of the same generation share this model_type.
        return super().serves(config) and isinstance(config.get("visual"), Mapping)

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> QwenVLModel:
        config = configuration(checkpoint)
        network = build(lambda: Network(config), checkpoint, device, dtype, unused=("*.rotary_emb.inv_freq",))
        spec = ModelSpec(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_model_len=config["max_position_embeddings"],
            layers=(KVLayer(config["num_attention_heads"], config["kv_channels"]),) * config["num_hidden_layers"],
            eos_token_ids=_stop_ids(checkpoint),
            device=device.torch_device,
            dtype=dtype,
        )
        return QwenVLModel(network, spec, processor, config)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        if not (file := checkpoint.path / "qwen.tiktoken").is_file():
            if not checkpoint.has("tokenizer.json"):
                raise UnsupportedCheckpoint(
                    f"{checkpoint.path} has neither qwen.tiktoken nor tokenizer.json; copy qwen.tiktoken "
                    f"from the original repository, such as {cls.published}"
                )
            return super().tokenizer(checkpoint)
        return fast_tokenizer(read_ranks(file), checkpoint)


def configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the contents of config.json, completed with defaults.

    Raise UnsupportedCheckpoint for unsupported settings.
    """
    where = f"{checkpoint.path}/config.json"
    config = KEYS.complete(checkpoint.config, where)
    visual, width = config["visual"], config["hidden_size"]
    heads, channels = config["num_attention_heads"], config["kv_channels"]
    if heads * channels != width:
        raise UnsupportedCheckpoint(
            f"{where}: hidden_size is {width!r}, num_attention_heads is {heads!r} and kv_channels is {channels!r}; "
            "hidden_size must be the product of the other two"
        )
    if visual["output_dim"] != width:
        raise UnsupportedCheckpoint(
            f"{where}: visual.output_dim={visual['output_dim']!r} must equal hidden_size ({width})"
        )
    if math.isqrt(visual["n_queries"]) ** 2 != visual["n_queries"]:
        raise UnsupportedCheckpoint(f"{where}: visual.n_queries={visual['n_queries']} must be a square number")
    return config


def _stop_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the end tokens of the checkpoint.

    Answers of chat models also stop at <|im_start|> and <|im_end|>.
    """
    end_of_text = checkpoint.config["visual"]["image_start_id"] - len(_CONTROL) - len(_TAGS)
    own = eos_token_ids(checkpoint, [end_of_text])
    if checkpoint.json("generation_config.json").get("chat_format") != "chatml":
        return own
    return tuple(sorted({*own, end_of_text, end_of_text + 1, end_of_text + 2}))


def fast_tokenizer(ranks: dict[bytes, int], checkpoint: Checkpoint) -> Any:
    """Build transformers' fast tokenizer from BPE `ranks`. The ids of added tokens follow the ranks."""
    from tokenizers import AddedToken, normalizers
    from transformers import PreTrainedTokenizerFast

    backend = bpe_tokenizer(ranks, _PATTERN)
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(
        [AddedToken(token, special=token not in _TAGS, normalized=False) for token in (*_CONTROL, *_TAGS, *_IMAGE)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_CONTROL[0],
        pad_token=_CONTROL[0],
        model_max_length=checkpoint.json("tokenizer_config.json").get("model_max_length", 8192),
        clean_up_tokenization_spaces=False,
    )
