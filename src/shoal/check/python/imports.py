"""Downloads of a ``model.py`` while it is imported."""

from __future__ import annotations

import re

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model
from shoal.check.python.import_time import at_import
from shoal.check.python.source import Source, examine

DOWNLOADS = Rule("downloads-at-import", Severity.WARNING)
RULES = (DOWNLOADS,)

_DOWNLOADS = re.compile(
    r"(requests|httpx)\.(get|post|request|stream)|(urllib\.request\.|urllib\.|urllib2\.)url(open|retrieve)"
    r"|wget\.download|gdown\.\w*download\w*|huggingface_hub\.(snapshot_download|hf_hub_download)|nltk\.download"
    r"|torch\.hub\.(load|load_state_dict_from_url|download_url_to_file)|spacy\.cli\.download(\.download)?|stanza\.download"
)


def find(model: Model) -> Findings:
    """Each place in a model."""
    yield from examine(model, _look)


def _look(source: Source) -> Findings:
    for call, by in at_import(source):
        name = source.name(call.func)
        how = f"{name} runs while model.py is imported{f', by way of {by}' if by else ''}."
        if _DOWNLOADS.fullmatch(name):
            yield DOWNLOADS.at(source.at(call), how, "Download when the image or the repository is built.")
