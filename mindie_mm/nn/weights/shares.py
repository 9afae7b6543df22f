"""A text model's weights shared among the ranks of torch.distributed, by transformers' plans: tensor parallel.

A plan names the layers of which a rank holds some columns or rows; their forward adds up or gathers what the ranks
computed. Attention sees a rank's own heads alone, and the towers are whole on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from mindie_mm.device import Device
from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.nn.checkpoint.directory import Checkpoint

DECODER_PLAN: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
"""The plan of a decoder with these layers: transformers has it for Llama, but not for some that are built alike."""


def num_shares() -> int:
    """How many ranks share the weights: 1, unless this process is one of several."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process speaks for all ranks that share the weights."""
    return not dist.is_initialized() or dist.get_rank() == 0


def refuse_shares(checkpoint: Checkpoint, what: str = "is of a family for whose layers there is no plan") -> None:
    """UnsupportedCheckpoint, where several ranks are to share the weights of a checkpoint that `what` keeps whole."""
    if num_shares() > 1:
        raise UnsupportedCheckpoint(f"{checkpoint.path} {what}: tensor_parallel is {num_shares()}, it must be 1")


def shared(
    cls: type[Any], checkpoint: Checkpoint, text: Any, device: Device, tp_plan: Mapping[str, str] | None
) -> tuple[type[Any], dict[str, Any]]:
    """`cls`, and arguments of its from_pretrained, so that this rank loads its share alone, to its `device`.

    `text` is the text model's configuration. UnsupportedCheckpoint where it has no plan and `tp_plan` is None, or its
    heads do not go into that many equal shares.
    """
    from torch.distributed.device_mesh import init_device_mesh  # late: these take a second, and tokenizers import us
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    shares = num_shares()
    if (plan := text.base_model_tp_plan or tp_plan) is None:
        refuse_shares(checkpoint, f"has a text model of type {text.model_type!r}, for which there is no plan")
    text.base_model_tp_plan = plan
    heads = text.num_attention_heads
    for what, count in (("attention", heads), ("key-value", getattr(text, "num_key_value_heads", None) or heads)):
        if count % shares:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path} has {count} {what} heads; tensor_parallel is {shares}, of which they must be a "
                "multiple"
            )
    names = ("pp", "dp_replicate", "fsdp", "tp")
    mesh = init_device_mesh(device.torch_device.type, (1, 1, 1, shares), mesh_dim_names=names)

    def on_our_mesh(_: type[Any], config: Any, device_map: None = None) -> tuple[Any, object, Any]:
        return config, device.torch_device, TransformersDeviceMesh(mesh, mesh)

    # transformers' own takes the accelerator that torch sees, also where --device says cpu. No argument names another.
    namespace = {"prepare_distribute_model": classmethod(on_our_mesh), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), namespace), {"distributed_config": DistributedConfig(tp_size=shares)}


def localize(module: nn.Module) -> None:
    """Leaves of the linear layers' weights what this rank has of them, as plain tensors.

    As parts of a whole they are taken out of it at every call, which costs more than the call of a small layer.
    """
    from torch.distributed.tensor import DTensor

    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            for name, weight in layer.named_parameters(recurse=False):
                if isinstance(weight, DTensor):
                    setattr(layer, name, nn.Parameter(weight.to_local(), requires_grad=False))
