"""What a ``model.py`` does while it is imported, before anybody asked it anything; and code that it trusts."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from shoal.check.findings import Finding, Findings, Place, Rule, Severity
from shoal.check.models import Model
from shoal.check.python.import_time import at_import
from shoal.check.python.source import Source, examine, is_literal

DOWNLOADS = Rule(
    "downloads-at-import",
    Severity.WARNING,
    "A model.py that downloads while it is imported",
    "Each instance downloads at each start; where there is no network the model does not load, and what it gets today"
    " may not be what was tested.",
    "server issue 5933, of models that load on one machine alone.",
    'nltk.download("punkt")\n\n\nclass TritonPythonModel: ...',
    "RUN python -m nltk.downloader punkt  # when the image is built",
)
SHELL = Rule(
    "shell-at-import",
    Severity.WARNING,
    "A model.py that runs commands while it is imported",
    "They run as the server's user, once for each instance and at the same time; `pip install` among them changes the"
    " environment that other models are using.",
    "A model's process has the server's rights, environment and secrets.",
    'subprocess.run([sys.executable, "-m", "pip", "install", "sentencepiece"])\n\n\nclass TritonPythonModel: ...',
    "An execution environment that has sentencepiece in it",
)
REMOTE = Rule(
    "trust-remote-code",
    Severity.WARNING,
    "Code of a model hub that runs as the server",
    "trust_remote_code=True runs what the hub's repository holds on the day of the start, as the server's user.",
    "huggingface.co/docs/transformers: custom models; pin a revision that you have read.",
    'AutoModel.from_pretrained("org/model", trust_remote_code=True)',
    "AutoModel.from_pretrained(folder)  # a class of transformers, files of yours",
)
RULES = (DOWNLOADS, SHELL, REMOTE)

_DOWNLOADS = re.compile(
    r"(requests|httpx)\.(get|post|request|stream)|(urllib\.request\.|urllib\.|urllib2\.)url(open|retrieve)"
    r"|wget\.download|gdown\.\w*download\w*|huggingface_hub\.(snapshot_download|hf_hub_download)|nltk\.download"
    r"|torch\.hub\.(load|load_state_dict_from_url|download_url_to_file)|spacy\.cli\.download(\.download)?|stanza\.download"
)
_SHELL = re.compile(
    r"os\.(system|popen|exec[lv]\w*|spawn\w+|posix_spawnp?)|pip\.main|pip\._internal(\.cli\.main)?\.main"
    r"|subprocess\.(run|call|check_call|check_output|Popen|getoutput|getstatusoutput)"
)
_KEY = "trust_remote_code"
_MAX_JSON = 2**20


def find(model: Model) -> Findings:
    """Each place in a model."""
    yield from examine(model, _look)
    if model.parameters.get(_KEY, "").strip().lower() in ("true", "1", "yes", "on"):
        yield _remote(model.at_entry("parameters", key=_KEY))
    for version in model.versions:
        yield from _check_settings(model.folder / str(version) / "model.json")


def _look(source: Source) -> Findings:
    for call, by in at_import(source):
        name = source.name(call.func)
        how = f"{name} runs while model.py is imported{f', by way of {by}' if by else ''}."
        if _DOWNLOADS.fullmatch(name):
            yield DOWNLOADS.at(source.at(call), how, "Download when the image or the repository is built.")
        elif _SHELL.fullmatch(name):
            yield SHELL.at(source.at(call), how, "Do it when the image or the environment is built.")
    for node in source.nodes:
        is_keyword = isinstance(node, ast.keyword) and node.arg == _KEY and is_literal(node.value, True)
        if is_keyword or (isinstance(node, ast.Dict) and _is_set(node)):
            yield _remote(source.at(node))


def _is_set(node: ast.Dict) -> bool:
    return any(
        is_literal(key, _KEY) and is_literal(value, True) for key, value in zip(node.keys, node.values, strict=True)
    )


def _check_settings(path: Path) -> Findings:
    """vLLM's engine arguments."""
    try:
        if path.stat().st_size > _MAX_JSON or not path.is_file():
            return
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(settings, dict) and settings.get(_KEY) is True:
        yield _remote(Place(path, text.count("\n", 0, text.find(f'"{_KEY}"')) + 1))


def _remote(place: Place) -> Finding:
    return REMOTE.at(place, f"{_KEY} is true.", "Take the model's code into the repository, and leave it out.")
