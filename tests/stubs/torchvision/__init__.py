"""What transformers' image and video processors use of torchvision, over torch alone; on sys.path in tests only.

torchvision's own wheels need CUDA's libraries. Its resize is torch's `interpolate`, as here.
"""

from . import io, transforms

__version__ = "0.28.0"
__all__ = ["io", "transforms"]
