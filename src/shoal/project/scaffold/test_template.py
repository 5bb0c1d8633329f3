"""Generated tests of pipelines without known answers: served answers must equal those of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.component.spec import TensorSpec
from shoal.project.scaffold import text
from shoal.repository.config import ModelConfig

_EXACT = "        np.testing.assert_array_equal(served[name], expected)"
_CLOSE = """\
        if expected.dtype == np.object_:  # texts
            np.testing.assert_array_equal(served[name], expected)
        else:
            np.testing.assert_allclose(served[name], expected, rtol=1e-5, atol=1e-5)"""


def write_test(
    name: str,
    pipeline: str,
    inputs: Sequence[TensorSpec],
    models: Iterable[ModelConfig],
    *,
    is_batched: bool,
    widths: Mapping[str, int] | None = None,
    artifacts: Sequence[str] = (),
) -> str:
    """Write the test ``name`` of ``pipeline``, which takes ``inputs`` and runs ``models``.

    ``widths`` are the sizes of variable dimensions, by input. ``artifacts`` are those that no model folder contains:
    the test takes them from ``build/artifacts``. Answers must be equal to the last bit if all models are Python
    components, else within 1e-5.
    """
    known = widths or {}
    entries = [
        (t.name, text.write_sample(t, is_batched=is_batched, width=known.get(t.name, text.WIDTH)))
        for t in inputs
        if not t.is_optional
    ]
    before = ""
    if artifacts:
        line = f'ARTIFACTS = PROJECT / "build" / "artifacts"  # {", ".join(artifacts)}'
        before += (line if len(line) <= text.LINE else line.partition("  #")[0]) + "\n"
    if any("RANDOM." in value for _, value in entries):
        before += "RANDOM = np.random.default_rng(0)\n"
    is_exact = all(model.backend == "python" for model in models)
    return text.fill(
        "test_equal.py",
        name=name,
        pipeline=pipeline,
        before=before,
        artifacts="artifacts=ARTIFACTS, " if artifacts else "",
        request=text.write_entries(entries, 4),
        compare=_EXACT if is_exact else _CLOSE,
    )
