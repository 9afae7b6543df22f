"""Checks of the checkpoint's folder and of the device's name, before models are imported or processes start."""

from __future__ import annotations

from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.lora.adapter_config import read_config
from mindie_mm.settings.config import WorkerConfig, kind_of_name


def check_before_loading(config: WorkerConfig) -> None:
    """Raise an error if the model or a LoRA adapter cannot be read, or if this machine cannot have a device.

    Raises:
        UnsupportedCheckpoint: The model is not a checkpoint directory, such as a name on the Hugging Face Hub.
        DeviceError: A device cannot be used. The message gives the reason.
        InputError: The name of a device is unknown, or a folder is not that of a LoRA adapter.

    """
    Checkpoint.open(config.model)
    for folder in config.lora_folders.values():
        read_config(folder)
    engine = config.engine
    named = {engine.device, engine.vision_device or "auto", engine.projector_device or "auto"}
    if unusual := [name for name in named if kind_of_name(name) not in ("auto", "cpu")]:
        from mindie_mm.device import require_possible  # imported late, because importing torch takes seconds

        for name in unusual:
            require_possible(name)
