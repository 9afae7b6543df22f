"""Choices between kernels that depend on the processor, and the variable that forces them.

MINDIE_MM_KERNELS, a variable for tests, forces some of the choices, for example "onednn=yes,step=no". So a run of
the tests covers every path on every processor.
"""

from __future__ import annotations

from collections.abc import Callable

from mindie_mm.errors import InputError
from mindie_mm.settings.environment import kernels

_NO, _YES = "no", "yes"
CHOICES: dict[str, tuple[str, ...]] = {
    "onednn": (_NO, _YES),
    "blocks": (_NO, _YES),
    "wide": (_NO, _YES),
    "fused": (_NO, _YES),
    "step": (_NO, "best", "generic", "avx2", "avx512"),
    "bfloat16": (_NO, _YES),
}
"""The values of each choice.

- onednn: whether oneDNN multiplies float32 instead of MKL (cpu/onednn_linear.py)
- blocks: whether bfloat16 towers compute attention for blocks of queries (cpu/cpu_attention.py)
- wide: whether bfloat16 is multiplied in float32, and towers of bfloat16 models run in float32 (cpu/wide_linear.py)
- fused: whether transformers' decoder layers are replaced (nn/decoder_layer.py)
- step: the instructions of compiled decode steps (cpu/decode_step.py), the best of the processor, or no such steps
- bfloat16: whether the processor counts as having instructions for products in bfloat16 and float16
"""


def forced(name: str) -> str | None:
    """Return the value that MINDIE_MM_KERNELS gives the choice `name`, or None if it does not force this choice.

    Raises:
        InputError: The variable contains an unknown choice or value.

    """
    return _parsed(kernels()).get(name)


def choose(name: str, decide: Callable[[], bool]) -> bool:
    """Return the forced value of a choice between yes and no. If it is not forced, return the result of `decide`."""
    value = forced(name)
    return decide() if value is None else value == _YES


def _parsed(text: str) -> dict[str, str]:
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if value not in CHOICES.get(name, ()):
            known = ", ".join(f"{name}={'|'.join(values)}" for name, values in CHOICES.items())
            raise InputError(f"MINDIE_MM_KERNELS contains {part!r}; it must be a comma-separated list of {known}")
        values[name] = value
    return values
