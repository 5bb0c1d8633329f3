"""Pictures of noise, and their files."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image


def draw(height: int, width: int, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise).convert(mode)


def save(image: Image.Image, form: str = "PNG") -> bytes:
    buffer = BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()
