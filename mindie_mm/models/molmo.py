"""Molmo, first generation: overlapping crops, attention pooling, and features that are added to token embeddings.

Source: arXiv 2409.17146. transformers has no module for this model, so the network and the preprocessing are
implemented here. Parameters have the names of the original checkpoints. The tests compare against data that the
original implementation produced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mindie_mm.device import Device, upload
from mindie_mm.errors import CorruptReference, UnsupportedCheckpoint
from mindie_mm.inputs import Kind, Media
from mindie_mm.media.image.encoded_image import Data, open_image
from mindie_mm.media.image.preprocess import check_settings
from mindie_mm.models._crops import Canvas, choose_tiling, cut_crops, cut_patches, only_tiling
from mindie_mm.models._molmo_network import CELLS, CROP, CROPS, PATCH, POSITIONS, Network
from mindie_mm.nn.checkpoint.config_keys import Keys, Nullable, words
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from mindie_mm.nn.family import Family, Placeholder, Plan, Processor, Spelling, Write
from mindie_mm.nn.layers import rotary_angles
from mindie_mm.nn.model import Model, ModelSpec
from mindie_mm.nn.model_inputs import Item, padded_rows
from mindie_mm.nn.paged_batch import PagedBatch
from mindie_mm.nn.paged_cache import KVLayer
from mindie_mm.nn.pixels import CLIP_MEAN, CLIP_STD
from mindie_mm.nn.splice import MediaItem, Splice
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.build import build
from mindie_mm.shm import ArraySpec

_GLOBAL, _DETAIL = "global_pixels", "pixels"
# The defaults come from MolmoConfig and from constants in the original Hugging Face wrapper. Keys that only the
# training code reads have the same meaning as in that code.
KEYS = Keys(
    read={
        "vocab_size": 50304,
        "embedding_size": Nullable(int, 50304),
        "additional_vocab_size": 128,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": Nullable(int),
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "qkv_bias": False,
        "clip_qkv": Nullable(float),
        "attention_layer_norm": False,
        "norm_after": False,
        "scale_logits": False,
        "vit_layers": [-2, -9],
        "overwrite_earlier_images": False,
    },
    only={
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True,),
        "attention_layer_norm_with_affine": (True,),
        "bias_for_layer_norm": (False,),
        "include_bias": (False,),
        "activation_type": ("swiglu",),
        "block_type": ("sequential",),
        "block_group_size": (1,),
        "multi_query_attention": (),
        "head_dim": (),
        "rope": (True,),
        "rope_impl": ("llama",),
        "rope_full_precision": (True,),
        "alibi": (False,),
        "float32_attention": (True,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "weight_tying": (False,),  # the original wrapper never ties the head
        "normalize_input_embeds": (False,),
        "image_pooling_2d": ("attention-meanq",),
        "image_pooling_h": (2,),
        "image_pooling_w": (2,),
        "image_projector": ("mlp",),
        "image_padding_embed": ("pad_and_partial_pad",),
        "fix_image_padding": (False,),
        "fix_image_input_idx": (2,),
        "use_cls_feature": (False,),
        "unconditioned": (False,),
        "crop_mode": ("overlap-and-resize-c2",),
        "overlap_margins": ([4, 4],),
        "pad_value": (0,),
        "use_col_tokens": (True,),
        "message_formatting": ("role",),
        "always_start_with_space": (True,),
        # Sizes under the training code's names are refused, because they may belong to a model with other layers.
        "d_model": (),
        "n_heads": (),
        "n_kv_heads": (),
        "n_layers": (),
        "mlp_hidden_size": (),
    },
    unused=words(
        "use_position_ids attention_type tie_word_embeddings mlp_ratio max_sequence_length alibi_bias_max precision",
        "attention_dropout residual_dropout embedding_dropout response_residual_dropout response_attention_dropout",
        "image_feature_dropout init_device init_fn init_std init_cutoff_factor new_embedding_init_range",
        "query_pre_attn_scalar tokenizer pad_tokenizer low_cpu_fsdp llm_load_path vit_load_path gin_bindings",
        "loss_token_weighting multi_annotation_weighting softmax_auxiliary_loss softmax_auxiliary_loss_scale",
    ),
    sections={
        "vision_backbone": Keys(
            read={
                "image_emb_dim": 1024,
                "image_num_heads": 16,
                "image_num_key_value_heads": Nullable(int),
                "image_num_layers": 23,
                "image_head_dim": 64,
                "image_mlp_dim": 4096,
                "image_norm_eps": 1e-5,
            },
            only={
                "image_model_type": ("openai",),
                "image_default_input_size": ([CROP, CROP],),
                "image_patch_size": (PATCH,),
                "image_num_pos": (POSITIONS,),
                "image_mlp_activations": ("quick_gelu",),
                "attention_dropout": (0.0,),  # the original code also applies dropout at inference
                "resize_mode": ("default",),
            },
            unused=words("image_pos_patch_size image_dropout_rate residual_dropout fsdp_wrap"),
        )
    },
)
# All released checkpoints have the geometry above.
_PREPROCESSING: Mapping[str, Any] = {
    "base_image_input_size": [CROP, CROP],
    "image_patch_size": PATCH,
    "overlap_margins": [4, 4],
    "image_token_length_h": CELLS,
    "image_token_length_w": CELLS,
    "image_padding_mask": True,
    "do_normalize": True,
}
_SETTINGS = Keys(read={"max_crops": 12, "image_mean": tuple(CLIP_MEAN), "image_std": tuple(CLIP_STD)})

CHAT_TEMPLATE = """
{%- for message in messages -%}
{%- if message['role'] not in ('user', 'assistant') -%}
{{- raise_exception('the roles are user and assistant, not ' + message['role']) -}}
{%- endif -%}
{{- ' ' + message['role'].capitalize() + ': ' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ' Assistant:' -}}{%- endif -%}
"""


def slot_order(rows: int, columns: int) -> Tensor:
    """Return the index of the cell for each placeholder of an item, int64 [num_features].

    Cells are numbered crop after crop. The first placeholders are for the cells of the global crop. The remaining
    placeholders are for the cells of the joined `rows` x `columns` crops. Where crops overlap, a cell comes from the
    crop in which it is farther from the edge.
    """
    return torch.cat([torch.arange(CELLS**2), CELLS**2 + CROPS.canvas_windows(rows, columns).flatten()])


class MolmoProcessor(Processor):
    """Processor for Molmo.

    A block contains the image at two sizes, float32 [rows, columns, 3] in [0, 1]: `global_pixels` for the global crop
    and `pixels` for the other crops. The values are not stored as uint8, because the reference does not round the
    result of the resize. The tower pads the image, cuts overlapping crops and normalizes the crops. The grid is the
    number of crops (rows, columns).

    Images always follow the BOS token, wherever the message places them.
    """

    traits = Traits(
        chat_template=CHAT_TEMPLATE,
        inserted_at=1,  # after the BOS token
        not_packed="transformers does not have this model, and the original code does not separate samples",
        grids={"image": "the numbers of rows and columns of crops"},
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.preprocessor("image", {"MolmoImageProcessor": {}})
        check_settings(config, _PREPROCESSING, str(checkpoint.path))
        config = _SETTINGS.complete(config, str(checkpoint.path))
        own = configuration(checkpoint)
        self.feature_width: int = own["hidden_size"]
        self.num_embeddings = own["embedding_size"] + own["additional_vocab_size"]
        self.max_crops: int = config["max_crops"]
        self.mean: tuple[float, ...] = tuple(config["image_mean"])
        self.std: tuple[float, ...] = tuple(config["image_std"])
        self._bos = checkpoint.token_id(checkpoint.require_special_token("bos_token", "eos_token"))
        names = ("<im_start>", "<im_patch>", "<im_col>", "<im_end>")
        self._start, patch, self._column, self._end = (checkpoint.token_id(name) for name in names)
        self.placeholders = {"image": Placeholder((), patch, ())}

    def max_tokens(self, kind: Kind) -> int:
        return _num_features((1, self.max_crops))  # in a single row, where the fewest cells overlap

    def worst_case(self, kind: Kind) -> Data:
        return np.zeros((*CROPS.canvas(1, self.max_crops), 3), np.uint8)

    def plan(self, media: Media, data: Data, counts: Mapping[Kind, int]) -> tuple[Plan, Write]:
        image = open_image(data)
        height, width = image.height - CROPS.shared, image.width - CROPS.shared
        rows, columns = choose_tiling(height, width, CROPS.step, self.max_crops)
        canvases = {
            _GLOBAL: Canvas.fitting(image.height, image.width, CROP, CROP),
            _DETAIL: Canvas.fitting(image.height, image.width, *CROPS.canvas(rows, columns)),
        }

        def write(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
            rgb = image.decode()
            for name, canvas in canvases.items():
                canvas.resize(rgb, arrays[name])

        specs = {name: ArraySpec((canvas.rows, canvas.columns, 3), "float32") for name, canvas in canvases.items()}
        plan = Plan(
            num_features=_num_features((rows, columns)),
            specs=specs,
            settings=f"image {rows}x{columns} crops, {[spec.shape for spec in specs.values()]}",
            grid=(rows, columns),
        )
        return plan, write

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        if len(grid) != 2 or min(grid) <= 0 or _num_features(grid) != num_features:
            return None
        token = self.placeholders[kind].token
        run: list[int] = []
        for rows, columns in (CROPS.square_cells, CROPS.cells(*grid)):
            run += [self._start, *([token] * columns + [self._column]) * rows, self._end]
        return Spelling(runs=(run,))

    def grid_of(self, kind: Kind, num_features: int) -> tuple[int, ...] | None:
        return only_tiling(self.max_crops, lambda *grid: _num_features(grid) == num_features)

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        return ids if ids[:1] == [self._bos] else [self._bos, *ids]

    def normalized(self, item: Item, device: torch.device) -> Tensor:
        """Return normalized patches, float32 [crops, patches, 588].

        The global crop comes first. The other crops follow row by row.
        """
        mean, std = (upload(values, device) for values in (self.mean, self.std))
        crops = []
        for name, canvas in canvases(item).items():
            image = canvas.draw(to_device(item.view, name, device))
            crops.append(cut_crops((image - mean) / std, CROP, CROPS.step))
        return cut_patches(torch.cat(crops), PATCH)

    def item_inputs(self, item: Item, device: torch.device) -> dict[str, Tensor]:
        """Return the arrays of an item under the names of the original code."""
        shares = filled(item) / PATCH**2
        cells = torch.full((len(shares) + 1, CELLS**2), -100)
        cells.view(-1)[slot_order(*item.shape.grid)] = torch.from_numpy(item.slots)
        return {
            "images": self.normalized(item, device).unsqueeze(0),
            "image_masks": torch.cat([shares, torch.full_like(shares[:1], -1)]).unsqueeze(0),
            "image_input_idx": cells.unsqueeze(0),
        }

    def join(self, name: str, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the crops of each prompt in one row. Shorter rows end in -1."""
        return padded_rows(prompts, -1)


def _num_features(grid: tuple[int, ...]) -> int:
    """Return the number of features of an image with `grid` (rows, columns) crops."""
    return CELLS**2 + math.prod(CROPS.cells(*grid))


class MolmoModel(Model):
    """The Molmo model.

    The original implementation places the features of every image at the placeholders of the first image, so the
    features of a later image overwrite the features of an earlier image. `overwrite_earlier_images` in config.json
    reproduces this behavior.
    """

    traits = Traits(
        vision_parts=("model.vision_backbone",),
        projector_parts=("model.vision_backbone.image_pooling_2d", "model.vision_backbone.image_projector"),
        splice_adds=True,
    )

    def __init__(self, module: Network, spec: ModelSpec, config: Mapping[str, Any], processor: MolmoProcessor) -> None:
        self.spec = spec
        self.module = module
        self._transformer, self._vision = module.model.transformer, module.model.vision_backbone
        # This tensor is kept on the device, because a host scalar would force a synchronization in every step.
        self._head_dim: int = config["hidden_size"] // config["num_attention_heads"]
        self._theta = torch.tensor([config["rope_theta"]], dtype=torch.float32, device=spec.device)
        self._overwrites: bool = config["overwrite_earlier_images"]
        self._logit_scale = config["hidden_size"] ** -0.5 if config["scale_logits"] else None

    def text_modules(self) -> list[nn.Module]:
        return [self._transformer]

    def read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        items = super().read(ids)
        if not self._overwrites:
            return items
        return [replace(i, slots=i.slots - i.start + items[0].start, placeholders=i.slots) for i in items]

    def states(
        self, input_ids: Tensor, positions: Tensor, splices: Sequence[Splice], paged: PagedBatch, rows: Tensor | None
    ) -> Tensor:
        pieces = _last_of_each_row(splices) if self._overwrites else splices
        return super().states(input_ids, positions, pieces, paged, rows)

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        patches = [self.normalized(item) for item in items]
        padding = upload(torch.cat([paddings(item) for item in items]), self.spec.device)
        cells = self._vision(torch.cat(patches).to(self.spec.dtype), padding)
        own = cells.split([len(crops) for crops in patches])
        return [
            features.flatten(0, 1)[upload(slot_order(*item.shape.grid), self.spec.device)]
            for features, item in zip(own, items, strict=True)
        ]

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self._transformer.wte(input_ids)
        return hidden

    def decode(self, hidden: Tensor, positions: Tensor, paged: PagedBatch, extra: Tensor | None) -> Tensor:
        cos, sin = rotary_angles(positions[0], self._head_dim, self._theta)
        for block in self._transformer.blocks:
            hidden = block(hidden, cos, sin, paged)
        decoded: Tensor = self._transformer.ln_f(hidden)
        return decoded

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._transformer.ff_out(hidden).float()
        return logits if self._logit_scale is None else logits * self._logit_scale


def _last_of_each_row(splices: Sequence[Splice]) -> list[Splice]:
    """Return `splices` without the features whose row a later splice overwrites."""
    pieces: list[Splice] = []
    taken = np.empty(0, np.int64)
    for piece in reversed(splices):
        free = np.flatnonzero(~np.isin(piece.rows, taken))
        if len(free):
            pieces.append(Splice(piece.rows[free], piece.features[upload(free, piece.features.device)]))
        taken = np.union1d(taken, piece.rows)
    return pieces


def canvases(item: Item) -> dict[str, Canvas]:
    """Return the canvas of each array of the block, by the name of the array."""
    sizes = {_GLOBAL: (CROP, CROP), _DETAIL: CROPS.canvas(*item.shape.grid)}
    specs = {name: ArraySpec(array.shape, str(array.dtype)) for name, array in item.view.items()}
    for name, (height, width) in sizes.items():
        shape = specs[name].shape if name in specs else ()
        if (
            len(shape) != 3
            or shape[0] > height
            or shape[1] > width
            or specs[name] != ArraySpec((*shape[:2], 3), "float32")
        ):
            raise CorruptReference(
                f"the block has the arrays {specs}; {name!r} must be float32, with at most {height}x{width}x3 elements"
            )
    return {name: Canvas(*size, *specs[name].shape[:2]) for name, size in sizes.items()}


def filled(item: Item) -> Tensor:
    """Return how many pixels of each patch the image fills, int64 [crops, patches], without the global crop."""
    return cut_patches(cut_crops(canvases(item)[_DETAIL].mask(), CROP, CROPS.step), PATCH).sum(-1)


def paddings(item: MediaItem) -> Tensor:
    """Return the kind of padding of each patch, int64 [crops, patches].

    The value is 0 if the image fills the patch, 1 if the patch is all padding, and 2 if it is partly padding. Each crop
    gets the values of the next crop, and the last crop gets 2 everywhere. The original implementation does the same,
    and the weights were trained with these values.
    """
    pixels = filled(item)
    padding = torch.where(pixels == 0, 1, torch.where(pixels < PATCH**2, 2, 0))
    return torch.cat([padding, torch.full_like(padding[:1], 2)])


class Molmo(Family):
    """Molmo (Deitke et al., 2024, arXiv 2409.17146), 7B-D and 7B-O, run by mindie_mm's own modules."""

    model_types = ("molmo",)
    published = "allenai/Molmo-7B-D-0924"
    kinds = ("image",)
    reference = "golden data of the original implementation"
    processor = MolmoProcessor

    @classmethod
    def unknown_keys(cls, checkpoint: Checkpoint) -> list[str]:
        return [*KEYS.unknown(checkpoint.config)]

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        from transformers import PreTrainedTokenizerFast  # imported late, because it is slow to import

        # AutoTokenizer would look up the class by model_type, which transformers does not support.
        checkpoint.tokenizer_json()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint.path, local_files_only=True)
        # The template in the checkpoints belongs to the language model that Molmo was trained from.
        tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> MolmoModel:
        config = configuration(checkpoint)
        module = build(lambda: Network(config), checkpoint, device, dtype)
        heads, size = config["num_attention_heads"], config["embedding_size"]
        spec = ModelSpec(
            vocab_size=size,
            hidden_size=config["hidden_size"],
            max_model_len=config["max_position_embeddings"],
            layers=(KVLayer(config["num_key_value_heads"], config["hidden_size"] // heads),)
            * config["num_hidden_layers"],
            eos_token_ids=eos_token_ids(checkpoint),
            device=device.torch_device,
            dtype=dtype,
            embedding_size=processor.num_embeddings,
        )
        return MolmoModel(module, spec, config, processor)


def configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the contents of config.json, completed with defaults.

    Raise UnsupportedCheckpoint for unsupported settings.
    """
    where = f"{checkpoint.path}/config.json"
    config = KEYS.complete(checkpoint.config, where)
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    if config["embedding_size"] is None:
        config["embedding_size"] = config["vocab_size"]
    if config["vocab_size"] > config["embedding_size"]:
        raise UnsupportedCheckpoint(
            f"{where}: vocab_size={config['vocab_size']} must not exceed embedding_size={config['embedding_size']}"
        )
    if config["clip_qkv"] is not None and config["clip_qkv"] <= 0:
        raise UnsupportedCheckpoint(f"{where}: clip_qkv={config['clip_qkv']!r} must be greater than 0")
    tower = config["vision_backbone"]
    if tower["image_num_key_value_heads"] not in (None, tower["image_num_heads"]):
        raise UnsupportedCheckpoint(
            f"{where}: vision_backbone.image_num_key_value_heads is {tower['image_num_key_value_heads']}; it "
            f"must equal image_num_heads ({tower['image_num_heads']})"
        )
    return config
