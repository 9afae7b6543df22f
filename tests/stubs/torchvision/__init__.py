"""The part of torchvision that transformers' image and video processors use, written with torch alone.

Only tests put this package on sys.path, because torchvision's own wheels need the libraries of CUDA. Its resize is
torch's `interpolate`, as here.
"""

from . import io, transforms

__version__ = "0.28.0"
__all__ = ["io", "transforms"]
