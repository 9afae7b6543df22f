"""transformers' own processors, over the stand-in for torchvision that they refuse to do without.

Import what is compared with from here: the import puts tests/stubs on sys.path before transformers looks for it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "stubs"))

from transformers import AutoTokenizer  # noqa: E402
from transformers.image_utils import load_image  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor  # noqa: E402
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor  # noqa: E402
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402

__all__ = [
    "AutoTokenizer",
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorPil",
    "Qwen2VLProcessor",
    "Qwen2VLVideoProcessor",
    "VideoMetadata",
    "load_image",
]
