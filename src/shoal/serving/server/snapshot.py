"""Snapshot of a repository: a service runs on it, whatever happens to the folder that it was taken of.

Files of up to 1 MiB are copied. Larger ones are hard links, which take neither time nor space, and share their content
with the repository's files. ``shoal compose`` writes new files and renames their folder, which does not change a link.
A large file that is written in place changes for the service too. This is accepted, because a copy of all weights could
take minutes, and needs as much space again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.authoring.repository.config import CONFIG
from shoal.errors import SetupError, ShoalError
from shoal.serving.server.orphans import Lease, find_folders, make_folder, watch
from shoal.system.files import copy_file, read_bytes, read_json
from shoal.system.paths import lock
from shoal.system.processes import find_process

SMALL = 2**20  # bytes of a file that is copied, even if it could be linked
_ROOM = 4  # where large files cannot be linked, their copies may take a quarter of the free space
_RECORD = "service.json"


@dataclass(frozen=True)
class Snapshot:
    """Copy of ``repository`` in ``folder``, with symbolic links in place of the files ``shared``.

    ``own`` is the temporary folder of the service.
    """

    repository: Path
    folder: Path
    shared: list[Path]
    own: Path

    def show(self, text: str) -> str:
        """Return a text, such as a line of Triton's log, with the repository's path in place of the copy's."""
        return text.replace(str(self.folder), str(self.repository))

    def announce(self, url: str) -> None:
        """Let ``find_services`` find the service, which answers at ``url``."""
        (self.own / _RECORD).write_text(json.dumps([str(self.repository), url]), encoding="utf-8")


@contextmanager
def take_snapshot(repository: Path) -> Iterator[Snapshot]:
    """Copy ``repository``, an absolute path without symbolic links. The copy is removed at the end, or after a kill.

    Errors of what runs on the copy get the repository's path.

    Raises:
        SetupError: no temporary folder can be created, or the disk is full.
    """
    own = make_folder()
    lease, watcher = Lease(own), watch(own)
    try:
        snapshot = _take(repository, own, lease)
        with lock(own, f"{own} is in use.", "Try again."):  # or systemd-tmpfiles removes old files
            try:
                yield snapshot
            except ShoalError as error:
                raise type(error)(snapshot.show(error.what), snapshot.show(error.fix)) from error
    finally:
        lease.end()
        watcher.kill()
        watcher.communicate()


def find_services(repository: Path) -> list[tuple[int, str]]:
    """Return the process id and the URL of each running service that this user started on ``repository``."""
    found = []
    for folder in find_folders():
        pid = int(folder.name.split("-")[1])
        with suppress(OSError, ValueError):
            served, url = read_json(folder / _RECORD)
            if served == str(repository) and (process := find_process(pid)) and not process.is_ended:
                found.append((pid, url))
    return found


def _take(repository: Path, own: Path, lease: Lease) -> Snapshot:
    """Copy a repository to ``own``, the user's cache, or beside it: the first where large files can be linked."""
    files = (path for path in repository.rglob("*") if path.is_file() and not path.is_symlink())
    large = {path: size for path in files if (size := path.stat().st_size) > SMALL}
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '')}/.cache"
    places = [own, Path(cache, f".{own.name}"), repository.parent / f".{own.name}"]
    lease.note(map(str, places[1:]))  # before they are made, so that they are removed after a kill
    place = next((each for each in places if large and _can_link(next(iter(large)), each)), own)
    folder = place / "files" / repository.name
    folder.parent.mkdir()
    with suppress(OSError):  # paths that leave the repository, such as ../../data, lead where they did
        for entry in repository.parent.iterdir():
            if entry not in (repository, place):
                (folder.parent / entry.name).symlink_to(entry)
    has_room = sum(large.values()) * _ROOM < shutil.disk_usage(place).free
    try:
        return Snapshot(repository, folder, _copy(repository, folder, sys.maxsize if has_room else SMALL), own)
    except OSError as error:
        raise SetupError(f"{repository} cannot be copied: {error}.", "Name another place: TMPDIR=...") from None


def _can_link(file: Path, place: Path) -> bool:
    with suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        os.link(file, place / "probe")
        return True
    return False


def _copy(repository: Path, folder: Path, most: int) -> list[Path]:
    """Copy a repository. Return the files, such as those of over ``most`` bytes, to which the copy has symbolic links.

    Pipes and the like are left out.
    """
    shared = []
    for place, folders, names in os.walk(repository):
        at = folder / os.path.relpath(place, repository)
        at.mkdir()
        for source in (Path(place, name) for name in (*folders, *names)):
            target = at / source.name
            if source.is_symlink():
                goal = Path(os.path.realpath(source))
                target.symlink_to(os.path.relpath(goal, place) if goal.is_relative_to(repository) else goal)
            elif source.is_file() and not _copy_file(source, target, most, (repository, folder)):
                target.unlink(missing_ok=True)
                target.symlink_to(source)
                shared.append(source)
    return shared


def _copy_file(source: Path, target: Path, most: int, places: tuple[Path, Path]) -> bool:
    """Copy a small file, link a large one, or else copy it if it has at most ``most`` bytes; return if this was done.

    Paths into the repository in a config.pbtxt, such as that of an environment, become paths into the copy.
    """
    size = source.stat().st_size
    if size > SMALL:
        with suppress(OSError):
            os.link(source, target)
            return True
    if size > most:
        return False
    with suppress(OSError):  # this user may not read it, or the disk is full
        copy_file(source, target)
        if source.name == CONFIG:
            old, new = (f"{place}/".encode() for place in places)
            target.write_bytes(read_bytes(target).replace(old, new))
        shutil.copystat(source, target)  # the stub of an environment is executable
        return True
    return False
