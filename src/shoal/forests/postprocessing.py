"""From a forest's values to the answers that Triton's FIL backend gives under the same settings.

All of it is array code, for NumPy and CuPy alike.
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
    """The parameters of a ``fil`` model that decide what it answers.

    ``gives_class``: the number of the class (``output_class``, or ``is_classifier`` as it is called from 25.09 on), for
    two classes by ``threshold``. ``gives_chances``: the chances of the classes instead (``predict_proba``).
    """

    gives_class: bool = False
    gives_chances: bool = False
    threshold: float = 0.5
    given: tuple[str, ...] = ()  # those that are true, as they were written

    @classmethod
    def read(cls, spec: ModelSpec) -> Settings:
        """The settings of a model.

        Raises:
            ArtifactError: one is neither true nor false, or the threshold is no number.
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
        """The values of a row of answers that may be declared, for a forest that gives ``num_outputs`` a row.

        None for a regressor under a classifier's settings: FIL believes them, and answers 0 and 1.
        """
        if not is_classifier:
            return () if self.gives_class or self.gives_chances else (num_outputs,)
        if self.gives_chances:
            return (num_outputs,) if num_outputs > 1 else (2, 1)  # 1: from 25.09 on, the second class's alone
        return (1,) if self.gives_class else (num_outputs,)

    def answer(self, values: Array, width: int) -> Array:
        """FP32 ``[rows, width]`` from the forest's values, FP32 ``[rows, outputs]``.

        Source: fil_backend, src/tl_model.h, src/cpu_forest_model.h and src/detail/postprocess_cpu.cc. Of two equally
        likely classes it is the first.
        """
        xp = namespace(values)
        if self.gives_chances:
            return xp.concat([1 - values, values], axis=1) if values.shape[1] < width else values
        if not self.gives_class:
            return values
        is_several = values.shape[1] > 1
        classes: Any = xp.argmax(values, axis=1)[:, None] if is_several else values > self.threshold
        return xp.astype(classes, xp.float32)
