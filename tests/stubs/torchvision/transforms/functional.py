import numpy as np
import torch


def pil_to_tensor(image):
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)
