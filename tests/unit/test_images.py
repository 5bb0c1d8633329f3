"""The component `image`, beside transformers' own processors and torchvision's rules."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from shoal.authoring.environment.imports import find_imports
from shoal.clients.bulk.inputs import make_table
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.spec import Array, ModelSpec, TensorSpec
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.prediction_requests import PredictRequest
from shoal.serving.gateway.v1.predictions import _group
from tests.support.once import ROOT
from tests.support.pictures import draw, save
from tests.support.pieces import ask, start

SMALL = {"PIXELS": (3, 8, 8)}


def send(*files: bytes) -> NDArray[np.object_]:
    return np.array([[file] for file in files], np.object_)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "file",
    [
        save(draw(300, 401)),
        save(draw(401, 256), "JPEG"),
        save(draw(256, 300, "L")),
        save(draw(300, 300, "P"), "GIF"),
        save(draw(30, 40, "RGBA"), "WEBP"),
    ],
    ids=["png", "jpeg", "grey", "palette", "alpha"],
)
def test_the_same_pixels_as_transformers(file: bytes, interpolation: str) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    theirs = CLIPImageProcessorPil(
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
        image_mean=mean,
        image_std=std,
        resample=getattr(Image.Resampling, interpolation.upper()),
    )
    with Image.open(BytesIO(file)) as image:
        expected = theirs(image.convert("RGB"), return_tensors="np")["pixel_values"]
    (got,) = ask(start("image", interpolation=interpolation), send(file))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=2e-6)


def show(height: int, width: int, resize: str) -> Array:
    """The middle row and column of a picture in which red is the row and green the column."""
    rows, columns = np.mgrid[:height, :width].astype(np.uint8)
    file = save(Image.fromarray(np.stack([rows, columns, columns], axis=2)))
    (got,) = ask(start("image", dims=SMALL, mean="[0, 0, 0]", std="[1, 1, 1]", resize=resize), send(file))
    return np.rint(got[0] * 255).astype(int)


def test_the_centre_is_rounded_as_by_torchvision() -> None:
    """`int(round((height - cut) / 2))`, which rounds a half to the even number."""
    cut = show(19, 21, resize="19")
    assert (cut[0, 0, 0], cut[1, 0, 0]) == (6, 6)  # 5.5 and 6.5
    assert (cut[0, -1, 0], cut[1, 0, -1]) == (13, 13)


def test_no_centre_is_cut_out_without_resize() -> None:
    whole = show(8, 8, resize="0")
    assert whole[0, :, 0].tolist() == whole[1, 0].tolist() == [*range(8)]


def test_rows_of_several_sizes_and_requests() -> None:
    piece = start("image", dims=SMALL, resize="8")
    first, second = (save(draw(height, 9)) for height in (9, 30))
    both = ask(piece, send(first, second))[0]
    np.testing.assert_array_equal(both, np.concatenate([ask(piece, send(each))[0] for each in (first, second)]))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"text", r"^IMAGE\[1\] cannot be read as a picture: UnidentifiedImageError\. Send the bytes of a whole file"),
        (save(draw(50, 50))[:900], r"^IMAGE\[1\] cannot be read as a picture: OSError\."),
        (save(draw(50, 50), "TIFF"), r"^IMAGE\[1\] cannot be read as a picture"),
        (save(draw(101, 100)), r"^IMAGE\[1\] has 100 x 101 pixels; at most 10,000 are allowed\. Send a smaller"),
        (save(draw(2000, 1)), r"^IMAGE\[1\] has 16000 x 8 pixels after it is resized; at most 10,000"),
        (b"", r"^IMAGE\[1\] cannot be read as a picture"),
    ],
    ids=["text", "cut off", "format", "large", "long", "empty"],
)
def test_pictures_that_are_refused(file: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ask(start("image", dims=SMALL, resize="8", max_pixels="10000"), send(save(draw(9, 9)), file))


@pytest.mark.parametrize(
    ("parameters", "dims", "said"),
    [
        ({"resize": "7"}, SMALL, "Parameter resize of model image is '7'; 8 x 8 pixels cannot be cut out of it"),
        ({"std": "[1, 0, 1]"}, SMALL, r"Parameter std .* nothing can be divided by 0"),
        ({"mean": "[1]"}, SMALL, "Parameter mean .* expected three numbers"),
        ({"mean": "[124, 116, 104]"}, SMALL, "Parameter mean .* pixels are divided by 255 first"),
        ({"mean": "[]"}, SMALL, "Parameter mean .* expected three numbers"),
        ({"interpolation": "nearest"}, SMALL, "expected bilinear or bicubic"),
        ({}, {"PIXELS": (3, -1, -1)}, "does not declare the height and width of its pictures"),
    ],
)
def test_parameters_that_are_refused(parameters: dict[str, Any], dims: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        start("image", dims=dims, **parameters)


def test_an_environment_must_have_pillow() -> None:
    assert "PIL" in find_imports(ROOT / "preprocess" / "image" / "1").find_needed()


# --- on their way -------------------------------------------------------------------------------------------------

MODEL = ModelSpec(
    "vision", (TensorSpec("IMAGE", "TYPE_STRING", (1,)),), (TensorSpec("PIXELS", "TYPE_FP32", (3, 8, 8)),)
)


def test_a_picture_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(picture := save(draw(9, 9)))
    table = make_table([f"IMAGE=@{tmp_path}/cat.png"], MODEL)
    assert [row for _, row in table.rows] == [{"IMAGE": picture}]
    with pytest.raises(InputError, match=r"is a file\. Did you mean IMAGE=@\S+/cat.png\?$"):
        make_table([f"{tmp_path}/cat.png"], MODEL)


def test_a_picture_in_base64() -> None:
    encoded = {"b64": base64.b64encode(b"\x89PNG").decode()}
    asked = PredictRequest(instances=[encoded, {"IMAGE": encoded, "ID": 1}, "text"])
    rows, _ = _group(asked, MODEL)
    assert rows == [{"IMAGE": b"\x89PNG"}, {"IMAGE": b"\x89PNG", "ID": 1}, {"IMAGE": "text"}]
    with pytest.raises(ApiError, match="The value of b64 is not base64"):
        _group(PredictRequest(instances=[{"b64": "*"}]), MODEL)
