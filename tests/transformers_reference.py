"""Processors of transformers, which need the stand-in for torchvision in tests/stubs.

Import reference classes from this module. It puts tests/stubs on sys.path before transformers looks for torchvision.
Transformers looks only once, and silently falls back to Pillow's arithmetic if it does not find torchvision. If
transformers has already looked without success, importing this module raises ImportError.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "stubs"))

from transformers import AutoTokenizer, is_torchvision_available
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

if not is_torchvision_available():
    raise ImportError("transformers was asked for torchvision before tests/stubs was on sys.path: it compares by PIL")

__all__ = [
    "AutoTokenizer",
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorPil",
    "Qwen2VLProcessor",
    "Qwen2VLVideoProcessor",
    "VideoMetadata",
    "load_image",
]
