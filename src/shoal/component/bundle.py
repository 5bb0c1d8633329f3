"""``preprocess.json``: everything that turns a text into model inputs, as one artifact.

The file's sha256 ties a forest to the bundle it was trained with: its columns mean nothing under another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ArtifactError

FORMAT = 1
NUM_LISTED = 100  # length of each word list: the published recipe's N
NUM_STATISTICS = 7  # the columns before the two lists of shares
NUM_FEATURES = NUM_STATISTICS + 2 * NUM_LISTED


@dataclass(frozen=True)
class Bundle:
    """Word lists, normaliser and tokenizer settings.

    ``frequent`` and ``rare`` are the 100 most and least frequent words of the training corpus, in the order of their
    columns; ``mean`` and ``std`` are the training set's, one of each for every feature (a zero ``std`` is stored as 1).
    """

    vocabulary_sha256: str
    is_lowercase: bool
    max_length: int
    stop_words: tuple[str, ...]
    frequent: tuple[str, ...]
    rare: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ArtifactError(
                f"preprocess.json has format {self.format}; this shoal reads {FORMAT}.", "Train again with this shoal."
            )
        sizes = {"frequent": NUM_LISTED, "rare": NUM_LISTED, "mean": NUM_FEATURES, "std": NUM_FEATURES}
        for name, size in sizes.items():
            if len(getattr(self, name)) != size:
                found = len(getattr(self, name))
                raise ArtifactError(f"preprocess.json: {name} has {found} entries, expected {size}.", "Train again.")
        if set(self.frequent) & set(self.rare):
            raise ArtifactError("preprocess.json lists a word as both frequent and rare.", "Train on more text.")

    def dumps(self) -> str:
        """The file's text: the same bundle gives the same bytes."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read ``preprocess.json``.

        Raises:
            ArtifactError: it is not such a file.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            entries: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
            return cls(**entries)
        except (ValueError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path.name} is not a preprocessing bundle: {error}.", "Train again.") from error

    def check_vocabulary(self, path: Path) -> None:
        """Check that ``path`` is the vocabulary this bundle was made with.

        Raises:
            ArtifactError: it is another one.
        """
        if sha256(path) != self.vocabulary_sha256:
            raise ArtifactError(
                f"{path.name} is not the one preprocess.json was made with.", "Copy both from one folder."
            )


def find_changed(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Those of ``files``, name -> sha256, that are missing in ``folder`` or are not what they were."""
    return [name for name, kept in files.items() if not (folder / name).is_file() or sha256(folder / name) != kept]


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
