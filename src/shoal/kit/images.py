"""Pictures in files, such as JPEG or PNG, to arrays for models, in the order of torchvision's transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shoal.errors import ArtifactError, InputError
from shoal.kit.component.context import Context
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import Array

ReadImages: TypeAlias = Callable[[Sequence[bytes]], Array]
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_INTERPOLATIONS = ("bilinear", "bicubic")
# Of ImageNet's training pictures, as torchvision's and most of transformers' models were trained with.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MOST_PIXELS = 89_478_485  # Pillow's own limit, from which on it warns


@dataclass(frozen=True)
class _Transform:
    """Steps from a file to colours; ``size`` is height and width of the result."""

    size: tuple[int, int]
    shorter_side: int  # 0: both sides become those of ``size``
    interpolation: str
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    most_pixels: int
    name: str

    def read(self, files: Sequence[bytes]) -> NDArray[np.float32]:
        """Return pictures, FP32 ``[pictures, 3, height, width]``.

        Raises:
            InputError: one is not a picture of a known format, is damaged, or is too large.
        """
        rows = [self._read(row, bytes(file)) for row, file in enumerate(files)]
        # The order and the dtype of torchvision's ToTensor and Normalize, so that values are the same to the last bit.
        colours = np.stack(rows).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
        return np.ascontiguousarray((colours - self.mean[:, None, None]) / self.std[:, None, None])

    def _read(self, row: int, file: bytes) -> NDArray[np.uint8]:
        where = f"{self.name}[{row}]"
        try:
            with Image.open(BytesIO(file), formats=FORMATS) as image:
                self._check(where, image.size, "")
                height, width = sizes = self._resized(*image.size)
                self._check(where, sizes, " after it is resized")
                resample = getattr(Image.Resampling, self.interpolation.upper())
                resized = image.convert("RGB").resize((width, height), resample)
        except InputError:
            raise
        except Exception as error:  # Pillow's readers raise many kinds for damaged files
            what = f"{where} cannot be read as a picture: {type(error).__name__}."
            raise InputError(what, f"Send the bytes of a whole file; known: {', '.join(FORMATS)}.") from None
        top, left = (round((side - cut) / 2) for side, cut in zip(sizes, self.size, strict=True))
        return np.asarray(resized)[top : top + self.size[0], left : left + self.size[1]]

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return height and width after resizing, rounded down as torchvision does."""
        if not self.shorter_side:
            return self.size
        shorter = min(width, height)
        return int(self.shorter_side * height / shorter), int(self.shorter_side * width / shorter)

    def _check(self, where: str, sizes: tuple[int, int], when: str) -> None:
        if sizes[0] * sizes[1] > self.most_pixels:
            raise InputError(
                f"{where} has {sizes[0]} x {sizes[1]} pixels{when}; at most {self.most_pixels:,} are allowed.",
                "Send a smaller picture, or raise the max_pixels parameter in the model's config.pbtxt.",
            )


def make_image_reader(context: Context, parameters: Parameters, edge: str) -> ReadImages:
    """Return a function from files of pictures to colours, FP32 ``[pictures, 3, h, w]``: red, green, blue.

    The sizes ``h`` and ``w`` are those that the configuration declares. In the order of torchvision's transforms: the
    file is decoded by Pillow to RGB; its shorter side becomes ``resize`` pixels, by the parameter ``interpolation``,
    and the centre of ``h x w`` pixels is cut out (with ``resize`` 0 its sides become ``h`` and ``w``); colours are
    divided by 255, then ``mean`` is subtracted and the rest divided by ``std``. Colour profiles and the orientation of
    a camera (EXIF) are not read, as in torchvision's own loader. Arrays are on the component's device; its ledger
    counts the copy at ``edge``.

    Raises:
        ArtifactError: a parameter cannot be used, or a size is not declared.
    """
    size = parameters.sizes.get("h", 0), parameters.sizes.get("w", 0)
    if not all(size):
        what = f"Model {context.spec.name} does not declare the height and width of its pictures."
        raise ArtifactError(what, "Write them in its config.pbtxt: dims: [ 3, 224, 224 ]")
    shorter_side = parameters.whole("resize", 256, least=0, most=2**14)
    if 0 < shorter_side < max(size):
        raise parameters.refusal("resize", f"{size[0]} x {size[1]} pixels cannot be cut out of it", str(max(size)))
    transform = _Transform(
        size,
        shorter_side,
        parameters.choice("interpolation", _INTERPOLATIONS),
        _read_colours(parameters, "mean", _MEAN),
        _read_colours(parameters, "std", _STD),
        parameters.whole("max_pixels", 25_000_000, most=_MOST_PIXELS),
        edge,
    )
    if not all(0 <= part <= 1 for part in transform.mean):
        raise parameters.refusal("mean", "pixels are divided by 255 first, so that it is from 0 to 1", str([*_MEAN]))
    if not transform.std.all():
        raise parameters.refusal("std", "nothing can be divided by 0", str([*_STD]))
    return lambda files: context.device.put(transform.read(files), edge)


def _read_colours(parameters: Parameters, name: str, default: tuple[float, ...]) -> NDArray[np.float32]:
    """Return a number for each of red, green and blue."""
    numbers = parameters.numbers(name) if parameters.text(name) else default
    if len(numbers) != len(default):
        raise parameters.refusal(name, "expected three numbers, of red, green and blue", str([*default]))
    return np.array(numbers, np.float32)
