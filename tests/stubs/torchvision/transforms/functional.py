import numpy as np
import torch
from PIL import Image


def pil_to_tensor(image):
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def to_pil_image(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())
