"""Exception hierarchy.

ShoalError
├── InputError      a value that a caller gave cannot be used
├── ArtifactError   a file is missing, damaged, or does not fit its neighbour
├── SetupError      this machine or Python environment lacks something
└── ServerError     Triton did not start, went away, or refused
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class ShoalError(Exception):
    """Base class of all errors: what happened, with the value, then what to do.

    ``what`` is one sentence that names the value; ``fix`` is what to do or type. In a served component, messages of
    ArtifactError and SetupError stay in the server's log, since they name its paths; all others reach clients.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what} {fix}" if fix else what)
        self.what = what
        self.fix = fix


class InputError(ShoalError):
    """A value that a caller gave cannot be used; only that caller's request fails."""


class ArtifactError(ShoalError):
    """A file is missing, damaged, or does not fit its neighbour."""


class SetupError(ShoalError):
    """This machine or Python environment lacks something."""


class ServerError(ShoalError):
    """Triton did not start, went away, or refused the request."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the advice for an unknown name: the known one that is nearest to it, else all of them."""
    names = list(known)
    close = [other for other in names if other.lower() == name.lower()] or get_close_matches(name, names, 1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(names) or 'none'}."


# The libraries of each extra in pyproject.toml, by import name.
_EXTRAS = {
    "draw": ("matplotlib", "pygraphviz"),
    "env": ("conda_pack", "elftools", "rattler", "yaml"),
    "files": ("openpyxl", "pyarrow"),
    "gpu": ("cupy", "nvforest", "pylibcudf", "rmm", "torch"),
    "llm": ("huggingface_hub", "jinja2", "safetensors", "tokenizers", "torch", "transformers"),
    "serve": ("onnx", "onnxruntime", "pytriton", "torch", "treelite"),
    "skops": ("sklearn", "skops"),
    "train": (
        "jinja2",
        "matplotlib",
        "pooch",
        "safetensors",
        "scipy",
        "sklearn",
        "torch",
        "transformers",
        "treelite",
    ),
}


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Guard an import from one of shoal's extras: a missing library becomes an error with the command to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS[extra]:
            raise
        raise SetupError(f"{error.name} is not installed.", f"Type: pip install 'shoal[{extra}]'") from None
