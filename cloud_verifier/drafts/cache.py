"""Folders that are either whole or not there: the cache, the lock, build-then-rename."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.faults import FaultKind, SpecwireError

# (what is being done, how far in [0, 1] or None when nobody can tell)
Progress = Callable[[str, float | None], None]

_LOCK_POLL_S = 0.2


def no_progress(description: str, fraction: float | None) -> None:
    """The callback for callers that show nothing."""


def build_folder(
    final: Path,
    is_whole: Callable[[Path], bool],
    build: Callable[[Path], None],
    progress: Progress = no_progress,
) -> Path:
    """Return `final`, building it first unless it is whole already.

    `build` fills a temporary sibling, which is renamed when `is_whole` says so; a process that dies
    half-way leaves nothing under the final name. A second process that wants the same folder waits
    on a lock file beside it and then finds it finished.

    Raises:
        SpecwireError: UNAVAILABLE when the disk is full or the directory cannot be written.
    """
    if is_whole(final):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(final.with_name(f".{final.name}.lock"), progress):
            if is_whole(final):
                return final
            temporary = final.with_name(f".{final.name}.partial")
            # A leftover of a process that died; the lock says that nobody is using it.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                build(temporary)
                if not is_whole(temporary):
                    raise SpecwireError(FaultKind.INTERNAL, f"What was built for {final} is not whole.")
                if final.exists():
                    shutil.rmtree(final)
                temporary.rename(final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, final.parent) from error
    return final


def disk_error(error: OSError, folder: Path) -> SpecwireError:
    """The typed form of an error of the file system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpecwireError(
            FaultKind.UNAVAILABLE,
            f"The disk that holds {folder} is full.",
            "Free some space, or choose another place with SPECWIRE_CACHE or --out.",
        )
    return SpecwireError(
        FaultKind.UNAVAILABLE,
        f"{folder} cannot be used: {error.strerror or error}.",
        "Check that it can be written, or choose another place with SPECWIRE_CACHE or --out.",
    )


@contextlib.contextmanager
def file_lock(path: Path, progress: Progress = no_progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; waits for the holder, whose death frees it."""
    with path.open("a+b") as stream:
        waited = False
        while not _try_lock(stream.fileno()):
            if not waited:
                progress("Waiting for another process that prepares the same model", None)
                waited = True
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            _unlock(stream.fileno())


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
