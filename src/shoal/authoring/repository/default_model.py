"""Choice of a repository's or server's default model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.errors import InputError


def list_tops(calls: Mapping[str, Iterable[str] | None], composed_for: Sequence[str] = ()) -> list[str]:
    """Return the models from which ``find_top`` chooses."""
    if len(composed_for) == 1 and composed_for[0] in calls:
        return [composed_for[0]]
    ensembles = [name for name, called in calls.items() if called is not None]
    inner = {name for called in calls.values() for name in called or ()}
    return [name for name in ensembles if name not in inner] or ensembles or list(calls)


def find_top(calls: Mapping[str, Iterable[str] | None], where: str, composed_for: Sequence[str] = ()) -> str:
    """Choose the default model of a repository or a server.

    It is the ensemble that the repository was composed for, else the only ensemble that no other ensemble calls, else
    the only model. ``calls`` maps each ensemble to the models of its steps, and any other model to None; ``where``
    names the repository or server in an error.

    Raises:
        InputError: there are several such models, or none.
    """
    tops = list_tops(calls, composed_for)
    if not tops:
        raise InputError(f"{where} has no model that is ready.")
    if len(tops) > 1:
        has_ensembles = calls[tops[0]] is not None
        what = "ensembles that no other ensemble calls" if has_ensembles else "models and no ensemble"
        raise InputError(
            f"{where} has {len(tops)} {what}: {', '.join(tops)}.",
            f"Name one, such as --model {tops[0]}; in Python, its folder or its name.",
        )
    return tops[0]
