"""Tensor parallelism of a text model over the ranks of torch.distributed, according to transformers' plans.

A plan lists the layers whose weights are split by outputs or inputs. The `forward` methods of these layers sum or
gather the results of the ranks. Each rank computes the attention of its own heads only. Every rank has the whole tower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.split_linear import Split, first_of, num_shares, split_layer

DECODER_PLAN: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
"""Plan for a decoder with these layers. transformers has this plan for Llama, but not for some similar models."""


_GATHERING = ("colwise_gather_output", "colwise_rep")
"""Styles of plans for layers that are split by outputs, and gather the outputs of all ranks."""


def refuse_shares(checkpoint: Checkpoint, what: str = "belongs to a family without a tensor-parallel plan") -> None:
    """Raise UnsupportedCheckpoint if several ranks share the weights. `what` states why they cannot be split."""
    if num_shares() > 1:
        raise UnsupportedCheckpoint(f"{checkpoint.path} {what}: tensor_parallel={num_shares()} must be 1")


def layer_configs(text: Any) -> Sequence[Any]:
    """Return the configuration of each layer of a text model. The layers of some models have different sizes."""
    if getattr(text, "is_heterogeneous", False):
        return [text.per_layer_config[index] for index in range(text.num_hidden_layers)]
    return [text] * text.num_hidden_layers


def shared(
    cls: type[Any], checkpoint: Checkpoint, config: Any, device: Device, tp_plan: Mapping[str, str] | None
) -> tuple[type[Any], dict[str, Any]]:
    """Return a class and arguments for its method `from_pretrained`. This method then loads only this rank's share.

    Args:
        cls: The PreTrainedModel to load.
        checkpoint: Where the weights are.
        config: Configuration of the whole model, in which the plans are changed.
        device: Device of this rank.
        tp_plan: Plan for layers of the text model for which transformers has none.

    Returns:
        A subclass of `cls`, and keyword arguments.

    Raises:
        UnsupportedCheckpoint: There is no plan, or the heads cannot be divided evenly among the ranks.

    """
    from torch.distributed.device_mesh import init_device_mesh  # late: takes a second, and tokenizers import this file
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    shares, text = num_shares(), config.get_text_config()
    if not (plan := {**(tp_plan or {}), **(text.base_model_tp_plan or {})}):
        refuse_shares(checkpoint, f"has a text model of type {text.model_type!r}, which has no tensor-parallel plan")
    _drop_plans(config)
    text.base_model_tp_plan = _with_whole_experts(plan, text)
    heads = {
        pair
        for layer in layer_configs(text)
        for pair in (
            ("attention", layer.num_attention_heads),
            ("key-value", getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads),
        )
    }
    for what, count in sorted(heads):
        if count % shares:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path} has {count} {what} heads; their number must be a multiple of "
                f"tensor_parallel ({shares})"
            )
    names = ("pp", "dp_replicate", "fsdp", "tp")
    mesh = init_device_mesh(device.torch_device.type, (1, 1, 1, shares), mesh_dim_names=names)

    def on_our_mesh(_: type[Any], config: Any, device_map: None = None) -> tuple[Any, object, Any]:
        return config, device.torch_device, TransformersDeviceMesh(mesh, mesh)

    def local_parameter(module: nn.Module, name: str) -> Tensor:
        parameter = nn.Module.get_parameter(module, name)
        return parameter.to_local() if isinstance(parameter, DTensor) and parameter.dim() == 3 else parameter

    # The shapes of experts decide whether transformers transposes them, and this rank reads only its share of them.
    # Transformers also calls this method to tie the weights of embeddings, which must stay as they are.
    # The original method always uses the accelerator that PyTorch finds, even with --device cpu.
    namespace = {
        "prepare_distribute_model": classmethod(on_our_mesh),
        "get_parameter": local_parameter,
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), namespace), {"distributed_config": DistributedConfig(tp_size=shares)}


def _drop_plans(config: Any) -> None:
    """Drop the tensor-parallel plans of a configuration and its sections.

    Towers that reuse decoder layers have such plans, too.
    """
    config.base_model_tp_plan = None
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _drop_plans(part)


def _with_whole_experts(plan: Mapping[str, str], text: Any) -> dict[str, str]:
    """Return a plan in which each rank has some of the experts, instead of a part of every expert.

    The products of whole experts are larger. The plan stays as it is if the experts cannot be divided evenly, or have
    weights that `nn/experts.py` does not support.
    """
    counts = (
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
    count = next((count for count in counts if isinstance(count, int)), 0)
    changed = dict(plan)
    for layer in (name for name, style in plan.items() if style == "moe_tp_experts"):
        weights = {name for name in plan if name.startswith(f"{layer}.")}
        if weights == {f"{layer}.{name}" for name in ("gate_up_proj", "down_proj")} and count % num_shares() == 0:
            changed |= dict.fromkeys(weights, "grouped_gemm")
    return changed


def localize(module: Any) -> None:
    """Replace the DTensor weights of linear layers, experts and embeddings by this rank's local tensors.

    PyTorch converts a DTensor at every call to a layer. The conversion takes longer than a small layer. For embeddings,
    it also indexes with booleans, which makes the host wait for some devices.
    """
    from torch.distributed.tensor import DTensor, Shard

    for path, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if type(layer) is nn.Embedding and isinstance(weight, DTensor) and weight.placements == (Shard(0),):
            layer.weight = nn.Parameter(weight.to_local(), requires_grad=False)
            layer.forward = partial(_embed, layer.weight, first_of(weight.shape[0]))  # type: ignore[method-assign]
        if type(layer) is nn.Linear and isinstance(weight, DTensor) and type(weight.placements[0]) is Shard:
            style = module.tp_plan.get(re.sub(r"\.\d+(?=\.)", ".*", path))
            axis = weight.placements[0].dim
            size = weight.shape[axis]
            split_layer(layer, Split(axis == 1, first_of(size), size, style in _GATHERING))
        for name, weight in layer.named_parameters(recurse=False):
            if isinstance(weight, DTensor) and (isinstance(layer, nn.Linear) or weight.dim() == 3):
                setattr(layer, name, nn.Parameter(weight.to_local(), requires_grad=False))


def _embed(weight: Tensor, start: int, ids: Tensor) -> Tensor:
    """Return the embeddings of ids. `weight` contains the rows of this rank, which begin with row `start`."""
    local = ids - start
    rows = embedding(local.clamp(0, len(weight) - 1), weight)
    rows.masked_fill_(((local < 0) | (local >= len(weight))).unsqueeze(-1), 0)
    dist.all_reduce(rows)
    return rows
