"""A pipeline: defined in Python or read from its configuration, and run in this process."""

from __future__ import annotations

from pathlib import Path

from shoal.composition.definition import Definition
from shoal.local import LocalPipeline, Remote


class Pipeline(Definition):
    __doc__ = f"""{Definition.__doc__}
    ``Pipeline.load`` starts one of a composed repository in this process::

        scores = Pipeline.load("build/repository/my_ensemble")(TEXT=["A text."])["SCORE"]
    """

    @staticmethod
    def load(folder: Path | str, *, remote: Remote | None = None) -> LocalPipeline:
        """Load the model in ``folder`` and its members from the folders beside it, to be called in this process.

        With ``remote``, a ``Client``, only Python components run here and the other models there.

        Raises:
            ArtifactError: a model, an artifact or a backend is missing.
            InputError: ``remote`` serves another repository.
        """
        return LocalPipeline.load(folder, remote=remote)
