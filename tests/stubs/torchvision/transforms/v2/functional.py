import torch
from torch.nn.functional import interpolate
from torch.nn.functional import pad as constant_pad

from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor

_OF_PILLOW = {
    0: InterpolationMode.NEAREST,
    1: InterpolationMode.LANCZOS,
    2: InterpolationMode.BILINEAR,
    3: InterpolationMode.BICUBIC,
}


def resize(image, size, interpolation=InterpolationMode.BILINEAR, antialias=True):
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    interpolation = _OF_PILLOW.get(interpolation, interpolation)
    smooth = interpolation in (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)
    frames = image.reshape(-1, *image.shape[-3:])
    if size[1] == 1:
        # For an output of width 1, some of torch's kernels are wrong unless the strides are those of channels_last.
        frames = frames.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    resized = interpolate(
        frames,
        size=tuple(size),
        mode=interpolation.value,
        align_corners=False if smooth else None,
        antialias=antialias and smooth,
    )
    return resized.reshape(*image.shape[:-2], *size)


def normalize(image, mean, std, inplace=False):
    mean = torch.as_tensor(mean, dtype=image.dtype, device=image.device).view(-1, 1, 1)
    std = torch.as_tensor(std, dtype=image.dtype, device=image.device).view(-1, 1, 1)
    return image.sub(mean).div_(std)


def pad(image, padding, fill=0, padding_mode="constant"):
    left, top, right, bottom = padding
    assert padding_mode == "constant", padding_mode
    sides = (left, right, top, bottom)
    if isinstance(fill, (int, float)):
        return constant_pad(image, sides, value=fill)
    planes = (constant_pad(plane, sides, value=value) for plane, value in zip(image.unbind(-3), fill, strict=True))
    return torch.stack([*planes], dim=-3)


def crop(image, top, left, height, width):
    return image[..., top : top + height, left : left + width]


def grayscale_to_rgb(image):
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image


__all__ = ["crop", "grayscale_to_rgb", "normalize", "pad", "pil_to_tensor", "resize"]
