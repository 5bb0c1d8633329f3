"""Make a conda environment without conda: rattler, from PyPI, solves and installs.

It runs in a process of its own: rattler's threads continue to write for a while after an error or Ctrl-C, end
only when their process does, and may crash an interpreter that is shutting down.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.environment.spec import Job, Wanted
from shoal.environment.tools import run, without_secrets
from shoal.errors import InputError, needs

if TYPE_CHECKING:
    import rattler

Platform = Literal["linux-64", "noarch"]
PLATFORMS: list[Platform] = ["linux-64", "noarch"]
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")  # conda's own `defaults`
_ALIAS = "CONDA_CHANNEL_ALIAS"  # conda's own variable: the server of channels that are names


def make_rattler(wanted: Wanted, prefix: Path, job: Job) -> None:
    """Make ``wanted`` at ``prefix``.

    Raises:
        InputError: no channel is named.
        SetupError: rattler failed: a channel or package is not available, or the specs exclude one another.
    """
    with needs("env"):
        import rattler  # noqa: F401  # a missing library is reported here, not in the log of the other process
    channels = [url for name in job.channels for url in (_DEFAULTS if name == "defaults" else (name,))]
    if wanted.conda and not channels:
        raise InputError(f"{wanted.source.name} names no channels.", "Name them: --channel conda-forge")
    order = {
        "conda": wanted.specs,
        "channels": [channel for channel in channels if channel != "nodefaults"],
        "urls": wanted.urls,
        "lock": str(wanted.lock or ""),
        "prefix": str(prefix),  # absolute: it is written into files unchanged
        "is_offline": job.is_offline,
    }
    variables = {"CONDA_OVERRIDE_GLIBC": job.glibc} if job.glibc else {}
    command = [sys.executable, "-P", "-m", "shoal.environment.rattler"]  # the order may hold a channel's password
    run(command, log=job.log, what="Installing by rattler", variables=variables, given=json.dumps(order))


def main(order: dict[str, Any]) -> None:
    """Entry point of the other process."""
    code = 0
    try:
        asyncio.run(_make(order))
    except Exception as error:  # rattler's have no common base class; the user reads the text
        code = 1
        sys.stdout.write(f"error: {without_secrets(' '.join(str(error).split()))}\n")
    sys.stdout.flush()
    os._exit(code)


async def _make(order: dict[str, Any]) -> None:
    import rattler

    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("RATTLER_CACHE_DIR") or user_cache / "rattler" / "cache").absolute()
    action: Literal["force-cache-only", "cache-or-fetch"]
    action = "force-cache-only" if order["is_offline"] else "cache-or-fetch"
    gateway = rattler.Gateway(cache_dir=cache, default_config=rattler.SourceConfig(cache_action=action))
    if order["lock"]:
        records = _read_lock(Path(order["lock"]))
    elif order["urls"]:
        if order["is_offline"]:
            check_cached([url.partition("#")[0] for url in order["urls"]], cache)
        records = await _read_explicit(order["urls"], gateway)
    else:
        records = await _solve(order, gateway)
    check_local(records)
    if order["is_offline"]:
        check_cached([record.url for record in records], cache)
    sys.stdout.writelines(f"{without_secrets(record.url)}\n" for record in records)
    await rattler.install(
        records,
        order["prefix"],
        cache_dir=cache / "pkgs",
        platform=rattler.Subdir("linux-64"),
        show_progress=False,
    )


async def _solve(order: dict[str, Any], gateway: rattler.Gateway) -> list[rattler.RepoDataRecord]:
    import rattler

    alias = os.environ.get(_ALIAS)
    config = rattler.ChannelConfig(alias) if alias else rattler.ChannelConfig()
    return await rattler.solve(
        [rattler.Channel(channel, config) for channel in order["channels"]],
        [_parse_spec(spec) for spec in order["conda"]],
        gateway,
        platforms=PLATFORMS,
        virtual_packages=rattler.VirtualPackage.detect(rattler.VirtualPackageOverrides.from_env()),
    )


def _parse_spec(spec: str) -> rattler.MatchSpec:
    import rattler
    from rattler.exceptions import InvalidMatchSpecError

    try:
        return rattler.MatchSpec(spec)
    except InvalidMatchSpecError as error:
        raise ValueError(f"{spec!r} is not a package specification: {error}") from None


def _read_lock(path: Path) -> list[rattler.RepoDataRecord]:
    """Read the packages of the environment ``default`` from a lock file of rattler's or pixi's."""
    import rattler

    lock = rattler.LockFile.from_path(path)
    platform = next((each for each in lock.platforms() if each.name == PLATFORMS[0]), None)
    environment = lock.environment("default")
    if platform is None or environment is None:
        raise ValueError(f"{path.name} has no environment `default` for {PLATFORMS[0]}.")
    others = environment.pypi_packages_for_platform(platform) or []
    if others:
        raise ValueError(
            f"{path.name} holds packages of PyPI ({others[0].name}, ...): name them in a requirements.txt."
        )
    return list(environment.conda_repodata_records_for_platform(platform) or [])


async def _read_explicit(urls: list[str], gateway: rattler.Gateway) -> list[rattler.RepoDataRecord]:
    """Read the packages of a conda ``@EXPLICIT`` list, ``URL#HASH``; each is downloaded and read."""
    import rattler

    records = []
    for line in urls:
        url, _, digest = line.partition("#")
        digest = digest.removeprefix("sha256:").removeprefix("md5:")
        kind = {64: "sha256", 32: "md5"}.get(len(digest))
        name = url.rpartition("/")[2].rsplit("-", 2)[0]
        check = f",{kind}={digest}" if kind else ""  # in the URL itself it would be dropped silently
        spec = rattler.MatchSpec(f'{name}[url="{url}"{check}]')
        [[record]] = await gateway.query([], PLATFORMS, [spec], recursive=False)
        records.append(record)
    return records


def check_cached(urls: list[str], cache: Path) -> None:
    """Refuse packages that would have to be downloaded; rattler's cache has a folder for each that it has.

    Raises:
        ValueError: one is neither on this machine nor in the cache.
    """
    for url in urls:
        name = url.rpartition("/")[2].removesuffix(".conda").removesuffix(".tar.bz2")
        if not url.startswith(("file://", "/")) and not (cache / "pkgs" / name / "info").is_dir():
            raise ValueError(f"{url} is not in rattler's cache, and --offline downloads nothing.")


def check_local(records: list[rattler.RepoDataRecord]) -> None:
    """Check the packages of ``file://`` channels, whose hashes rattler does not check.

    Raises:
        ValueError: one is not what its channel says.
    """
    for record in records:
        kind, expected = ("sha256", record.sha256) if record.sha256 else ("md5", record.md5)
        if record.url.startswith("file://") and expected:
            path = Path(urllib.request.url2pathname(record.url.removeprefix("file://")))
            with path.open("rb") as file:
                if hashlib.file_digest(file, kind).digest() != expected:
                    raise ValueError(f"{path} is not what its channel says: its {kind} differs.")


if __name__ == "__main__":
    main(json.load(sys.stdin))
