"""What the embedded checkpoint can do, in one line for users who ask it about something else."""

from __future__ import annotations

from pathlib import Path

from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.settings.paths import absolute

REAL_MODEL = "Qwen/Qwen2-VL-2B-Instruct"
"""Name of a small checkpoint on the Hugging Face Hub that understands photographs."""


def demo_note(model: Path | None, command: str = "mindie-mm serve") -> str | None:
    """Return what the embedded checkpoint can do, and how to run a real one. None for other checkpoints.

    Args:
        model: Checkpoint directory, or None for the embedded checkpoint.
        command: Command that runs a checkpoint if its name follows.

    """
    if model is not None and absolute(model) != EMBEDDED:
        return None
    return f"demo model: drawn shapes and simple sounds only. For a real model: {command} {REAL_MODEL}"
