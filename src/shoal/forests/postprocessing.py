"""Postprocessing of a forest's values, equal to that of Triton's FIL backend under the same settings.

Array code, for NumPy and CuPy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from shoal.component.spec import ModelSpec
from shoal.component.tensors import Array, namespace
from shoal.errors import ArtifactError


@dataclass(frozen=True)
class Settings:
    """Parameters of a ``fil`` model that decide the form of its answers.

    ``gives_class``: the number of the class (``output_class``, called ``is_classifier`` from 25.09 on), for two classes
    by ``threshold``. ``gives_chances``: the probabilities of the classes instead (``predict_proba``).
    """

    gives_class: bool = False
    gives_chances: bool = False
    threshold: float = 0.5
    given: tuple[str, ...] = ()  # those that are true, as they were written

    @classmethod
    def read(cls, spec: ModelSpec) -> Settings:
        """Read the settings of a model.

        Raises:
            ArtifactError: a setting is neither true nor false, or the threshold is not a number.
        """
        texts = spec.parameters
        names = [name for name in ("output_class", "is_classifier", "predict_proba") if name in texts]
        for name in names:
            if texts[name] not in ("true", "false"):
                raise ArtifactError(
                    f"{name} of {spec.name} is {texts[name]!r}.", "Write true or false, in small letters."
                )
        try:
            threshold = float(texts.get("threshold", "0.5"))
        except ValueError:
            raise ArtifactError(
                f"threshold of {spec.name} is {texts['threshold']!r}.", "Write a number, as 0.5."
            ) from None
        return cls(
            texts.get("is_classifier", texts.get("output_class")) == "true",
            texts.get("predict_proba") == "true",
            threshold,
            tuple(f"{name} true" for name in names if texts[name] == "true"),
        )

    def widths(self, num_outputs: int, *, is_classifier: bool) -> Collection[int]:
        """Return the output widths that may be declared, for a forest with ``num_outputs`` values per row.

        Empty if a regressor has settings of a classifier: FIL would apply them, and answer 0 or 1 instead of values.
        """
        if not is_classifier:
            return () if self.gives_class or self.gives_chances else (num_outputs,)
        if self.gives_chances:
            return (num_outputs,) if num_outputs > 1 else (2, 1)  # 1: from 25.09 on, only the second class's
        return (1,) if self.gives_class else (num_outputs,)

    def answer(self, values: Array, width: int) -> Array:
        """Compute answers, FP32 ``[rows, width]``, from the forest's values, FP32 ``[rows, outputs]``.

        Source: fil_backend, src/tl_model.h, src/cpu_forest_model.h and src/detail/postprocess_cpu.cc. Of equally
        likely classes the first wins.
        """
        xp = namespace(values)
        if self.gives_chances:
            return xp.concat([1 - values, values], axis=1) if values.shape[1] < width else values
        if not self.gives_class:
            return values
        is_several = values.shape[1] > 1
        classes: Any = xp.argmax(values, axis=1)[:, None] if is_several else values > self.threshold
        return xp.astype(classes, xp.float32)
