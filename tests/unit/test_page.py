from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from shoal.errors import SetupError
from shoal.readability.evaluation import (
    Evaluation,
    blend_weight,
    by_group,
    cross_fitted_blend,
    linear_baselines,
    summarise,
)
from shoal.readability.page import fixed, seconds, span, summarise_in_words, write_page
from shoal.readability.work import flatten

VOID = {"br", "hr", "img", "input", "link", "meta"}
FORMULAS = ("Flesch reading ease", "SMOG", "LIX")


@dataclass
class Page(HTMLParser):
    """Contents of a page by tag; an unclosed tag is an error."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def invented(num_texts: int = 120, num_folds: int = 3, *, genres: bool = True, num_formulas: int = 3) -> Evaluation:
    random = np.random.default_rng(7)
    targets, folds = random.normal(-1, 1, num_texts), np.arange(num_texts) % num_folds
    rows = [(np.flatnonzero(folds != k), np.flatnonzero(folds == k)) for k in range(num_folds)]
    if num_folds == 1:
        rows = [(rows[0][1], rows[0][1])]
    encoder = 0.7 * targets + random.normal(-0.3, 0.4, num_texts)
    forest = 0.4 * targets + random.normal(-0.6, 0.5, num_texts)
    models = {"encoder": encoder, "forest": forest, "blend": cross_fitted_blend(encoder, forest, targets, folds)}
    columns = {name: targets * 10 + random.normal(0, 15, num_texts) for name in FORMULAS[:num_formulas]}
    lines = linear_baselines(columns, targets, rows)
    mean = np.zeros(num_texts)
    for train, test in rows:
        mean[test] = targets[train].mean()
    return Evaluation(
        targets=targets,
        folds=folds,
        predictions={**models, **lines, "mean of training rows": mean},
        kinds={
            **dict.fromkeys(models, "model"),
            **dict.fromkeys(lines, "formula"),
            "mean of training rows": "baseline",
        },
        num_words=random.integers(100, 250, num_texts),
        genres=tuple(random.choice(["Info", "Lit & <i>"], num_texts).tolist()) if genres else (),
    )


def history(fold: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "epoch": step / 100,
            "train_rmse": 1 / (1 + step / 50),
            "inner_rmse": {"mean": 0.6 + abs(step - 100) / 500, "cls": 0.7 + fold / 100},
        }
        for step in range(20, 200, 20)
    ]


def report_on(evaluation: Evaluation, *, name: str = "CLEAR corpus", is_full: bool = True) -> dict[str, Any]:
    num_folds = len(np.unique(evaluation.folds))
    folds = range(num_folds if is_full else 0)
    report: dict[str, Any] = {
        "corpus": {"name": name, "sha256": "c0" * 32, "num_texts": len(evaluation.targets), "num_duplicates": 2},
        "is_demonstration": False,
        "num_trained_on": 80,
        "evaluation": {
            "kind": f"{num_folds}-fold cross-validation" if num_folds > 1 else "held-out texts",
            "num_folds": num_folds,
            "num_texts": len(evaluation.targets),
            "predictions": summarise(evaluation, num_resamples=200),
            "groups": by_group(evaluation),
        },
        "bert_weight": blend_weight(
            evaluation.predictions["encoder"], evaluation.predictions["forest"], evaluation.targets
        ),
        "contents": {"bert-large": "a small encoder", "cuml": "random forest, 100 trees of depth 16"},
        "encoder": {
            "name": "a-small-encoder",
            "revision": None,
            "sha256": "ab" * 32,
            "dtype": "fp32",
            "head": "mean",
            "num_steps": 1212,
            "histories": [history(fold) for fold in folds],
            "chosen": [{"fold": k + 1, "head": "mean", "best_step": 100, "inner_rmse": 0.6} for k in folds],
        },
        "preset": {"num_folds": num_folds, "num_rows": 1000, "encoder": {"max_epochs": 1.5, "max_steps": 1212}},
        "seed": 41,
        "seconds": {"train forest": 3.21, "train encoder": 3725.0},
        "peak_memory_gib": 2.1,
        "machine": {"cpu": "Some CPU", "cores": 2, "gpu": None, "threads": 2},
        "shoal": "0.1.0",
        "versions": {"python": "3.11.9", "scikit-learn": "1.9.1"},
    }
    if is_full:
        report["importances"] = {f"share of {'$the$' if k else '字'} {k}": 0.1 / (k + 1) for k in range(30)}
    return report


def check_self_contained(page: Page) -> None:
    assert len(page.all("h1")) == 1
    assert page.tags[0] == ("html", {"lang": "en"})
    for image in page.all("img"):
        assert image["alt"]
        assert (image["src"] or "").startswith("data:image/")
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name in ("src", "href", "srcset", "style"):
            assert (attributes.get(name) or "#").startswith(("data:", "#"))


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return invented()


@pytest.fixture(scope="module")
def path(evaluation: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, report_on(evaluation), evaluation)
    return path


def test_the_page_loads_no_other_file(path: Path) -> None:
    page = read(path)
    check_self_contained(page)
    assert len(page.all("img")) == 6
    assert "url(" not in path.read_text(encoding="utf-8")
    assert "@import" not in path.read_text(encoding="utf-8")


def test_every_figure_is_on_the_page(path: Path, evaluation: Evaluation) -> None:
    text = read(path).text
    report = report_on(evaluation)
    for row in report["evaluation"]["predictions"]:
        assert row["name"] in text
        for figure in (row["rmse"], row["pearson"], row["spearman"], row["difference"], *row["rmse_by_fold"]):
            assert fixed(figure) in text
        for interval in (row["rmse_interval"], row["pearson_interval"], row["difference_interval"]):
            assert span(interval) in text
    for group in (*report["evaluation"]["groups"]["genre"], *report["evaluation"]["groups"]["length"]):
        assert group["group"] in text
        assert all(fixed(figure) in text for model in group["models"].values() for figure in model.values())
    known = (
        "c0" * 32,
        "ab" * 32,
        "41",
        "1,212",
        "80 (at most 1000)",
        "1.5",
        "Some CPU",
        "2.1 GiB",
        "3.11.9",
        "1 h 2 min",
        "3.2 s",
        "0.1.0",
    )
    assert all(value in text for value in known)
    assert "A demonstration" not in text
    assert "the other 2" in text  # folds


def test_the_pictures_are_pictures(path: Path) -> None:
    kinds = []
    for image in read(path).all("img"):
        kind, data = re.findall(r"^data:image/([a-z+]+);base64,(.*)$", image["src"] or "")[0]
        picture = base64.b64decode(data)
        kinds.append(kind)
        if kind == "png":
            assert picture.startswith(b"\x89PNG")
        else:
            root = ElementTree.fromstring(picture)
            links = {value for node in root.iter() for name, value in node.attrib.items() if name.endswith("href")}
            assert all(link.startswith("#") for link in links)
    assert sorted(kinds) == ["png"] + ["svg+xml"] * 5


def test_the_same_report_is_the_same_page(path: Path, evaluation: Evaluation, tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):  # the reader's own style has no say
        write_page(tmp_path / "again.html", report_on(evaluation), evaluation)
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "again.html").read_bytes() == path.read_bytes()


def test_names_are_escaped(tmp_path: Path) -> None:
    evaluation = invented(30, num_formulas=0)
    path = tmp_path / "report.html"
    write_page(path, report_on(evaluation, name='<b>&"', is_full=False), evaluation)
    page = read(path)
    assert page.all("b") == page.all("i") == []
    assert 'How well the models predict: <b>&"' in page.text
    assert "Lit & <i>" in page.text


def test_a_page_of_little(tmp_path: Path) -> None:
    evaluation = invented(20, 1, genres=False, num_formulas=0)
    path = tmp_path / "report.html"
    report = report_on(evaluation, is_full=False) | {"is_demonstration": True, "num_trained_on": 1080}
    write_page(path, report, evaluation)
    page = read(path)
    check_self_contained(page)
    assert len(page.all("img")) == 4
    for words in ("A demonstration", "20 held-out texts", "trained on 1,080 texts", "are the ones that are served"):
        assert words in page.text
    for words in ("published", "By genre", "fold by fold", "looks at", "learned", "inner split"):
        assert words not in page.text


def test_a_page_of_much_is_small(tmp_path: Path) -> None:
    evaluation = invented(4724, 5)
    path = tmp_path / "report.html"
    write_page(path, report_on(evaluation), evaluation)
    check_self_contained(read(path))
    assert path.stat().st_size < 600_000


def row(name: str, kind: str, rmse: float, difference: tuple[float, float] | None = None) -> Mapping[str, Any]:
    shift = None if difference is None else sum(difference) / 2
    bounds = [rmse - 0.01, rmse + 0.01]
    return {
        "name": name, "kind": kind, "rmse": rmse, "rmse_interval": bounds,
        "difference": shift, "difference_interval": difference,
    }  # fmt: skip


def test_the_summary_in_words() -> None:
    models = [row("encoder", "model", 0.54, (-0.02, -0.01)), row("forest", "model", 0.8), row("blend", "model", 0.53)]
    others = [row("SMOG", "formula", 0.9), row("LIX", "formula", 0.81), row("mean of training rows", "baseline", 1.03)]
    assert summarise_in_words([*models, *others]) == [
        "The blend's RMSE is 0.53 (95 % interval 0.52 to 0.54); the best that published formulas reach is 0.81, with "
        "LIX; the mean of training rows gives 1.03.",
        "The blend is better than the encoder alone (difference −0.015, interval −0.020 to −0.010).",
    ]
    for difference, words in {
        (-0.02, 0.01): "do not show whether",
        (0.01, 0.02): "is worse than",
        (0.0, 0.0): "The blend is the encoder alone: the other model adds nothing",
    }.items():
        assert words in summarise_in_words([row("encoder", "model", 0.5, difference), *models[1:]])[1]
    assert summarise_in_words([models[2]]) == ["The blend's RMSE is 0.53 (95 % interval 0.52 to 0.54)."]


def test_figures_in_words() -> None:
    assert fixed(-0.00004) == "0.000"
    assert fixed(-1.25, 1) == "−1.2"
    assert fixed(None) == span(None) == "–"
    assert [seconds(value) for value in (0.04, 42.4, 59.99, 200, 7500)] == [
        "0.0 s",
        "42 s",
        "60 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
    assert dict(flatten({"a": 1, "b": {"c": {"d": 2}}})) == {"a": 1, "b.c.d": 2}


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_library_that_is_missing(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = invented(12)
    report = report_on(evaluation)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SetupError, match=rf"{library} is not installed\. Type: pip install 'shoal\[train\]'"):
        write_page(tmp_path / "report.html", report, evaluation)
    assert not (tmp_path / "report.html").exists()
