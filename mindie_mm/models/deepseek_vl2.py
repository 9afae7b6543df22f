"""DeepSeek-VL2: an overview and tiles of each image, a mixture of experts, and plain or latent attention.

Source: arXiv 2412.10302. Token ids, pixels and logits match the code that came with the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn

from mindie_mm.device import Device
from mindie_mm.errors import LimitExceeded, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image
from mindie_mm.media.image.tiles import CanvasSize, best_canvas
from mindie_mm.models._deepseek_original import V2_SIZES
from mindie_mm.models._deepseek_vl2_network import Network
from mindie_mm.models._latent_attention import latent_layer
from mindie_mm.models._original_tokenizer import original_tokenizer
from mindie_mm.nn.checkpoint.config_keys import Keys, Nullable, words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from mindie_mm.nn.family import Family, Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.layers import rotary_angles
from mindie_mm.nn.model import Model, ModelSpec
from mindie_mm.nn.model_inputs import Item, padded_rows, types_of_tokens
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.paged_cache import KVLayer
from mindie_mm.nn.pixels import normalize_images
from mindie_mm.nn.splice import MediaItem
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.build import build
from mindie_mm.shm import ArraySpec

_TILES = "tiles"
_ARCHITECTURE = "DeepseekVLV2ForCausalLM"
_TOWER = "siglip_so400m_patch14_384"
_MOST_TILED_IMAGES = 2
# Prompts and answers contain these tokens, so the tokenizer decodes them as text. Each has a single id.
_TAGS = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")
# The defaults come from the configuration classes of the original code.
KEYS = Keys(
    read={"candidate_resolutions": [(384, 384)]},
    only={"tile_tag": ("2D",), "global_view_pos": ("head",)},
    unused=words("tie_word_embeddings"),  # the key in language_config decides
    sections={
        "vision_config": Keys(
            read={"width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4.0, "patch_size": 16},
            only={
                "image_size": (384,),
                "global_pool": ("map",),
                "ignore_head": (True,),
                "class_token": (False,),
                "cls": (),  # layout of the towers in the first DeepSeek-VL
                "params": (),
            },
            unused=words("model_name num_classes use_checkpoint weight_init deterministic num_recomputing_layers"),
        ),
        "projector_config": Keys(
            read={"input_dim": 1152, "n_embed": 2048},
            only={
                "projector_type": ("downsample_mlp_gelu",),
                "depth": (2,),
                "mlp_ratio": (1,),
                "downsample_ratio": (2,),
                "token_pooling": (False,),
                "cls": (),
                "params": (),
            },
        ),
        "language_config": Keys(
            read={
                **V2_SIZES,
                "norm_topk_prob": False,
                "moe_layer_freq": 1,
                "use_mla": True,
                "kv_lora_rank": Nullable(int, 512),
                "q_lora_rank": Nullable(int, 1536),
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
                "bos_token_id": Nullable(int, 0),
            },
            only={
                "hidden_act": ("silu", "swish"),
                "attention_bias": (False,),
                "rope_scaling": (),
                "tie_word_embeddings": (False,),
                "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
                "scoring_func": ("softmax", "sigmoid"),
            },
            unused=words("attention_dropout aux_loss_alpha seq_aux ep_size lm_head rm_head"),
        ),
    },
)
_PROCESSOR_KEYS = Keys(
    read={
        "candidate_resolutions": [(384, 384)],
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "image_token": "<image>",
        "patch_size": 14,
    },
    only={"downsample_ratio": (2,), "normalize": (True,), "sft_format": ("deepseek",)},
    unused=words("add_special_token ignore_id mask_prompt pad_token"),
)
_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- set content = namespace(text='') %}
{%- if message.content is string %}{% set content.text = message.content %}
{%- else %}
{%- for part in message.content or [] %}
{%- if part.type == 'text' %}{% set content.text = content.text + part.text %}
{%- else %}
{%- set content.text = content.text + '<image>' %}
{%- if not loop.last and loop.nextitem.type == 'text' and not loop.nextitem.text.startswith('\\n') %}
{%- set content.text = content.text + '\\n' %}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- if message.role == 'user' %}{{ '<|User|>: ' + content.text.strip() + '\\n\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>:' + content.text.strip() + eos_token }}
{%- else %}{{ content.text + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>:' }}{% endif %}"""


class DeepseekVL2Processor(Processor):
    """Processor for DeepSeek-VL2.

    The block of an image contains `tiles`, uint8 [1 + across * down, size, size, 3]: the whole image, then its tiles
    row by row. The grid is the number of tiles (across, down). In a prompt with three or more images, each image has
    one tile.
    """

    traits = Traits(
        chat_template=_TEMPLATE,
        not_packed="transformers does not have this model, and the original code does not separate samples",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = configuration(checkpoint)
        settings = checkpoint.require(
            "processor_config.json", ("candidate_resolutions", "patch_size", "downsample_ratio")
        )
        settings = _PROCESSOR_KEYS.complete(settings, f"{checkpoint.path}/processor_config.json")
        self.mean: tuple[float, ...] = tuple(settings["image_mean"])
        self.std: tuple[float, ...] = tuple(settings["image_std"])
        self.feature_width: int = config["language_config"]["hidden_size"]
        self.num_embeddings = config["language_config"]["vocab_size"]
        self.size = 384
        patch = settings["patch_size"]
        if patch != config["vision_config"]["patch_size"]:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}/processor_config.json: patch_size={patch!r} must equal patch_size in "
                f"vision_config ({config['vision_config']['patch_size']})"
            )
        self.side: int = -(-(self.size // patch) // 2)
        self.canvases = [(height, width) for width, height in settings["candidate_resolutions"]]
        if not self.canvases or self.canvases[0][1] != self.size:  # the original code reads the tile size here
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: candidate_resolutions is {settings['candidate_resolutions']!r}; the first "
                f"one must be {self.size} pixels wide"
            )
        for height, width in self.canvases:
            if height % self.size or width % self.size:
                raise UnsupportedCheckpoint(
                    f"{checkpoint.path}: a candidate resolution is {(width, height)}; both sides must be "
                    f"multiples of {self.size} pixels"
                )
        token = checkpoint.token_id(settings["image_token"])
        bos = checkpoint.special_token("bos_token")
        # The original code also prefers the BOS token of the tokenizer.
        self._bos = config["language_config"]["bos_token_id"] if bos is None else checkpoint.token_id(bos)
        self.placeholders = {"image": Placeholder((), token, ())}

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        return ids if ids[:1] == [self._bos] else [self._bos, *ids]

    def num_features(self, across: int, down: int) -> int:
        """Return the number of features of an image with `across` x `down` tiles.

        Each row of cells ends in a newline feature. The overview is followed by a separator.
        """
        side = self.side
        return side * (side + 1) + 1 + side * down * (side * across + 1)

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if not grid:  # embeddings, whose tiles only the tower would need
            return Spelling() if num_features <= self.max_tokens(kind) else None
        is_possible = len(grid) == 2 and min(grid) > 0 and self.num_features(*grid) == num_features
        return Spelling() if is_possible else None

    def max_tokens(self, kind: Kind) -> int:
        return max(self.num_features(*self._tiles(canvas)) for canvas in self.canvases)

    def worst_case(self, kind: Kind) -> Data:
        canvas = max(self.canvases, key=lambda canvas: self.num_features(*self._tiles(canvas)))
        return np.zeros((*canvas, 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image, size = open_image(data), self.size
        if round(size * min(image.width, image.height) / max(image.width, image.height)) < 1:
            raise LimitExceeded(
                f"the image has {image.width}x{image.height} pixels; the longer side must be at most "
                f"{2 * size} times the shorter one"
            )
        tiled = counts["image"] <= _MOST_TILED_IMAGES
        canvas = best_canvas(image.height, image.width, self.canvases) if tiled else (size, size)
        across, down = self._tiles(canvas)
        colour = tuple(int(mean * 255) for mean in self.mean)

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            whole = Image.fromarray(image.decode())
            tiles = arrays[_TILES]
            tiles[0] = np.asarray(ImageOps.pad(whole, (size, size), color=colour))
            local = np.asarray(ImageOps.pad(whole, canvas[::-1], color=colour))
            cut = local.reshape(down, size, across, size, 3).transpose(0, 2, 1, 3, 4)
            tiles[1:].reshape(cut.shape)[...] = cut

        plan = Plan(
            num_features=self.num_features(across, down),
            specs=self.specs_of(media.kind, (across, down)),
            settings=f"image {across}x{down} tiles of {size}, around it {colour}",
            grid=(across, down),
        )
        return plan, write

    def specs_of(self, kind: Kind, grid: tuple[int, ...]) -> Mapping[str, ArraySpec]:
        if not grid:
            return {}
        return {_TILES: ArraySpec((1 + grid[0] * grid[1], self.size, self.size, 3), "uint8")}

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return normalized pixels, float32 [tiles, 3, size, size]. They equal the reference's bit for bit."""
        return normalize_images(to_device(item.view, _TILES, device), self.mean, self.std)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        """Return the arrays of an item under the names of the original code."""
        return {
            "images": self.normalized(item, device).unsqueeze(0),
            "images_spatial_crop": torch.tensor([[item.shape.grid]]),
        }

    def join(self, name: str, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the arrays of each prompt in one row. Shorter rows end in zeros."""
        return padded_rows(prompts)

    def token_inputs(self, ids: NDArray[np.int64], items: Sequence[Item]) -> dict[str, Tensor]:
        inputs = super().token_inputs(ids, items)
        return inputs | {"images_seq_mask": types_of_tokens(len(ids), items).bool()}

    def _tiles(self, canvas: CanvasSize) -> tuple[int, int]:
        """Return the number of tiles (across, down)."""
        return canvas[1] // self.size, canvas[0] // self.size


class DeepseekVL2Model(Model):
    """The DeepSeek-VL2 model."""

    traits = Traits(vision_parts=("vision",), projector_parts=("projector",))

    def __init__(
        self, network: Network, spec: ModelSpec, processor: DeepseekVL2Processor, language: Mapping[str, Any]
    ) -> None:
        """Wrap `network`. `language` is the section of config.json for the decoder."""
        self.spec = spec
        self.module = network
        self._processor = processor
        self._rotary_width = (
            language["qk_rope_head_dim"]
            if language["use_mla"]
            else language["hidden_size"] // language["num_attention_heads"]
        )
        # This tensor is kept on the device, because a host scalar would force a synchronization in every step.
        self._rotary_base = torch.tensor([language["rope_theta"]], dtype=torch.float32, device=spec.device)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        pixels = torch.cat([self.normalized(item) for item in items])
        features = self.module.projector(self.module.vision(pixels.to(self.spec.dtype)))
        counts = [len(item.view[_TILES]) for item in items]
        return [self._arranged(own, item) for own, item in zip(features.split(counts), items, strict=True)]

    def _arranged(self, views: Tensor, item: MediaItem) -> Tensor:
        """Arrange [views, side * side, width] as features [num_features, width].

        The rows of the overview come first, then the separator and the rows of the joined tiles.
        """
        side, (across, down) = self._processor.side, item.shape.grid
        tiles = views[1:].view(down, across, side, side, -1).transpose(1, 2).reshape(down * side, across * side, -1)
        overview = self._ended(views[0].view(side, side, -1))
        return torch.cat([overview, self.module.view_seperator.unsqueeze(0), self._ended(tiles)])

    def _ended(self, grid: Tensor) -> Tensor:
        """Append the newline feature to each row of [rows, columns, width]; return [rows * (columns + 1), width]."""
        ends = self.module.image_newline.expand(len(grid), 1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)

    def text_modules(self) -> list[nn.Module]:
        return [self.module.language]

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.module.language.model.embed_tokens(input_ids)
        return hidden

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        decoder = self.module.language.model
        angles = rotary_angles(positions[0], self._rotary_width, self._rotary_base)
        for layer in decoder.layers:
            hidden = layer(hidden, angles, paged)
        normed: Tensor = decoder.norm(hidden)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.language.lm_head(hidden)
        return logits.float()


class DeepseekVL2(Family):
    """DeepSeek-VL2 (Wu et al., 2024, arXiv 2412.10302), run by mindie_mm's own modules."""

    model_types = ("deepseek_vl_v2",)
    published = "deepseek-ai/deepseek-vl2-tiny"
    kinds = ("image",)
    reference = "the code that came with DeepSeek-VL2 (golden data)"
    processor = DeepseekVL2Processor

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        # Other models have this model_type, too, such as DeepSeek-OCR.
        architecture = next(iter(config.get("architectures") or ()), _ARCHITECTURE)
        tower = (config.get("vision_config") or {}).get("model_name", _TOWER)
        return super().serves(config) and (architecture, tower) == (_ARCHITECTURE, _TOWER)

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        return [*KEYS.unknown(checkpoint.config)]

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> DeepseekVL2Model:
        config = configuration(checkpoint)
        language = config["language_config"]
        network = build(lambda: Network(config), checkpoint, device, dtype, unused=("vision.attn_pool.*",))
        heads: int = language["num_attention_heads"]
        layer = (
            latent_layer(language)
            if language["use_mla"]
            else KVLayer(language["num_key_value_heads"] or heads, language["hidden_size"] // heads)
        )
        spec = ModelSpec(
            vocab_size=language["vocab_size"],
            hidden_size=language["hidden_size"],
            max_model_len=language["max_position_embeddings"],
            layers=(layer,) * language["num_hidden_layers"],
            eos_token_ids=eos_token_ids(checkpoint) or (language.get("eos_token_id", 1),),
            device=device.torch_device,
            dtype=dtype,
        )
        return DeepseekVL2Model(network, spec, processor, language)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        return original_tokenizer(checkpoint, _TAGS)


def configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the contents of config.json, completed with defaults.

    Raise UnsupportedCheckpoint for unsupported settings.
    """
    where = f"{checkpoint.path}/config.json"
    config = KEYS.complete(checkpoint.config, where)
    vision, projector, language = (config[name] for name in ("vision_config", "projector_config", "language_config"))
    if language["use_mla"] and language["kv_lora_rank"] is None:
        raise UnsupportedCheckpoint(
            f"{where}: language_config.kv_lora_rank is None; with use_mla, it must be an integer"
        )
    for name, actual, needed, part in (
        ("projector_config.input_dim", projector["input_dim"], vision["width"], "tower"),
        ("projector_config.n_embed", projector["n_embed"], language["hidden_size"], "decoder"),
    ):
        if actual != needed:
            raise UnsupportedCheckpoint(f"{where}: {name}={actual!r} must be {needed!r}, the width of the {part}")
    return config
