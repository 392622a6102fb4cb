"""A folder is whole or not there, whatever dies and whoever else is building it."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from cloud_verifier.drafts.cache import build_folder, file_lock
from shared.faults import FaultKind, SpecwireError


def is_whole(folder: Path) -> bool:
    return (folder / "done").is_file()


def build(folder: Path) -> None:
    (folder / "done").write_text("yes")


def test_builds_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def counting(folder: Path) -> None:
        calls.append(folder)
        build(folder)

    final = tmp_path / "deep" / "model"
    assert build_folder(final, is_whole, counting) == final
    assert build_folder(final, is_whole, counting) == final
    assert is_whole(final)
    assert len(calls) == 1


def test_a_builder_that_dies_leaves_nothing(tmp_path: Path) -> None:
    final = tmp_path / "model"

    def dying(folder: Path) -> None:
        build(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_folder(final, is_whole, dying)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_leftovers_of_a_killed_process_are_not_used(tmp_path: Path) -> None:
    """A process that was killed could clean up neither its partial folder nor a broken final one."""
    final, partial = tmp_path / "model", tmp_path / ".model.partial"
    for folder in (final, partial):
        folder.mkdir()
        (folder / "half").write_text("x")
    build_folder(final, is_whole, build)
    assert [path.name for path in final.iterdir()] == ["done"]


def test_a_build_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecwireError, match="not whole"):
        build_folder(tmp_path / "model", is_whole, lambda folder: None)
    assert not (tmp_path / "model").exists()


def test_the_second_builder_waits_and_finds_it_done(tmp_path: Path) -> None:
    final = tmp_path / "model"
    started, go_on, waiting = threading.Event(), threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        started.set()
        assert go_on.wait(30)
        build(folder)

    def never(folder: Path) -> None:
        raise AssertionError("built twice")

    def progress(description: str, fraction: float | None) -> None:
        assert "another process" in description
        assert fraction is None
        waiting.set()

    first = threading.Thread(target=build_folder, args=(final, is_whole, slow))
    second = threading.Thread(target=build_folder, args=(final, is_whole, never, progress))
    first.start()
    assert started.wait(30)
    second.start()
    assert waiting.wait(30)
    assert not final.exists()
    go_on.set()
    first.join(30)
    second.join(30)
    assert is_whole(final)


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "lock"):
            raise ZeroDivisionError


@pytest.mark.parametrize(("code", "text"), [(errno.ENOSPC, "is full"), (errno.EACCES, "cannot be used")])
def test_the_disk_is_named(tmp_path: Path, code: int, text: str) -> None:
    def failing(folder: Path) -> None:
        raise OSError(code, "reason")

    with pytest.raises(SpecwireError, match=text) as caught:
        build_folder(tmp_path / "model", is_whole, failing)
    assert caught.value.kind is FaultKind.UNAVAILABLE
    assert str(tmp_path) in caught.value.text
