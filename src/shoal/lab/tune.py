"""Choose the precision of a repository's encoders on this machine, by measuring FP32, BF16 and INT8 beside each other.

Each candidate is the same repository with another precision, loaded in a process of its own, so that its memory can be
told. The candidates take turns, request by request, because a machine's speed changes with time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shoal
from shoal.authoring.composition.artifacts import converts, find_scripts
from shoal.authoring.composition.tuned import MOST_ERROR, quantized
from shoal.authoring.repository.config import CONFIG, ModelConfig, write_config
from shoal.authoring.repository.find_graph import find_graph
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.manifest import MANIFEST
from shoal.authoring.repository.plan import INT8
from shoal.authoring.repository.precision import write_dtype
from shoal.clients.local import load
from shoal.errors import InputError, SetupError
from shoal.kit.component.files import sha256
from shoal.kit.encoders.quantize import FILE, INT8_FLAGS, Record, add_errors, make_batches, quantize
from shoal.lab.bench.plots import draw_precisions
from shoal.system.machine import computes_bf16, describe_machine, library_versions, peak_memory
from shoal.system.paths import aside, check_replaceable, exchange
from shoal.system.progress import OnProgress

PLAN, PLOT = "tuned.json", "tuned.svg"
MIDDLE, LARGE = 16, 64
BATCHES = (1, MIDDLE, LARGE)  # rows; the choice is made by the rate of the middle ones
SECONDS = 120.0
_GAIN = 1.05  # least ratio of rates for which a lower precision is chosen
_MOST_SCORED = 512  # texts
_SINGLES = 8  # requests of one row in a turn


@dataclass
class Candidate:
    """One precision. ``why_not`` says, as a clause, why it is not measured; ``scores`` are those of all texts."""

    dtype: str
    why_not: str = ""
    seconds: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in BATCHES})
    scores: list[NDArray[np.float64]] = field(default_factory=list)
    peak_mib: int = 0

    def rate(self, rows: int) -> float:
        """Median rate of requests of ``rows`` rows, in rows per second."""
        return float(rows / np.median(self.seconds[rows]))


def tune(
    repository: Path | str,
    out: Path | str,
    texts: Sequence[str],
    *,
    targets: Sequence[float] | None = None,
    calibration: Sequence[str] = (),
    output: str = "",
    seen: bool | None = None,
    seconds: float = SECONDS,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Measure the precisions of the encoders in ``repository``, write the folder ``out``, return the plan in it.

    Every candidate scores the first 512 of ``texts``, or those that ``seconds`` leave time for; with ``targets``, one
    per text, RMSE and Spearman's correlation are compared, too. ``calibration`` are other texts, which INT8 needs.
    ``output`` is the output that is compared, by default the first of FP32. ``seen`` goes into the plan: whether the
    models were trained on ``texts``, if that is known.

    Raises:
        InputError: the repository has no encoder in TorchScript, or needs other inputs than one text; or a text is for
            calibration and for measuring.
        ArtifactError: ``repository`` is damaged.
    """
    repository, out = Path(repository).resolve(), Path(out).resolve()
    check_replaceable(out, PLAN)
    graph = find_graph(repository)
    encoders = {name: member for name, member in graph.members.items() if find_scripts(member, None)}
    if not encoders:
        raise InputError(f"{graph.config.name} has no encoder in TorchScript.", "There is no precision to choose.")
    text, output = _find_tensors(graph, output)
    if both := set(texts) & set(calibration):
        raise InputError(f"{len(both):,} texts are both for calibration and for measuring.", "Give different ones.")
    candidates = [Candidate(dtype, _explain(dtype, encoders, calibration)) for dtype in ("fp32", "bf16", INT8)]
    measured = [each for each in candidates if not each.why_not]
    with aside(out) as made, tempfile.TemporaryDirectory(prefix="shoal-", dir=repository.parent) as folder:
        records = {}
        if measured[-1].dtype == INT8:
            on_progress("quantise", 0, 1)
            records = _quantize(repository, graph.config.name, encoders, text, calibration, made)
            on_progress("quantise", 1, 1)
        for each in measured:
            _write(repository, Path(folder) / each.dtype, encoders, each.dtype, made)
        with ExitStack() as held:
            places = [Path(folder) / each.dtype / graph.config.name for each in measured]
            asks = [held.enter_context(_asking(place, text, output)) for place in places]
            _measure(measured, asks, texts[:_MOST_SCORED], seconds, on_progress)
        plan = _conclude(candidates, targets)
        for name, record in records.items():
            facts = plan["candidates"][-1]
            errors = {key: facts[key] for key in ("greatest", "mean", "error")}
            add_errors(made / name / "1" / FILE, replace(record, **errors))
        if find_spec("matplotlib"):
            draw_precisions(plan, made / PLOT)
        plan |= {} if seen is None else {"seen": seen}
        plan |= _describe(made, encoders)
        (made / PLAN).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
        exchange(made, out)
    return plan


def _describe(made: Path, encoders: Mapping[str, ModelConfig]) -> dict[str, Any]:
    """Return versions, machine, and the digests of the models and of the files made, for the plan."""
    return {
        "shoal": shoal.__version__,
        "machine": describe_machine(),
        "versions": library_versions("torch", "openvino", "nncf"),
        "models": {name: sha256(find_scripts(model, None)[0]) for name, model in encoders.items()},
        "files": {str(path.relative_to(made)): sha256(path) for path in sorted(made.rglob("*")) if path.is_file()},
    }


def _find_tensors(graph: Graph, output: str) -> tuple[str, str]:
    """Return the names of the text input and of the output to compare."""
    spec = graph.config.spec
    needed = [tensor.name for tensor in spec.inputs if not tensor.is_optional]
    if len(needed) != 1 or next(t for t in spec.inputs if t.name == needed[0]).dtype != "TYPE_STRING":
        raise InputError(f"{spec.name} needs {', '.join(needed)}; only a single text can be given.")
    known = [tensor.name for tensor in spec.outputs if tensor.dtype == "TYPE_FP32"]
    if not known or output not in ("", *known):
        raise InputError(f"{spec.name} has no output {output or 'of TYPE_FP32'}.", f"Known: {', '.join(known)}.")
    return needed[0], output or known[0]


def _explain(dtype: str, encoders: Mapping[str, ModelConfig], calibration: Sequence[str]) -> str:
    """Return, as a clause, why a precision cannot be measured; empty if it can."""
    if dtype == "bf16" and not computes_bf16():
        return "this processor has no BF16 instructions"
    if dtype == "bf16" and not all(converts(path) for model in encoders.values() for path in find_scripts(model, None)):
        return "a file has no submodule `trunk` that could be converted"
    if dtype == INT8:
        if missing := [name for name in ("nncf", "openvino") if find_spec(name) is None]:
            return f"{missing[0]} is not installed: pip install 'shoal[int8]'"
        if set(INT8_FLAGS).isdisjoint(describe_machine()["flags"].split()):
            return f"this processor has none of the instructions {', '.join(INT8_FLAGS)}; fp32 and bf16 run"
        if not all(model.mask for model in encoders.values()):
            return "an encoder has no parameter attention_mask"
        if not calibration:
            return "there are no texts for calibration"
    return ""


def _quantize(
    repository: Path, ensemble: str, encoders: Mapping[str, ModelConfig], text: str, texts: Sequence[str], out: Path
) -> dict[str, Record]:
    """Quantise every encoder on the inputs that it gets for ``texts``, and write ``out/MODEL/1/model.onnx``."""
    records = {}
    with load(repository / ensemble) as pipeline:
        for name, model in encoders.items():
            groups = [texts[start : start + MIDDLE] for start in range(0, len(texts), MIDDLE)]
            batches = make_batches([pipeline.find_inputs(name, **{text: group}) for group in groups])
            (out / name / "1").mkdir(parents=True)
            records[name] = quantize(find_scripts(model, None)[0], model.spec, batches, out / name / "1" / FILE)
    return records


def _write(repository: Path, folder: Path, encoders: Mapping[str, ModelConfig], dtype: str, made: Path) -> None:
    """Write ``repository`` with another precision of its encoders to ``folder``, as links to its files."""
    shutil.copytree(repository, folder, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST))
    for name, model in encoders.items():
        if dtype == INT8:
            model = quantized(model, made / name)
            shutil.copyfile(made / name / "1" / FILE, folder / name / "1" / FILE)  # `made` may be on another disk
        else:
            model.message.parameters.pop("dtype", None)
            write_dtype(model.message, model, dtype)
        (folder / name / CONFIG).unlink()
        write_config(model.message, folder / name / CONFIG, comment="")


# --- measuring -------------------------------------------------------------------------------------------------------


class _Asking:
    """A pipeline in a process of its own."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __call__(self, texts: Sequence[str]) -> tuple[NDArray[np.float64], float, int]:
        """Return the scores ``[rows, ...]`` of texts, the seconds that it took, and the process's peak memory in MiB.

        Raises:
            SetupError: the process ended.
        """
        try:
            self._connection.send(list(texts))
            found = self._connection.recv()
        except (EOFError, OSError):
            raise SetupError("A process that measures ended; there may be too little memory.") from None
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]


@contextmanager
def _asking(pipeline: Path, text: str, output: str) -> Iterator[_Asking]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, pipeline, text, output), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Asking(ours)
    finally:
        ours.close()  # ends it
        process.join(10)
        process.kill()
        process.join()


def _answer(connection: Any, path: Path, text: str, output: str) -> None:
    """Score what comes through ``connection`` until its other end is closed."""
    try:
        pipeline = load(path)
        while True:
            texts = connection.recv()
            begun = time.perf_counter()
            scores = np.asarray(pipeline(**{text: texts})[output], np.float64)
            seconds = time.perf_counter() - begun
            connection.send((scores, seconds, peak_memory() // 2**20))
    except EOFError:
        return
    except Exception as error:
        connection.send(error)


def _measure(
    candidates: Sequence[Candidate], asks: Sequence[_Asking], texts: Sequence[str], seconds: float, report: OnProgress
) -> None:
    """Let candidates take turns, first with all texts in requests of 16 rows, then with requests of 1 and 64 rows."""
    for ask in asks:  # not counted: the first requests prepare the engines
        for rows in BATCHES:
            ask(texts[:rows])
    begun, done = time.monotonic(), 0
    while done < len(texts) and (done < MIDDLE or time.monotonic() - begun < seconds / 2):
        part = texts[done : done + MIDDLE]
        for each, ask in zip(candidates, asks, strict=True):
            scores, took, each.peak_mib = ask(part)
            each.scores.append(scores.reshape(len(part), -1))
            each.seconds[MIDDLE].append(took * MIDDLE / len(part))
        done += len(part)
        report("score", done, len(texts))
    turn = 0
    while not turn or time.monotonic() - begun < seconds:
        for each, ask in zip(candidates, asks, strict=True):
            for index in range(turn * _SINGLES, (turn + 1) * _SINGLES):
                each.seconds[1].append(ask([texts[index % len(texts)]])[1])
            large = [texts[(turn * LARGE + index) % len(texts)] for index in range(LARGE)]
            _, took, each.peak_mib = ask(large)
            each.seconds[LARGE].append(took)
        turn += 1
        report("time", int(min(seconds, time.monotonic() - begun)), int(seconds))


# --- the choice ------------------------------------------------------------------------------------------------------


def _conclude(candidates: Sequence[Candidate], targets: Sequence[float] | None) -> dict[str, Any]:
    """Return what was measured and chosen: the fastest candidate whose RMSE is at most 0.003 above that of FP32."""
    base = np.concatenate(candidates[0].scores)
    known = None if targets is None or base.shape[1] > 1 else np.asarray(targets, np.float64)[: len(base)]
    rmse = None if known is None else _rmse(base, known)
    chosen, described, reasons = candidates[0], [], []
    for each in candidates:
        if each.why_not:
            described.append({"dtype": each.dtype, "why_not": each.why_not})
            continue
        scores = np.concatenate(each.scores)
        difference = np.abs(scores - base)
        facts: dict[str, Any] = {
            "dtype": each.dtype,
            "rows_per_s": {str(rows): round(each.rate(rows), 2) for rows in BATCHES},
            "p50_ms": round(1e3 * float(np.median(each.seconds[1])), 2),
            "peak_mib": each.peak_mib,
            "greatest": round(float(difference.max()), 6),
            "mean": round(float(difference.mean()), 6),
            "error": None,
        }
        if base.shape[1] == 1:
            facts["spearman"] = round(_spearman(scores[:, 0], base[:, 0]), 6)
        if known is not None and rmse is not None:
            facts |= {"rmse": round(_rmse(scores, known), 6), "error": round(_rmse(scores, known) - rmse, 6)}
        described.append(facts)
        if each.dtype == INT8 and known is None:
            reasons.append("int8 is never chosen without labelled texts")
        elif facts["error"] is not None and not facts["error"] <= MOST_ERROR:
            reasons.append(f"{each.dtype} adds {facts['error']:.4f} to the RMSE, and at most {MOST_ERROR} is allowed")
        elif each.rate(MIDDLE) > _GAIN * chosen.rate(MIDDLE):
            chosen = each
    gain = chosen.rate(MIDDLE) / candidates[0].rate(MIDDLE)
    why = f"{gain:.2f} times the rate of fp32" if gain > 1 else "no other is faster"
    return {
        "dtype": chosen.dtype,
        "reason": "; ".join([f"{why}, measured with {len(base)} texts", *reasons]),
        "num_texts": len(base),
        "candidates": described,
    }


def _rmse(scores: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((scores[:, 0] - targets) ** 2)))


def _spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's rank correlation: Pearson's correlation of the ranks; equal scores are ranked by their place."""
    first, second = (np.argsort(np.argsort(scores, kind="stable")).astype(np.float64) for scores in (one, other))
    return float(np.corrcoef(first, second)[0, 1]) if len(one) > 1 else 1.0
