"""Vision towers of the package timm, without torchvision.

timm requires torchvision, but uses it only to load data and to convert networks. A torchvision that was built for
another torch prevents transformers from being imported, so an installation may have timm alone. transformers does not
use timm then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor, nn

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.processes.stand_in_modules import StandInFinder


def require_timm() -> None:
    """Raise UnsupportedCheckpoint unless timm is installed.

    If torchvision is installed as well, transformers' configuration classes import timm. Import it before they do,
    because `import_timm` provides stand-ins for a torchvision that cannot be imported.
    """
    _check_installed()
    from transformers.utils.import_utils import is_timm_available  # late, like all of transformers

    if is_timm_available():
        import_timm()


def import_timm() -> Any:
    """Import timm and return it. If torchvision is missing or cannot be imported, timm gets stand-ins for it.

    Raises:
        UnsupportedCheckpoint: timm is not installed.

    """
    _check_installed()
    try:
        import timm
    except (ImportError, RuntimeError):  # such as `operator torchvision::nms does not exist`
        with _without_torchvision():
            import timm
    return timm


def _check_installed() -> None:
    try:
        version("timm")
    except PackageNotFoundError:
        raise UnsupportedCheckpoint(
            "the vision tower needs the package timm, which is not installed: pip install --no-deps 'timm>=1.0.17'"
        ) from None


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Replace torchvision by stand-ins. First remove the modules that a failed import of timm left in sys.modules."""
    finder = StandInFinder(["torchvision"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        del sys.modules[name]
    hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if finder.replaces(name)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.replaces(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)


class _GELU(nn.GELU):
    """GELU of the channels-last tensors that the norms return, which not every device can create by itself."""

    def forward(self, planes: Tensor) -> Tensor:
        return super().forward(planes.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def with_timm_tower(module_class: type[Any]) -> type[Any]:
    """Return a transformers class with the same weights, whose `vision_tower` calls timm.

    transformers' own tower class needs torchvision. This tower returns the features, [n, width, rows, columns].
    """
    from transformers import AutoModel, PreTrainedModel

    timm = import_timm()
    # AutoModel, which makes the towers, finds the class of a tower by the class of its configuration.
    vision: Any = type("TimmVisionConfig", (module_class.config_class.sub_configs["vision_config"],), {})

    class TimmTower(PreTrainedModel):  # type: ignore[misc]
        config_class = vision
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            arguments = deepcopy(config.model_args or {})  # timm changes them
            activation = partial(_GELU, approximate="tanh")
            self.timm_model = timm.create_model(
                config.architecture,
                pretrained=False,
                checkpoint_path="",
                num_classes=0,
                act_layer=activation,
                **arguments,
            )
            self.post_init()

        def forward(self, pixels: Tensor) -> Tensor:
            features: Tensor = self.timm_model.forward_features(pixels)
            return features

    AutoModel.register(vision, TimmTower)

    class WithTimmTower(module_class):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            config.vision_config = vision(**config.vision_config.to_dict())
            super().__init__(config)

    return WithTimmTower
