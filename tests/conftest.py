"""One small set of artifacts, one repository and one real server for the whole run."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch is imported: active waiting at OpenMP barriers collapses beside the server's own threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch

from shoal.component.bundle import Bundle
from shoal.component.wordpiece import WordPiece, read_vocabulary
from shoal.machine import describe_machine, library_versions
from shoal.repository.compose import compose
from shoal.repository.placement import Plan
from shoal.serving.client import Client
from shoal.serving.local import LocalPipeline
from shoal.serving.server import Server, serve
from shoal.training.corpus import CLEAR_FILE, DATA_DIR, Corpus, read_corpus, read_passages
from shoal.training.fit import EncoderSettings
from shoal.training.train import Preset, train

pytest_plugins = ["tests.support.environments", "tests.support.bulk"]
ROOT = Path(__file__).parents[1]
TINY = Preset(num_held_out=20, num_trees=20, encoder=EncoderSettings(max_steps=2))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--verify", action="store_true", help="full sizes, recorded under benchmarks/results")


# The longest files first: two processes take a file each, and the last one should be short.
LONGEST = (
    "test_readme", "test_check", "test_train", "test_tutorial", "test_build", "test_triage", "test_environment_served",
    "test_artifacts", "test_new",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def fp32() -> Iterator[None]:
    """Tolerances are those of fp32 on every machine; what tests bf16 says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.repository.placement.computes_bf16", lambda: False)
        yield


@dataclass(frozen=True)
class Scale:
    """Samples in `make test`, everything in `make verify`."""

    is_full: bool

    def __call__(self, sample: int, full: int) -> int:
        return full if self.is_full else sample


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    return Scale(bool(request.config.getoption("--verify")))


@pytest.fixture(scope="session")
def record(scale: Scale) -> Iterator[Callable[..., None]]:
    """Keep a claim's figures; written to the day's file when the full sizes ran, beside those that others wrote."""
    figures: dict[str, Any] = {}

    def keep(claim: str, **values: Any) -> None:
        figures[claim] = values

    yield keep
    if scale.is_full and figures:
        libraries = ("numpy", "tokenizers", "torch", "transformers", "treelite", "tritonclient", "nvidia-pytriton")
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "versions": library_versions(*libraries),
            "claims": figures,
        }
        path = ROOT / "benchmarks" / "results" / f"verify-{result['date']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            result["claims"] = json.loads(path.read_text(encoding="utf-8"))["claims"] | figures
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def passages() -> Corpus:
    return read_passages()


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """The CLEAR corpus, where SHOAL_DATA_DIR names its folder."""
    folder = os.environ.get(DATA_DIR)
    if not folder or not (Path(folder) / CLEAR_FILE).is_file():
        pytest.skip(f"{DATA_DIR} names no folder with {CLEAR_FILE}")
    return read_corpus(Path(folder) / CLEAR_FILE)


@pytest.fixture(scope="session")
def texts(request: pytest.FixtureRequest, passages: Corpus) -> list[str]:
    """Real texts: the corpus where it is in reach, else shoal's own passages."""
    try:
        return list(request.getfixturevalue("corpus").texts)
    except pytest.skip.Exception:
        return list(passages.texts)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory, passages: Corpus) -> Path:
    """Trained for a moment: real weights, real files, scores of no worth."""
    out = tmp_path_factory.mktemp("trained") / "artifacts"
    train(passages, out, preset=TINY)
    return out


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of no worth and no size, with the files of a published one."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(6000))]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bundle(artifacts: Path) -> Bundle:
    return Bundle.load(artifacts / "preprocess.json")


@pytest.fixture(scope="session")
def wordpiece(artifacts: Path) -> WordPiece:
    return WordPiece(read_vocabulary(artifacts / "vocab.txt"))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, artifacts: Path) -> Path:
    return compose("ensemble_all", tmp_path_factory.mktemp("composed") / "repository", artifacts=artifacts)


@pytest.fixture(scope="session")
def pipeline(repository: Path) -> LocalPipeline:
    return LocalPipeline.load(repository / "ensemble_all")


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[Server]:
    with serve(repository) as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    """A client of the shared server, once over each protocol."""
    url = server.grpc_url if request.param == "grpc" else server.http_url
    with Client(url, protocol=request.param) as connected:
        yield connected


def as_bytes(texts: list[str]) -> Any:
    """A TYPE_STRING tensor, [len(texts), 1]."""
    array = np.empty((len(texts), 1), np.object_)
    array[:, 0] = [text.encode() for text in texts]
    return array


# --- a real GPU --------------------------------------------------------------------------------------------------

GPU_LIBRARIES = ("cupy", "nvforest", "pylibcudf", "rmm", "torch")


def missing_for_gpu() -> str:
    """What keeps these tests from running; empty where nothing does."""
    absent = [name for name in GPU_LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    import torch

    return "" if torch.cuda.is_available() else "there is no GPU"


needs_gpu = pytest.mark.skipif(bool(missing_for_gpu()), reason=f"GPU tests: {missing_for_gpu()}")


@pytest.fixture(scope="session")
def gpu_pipeline(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPipeline]:
    repository = compose(
        "ensemble_all", tmp_path_factory.mktemp("gpu") / "r", artifacts=artifacts, plan=Plan(placement="gpu")
    )
    loaded = LocalPipeline.load(repository / "ensemble_all")
    yield loaded
    loaded.close()
