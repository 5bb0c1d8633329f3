"""The device's way to read a text, with libcudf's rules emulated, against Hugging Face's on the host."""

from __future__ import annotations

import dataclasses
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import SetupError
from shoal.kit.component.ledger import CONTROL, DOWN, EXACT, EXACT_ROWS, SETUP, UP, CopyEdge
from shoal.kit.component.tensors import Device
from shoal.kit.text.device import Ragged, read_code_points
from shoal.kit.text.tokens import read_vocabulary
from shoal.readability.preprocess_config import Bundle
from shoal.readability.reader import DeviceReader, Reader, make_reader
from tests.support.emulation import EmulatedText
from tests.support.pretend import PretendGpu
from tests.support.readings import assert_same_reading, device_reader

PLAIN = ["The cat sat. It purred!", "", "   ", "Naïve café, 1984?", "漢字 и кошка", "don't stop… now"]
# Each is exact for a reason of its own.
EXACT_TEXTS = ["cat [SEP] cat", "[MASK]", "a" * 101, "ก" * 34, "x \ue000 y"]


@pytest.fixture(scope="module")
def vocabulary(artifacts: Path) -> list[str]:
    return read_vocabulary(artifacts / "vocab.txt")


@pytest.mark.parametrize("device", [Device(), PretendGpu()], ids=["numpy", "torch"])
def test_the_device_reads_as_the_host_does(vocabulary: list[str], bundle: Bundle, device: Device) -> None:
    read, reference = device_reader(vocabulary, bundle, device), Reader(vocabulary, bundle)
    for texts in (PLAIN, EXACT_TEXTS, [*PLAIN, *EXACT_TEXTS, *PLAIN], ["", " "], ["a " * 400, "[SEP]" * 9, ""]):
        assert_same_reading(read(texts), reference(texts))


def test_only_rows_that_need_it_take_the_exact_path(vocabulary: list[str], bundle: Bundle) -> None:
    device = PretendGpu()
    read = device_reader(vocabulary, bundle, device)
    read([*PLAIN, "[sep]", "[ SEP ]", "a" * 100, "[SE", "P]"])
    assert device.ledger.events.get(EXACT_ROWS, 0) == 0
    read([*PLAIN, *EXACT_TEXTS])
    assert device.ledger.events[EXACT_ROWS] == len(EXACT_TEXTS)


def test_one_upload_and_two_small_reads_a_batch(vocabulary: list[str], bundle: Bundle) -> None:
    device = PretendGpu()
    read = device_reader(vocabulary, bundle, device)
    read(PLAIN)
    moved = {edge: traffic for edge, traffic in device.ledger.traffic.items() if edge.name != SETUP}
    assert {(edge.name, edge.direction) for edge in moved} == {("TEXT", UP), (CONTROL, DOWN)}
    sizes = {edge.name: (traffic.copies, traffic.num_bytes) for edge, traffic in moved.items()}
    blob = sum(len(text.encode()) for text in PLAIN)
    assert sizes == {"TEXT": (1, blob + 8 * (len(PLAIN) + 1)), CONTROL: (2, 8 + len(PLAIN) + 1)}
    read([*PLAIN, "[SEP]"])
    assert device.ledger.traffic[CopyEdge(EXACT, UP)].copies == 2  # token ids with the mask, and features


@pytest.mark.parametrize(
    ("change", "why"),
    [({"is_lowercase": False}, "texts that keep upper case"), ({"max_length": 4096}, "on a GPU at most 2040 tokens")],
)
def test_texts_that_are_read_on_the_host_only_are_refused_on_a_gpu(
    vocabulary: list[str], bundle: Bundle, change: dict[str, Any], why: str
) -> None:
    changed = dataclasses.replace(bundle, **change)
    with pytest.raises(SetupError, match=f"on GPU 0, and {why} .* --place preprocess=cpu"):
        make_reader(vocabulary, changed, PretendGpu(), edge="TEXT")
    assert_same_reading(
        make_reader(vocabulary, changed, Device(), edge="TEXT")(PLAIN), Reader(vocabulary, changed)(PLAIN)
    )


def test_marks_that_change_places_are_on_the_list() -> None:
    """NFD sorts marks by their class: a table of single code points cannot, so such marks take the exact path.

    Those of category Mn are dropped before it shows.
    """
    listed = {code for first, last in read_code_points() for code in range(first, last + 1)}
    classes = set()
    for code in set(range(0x110000)) - listed - set(range(0xD800, 0xE000)):
        kept = [c for c in unicodedata.normalize("NFD", chr(code)) if unicodedata.category(c) != "Mn"]
        classes |= {unicodedata.combining(c) for c in kept} - {0}
    assert classes == {6, 9}  # the signs of vowel killers keep their order among themselves, and U+16FF0 with them


def test_a_device_that_reads_otherwise_does_not_start(vocabulary: list[str], bundle: Bundle) -> None:
    class Otherwise(EmulatedText):
        """Loses a row's last word, as a kernel of libcudf's does under a limit of words."""

        def pieces(self, clean: Ragged) -> Ragged:
            found = super().pieces(clean)
            return Ragged(found.values, found.offsets - 1 * (found.offsets > 0))

    device = PretendGpu()
    with pytest.raises(SetupError, match=r"The text functions of GPU 0 give other \w+ than the host's\."):
        DeviceReader(vocabulary, bundle, device, "TEXT", Otherwise(vocabulary, device))
