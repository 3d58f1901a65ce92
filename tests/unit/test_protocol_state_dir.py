"""State directories: one process at a time, files old or new and never half."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.errors import ConfigError, StateLocked
from protocol.state_dir import locked, write_atomically

_HOLD = """
import sys
from pathlib import Path
from protocol.state_dir import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `path` until its input ends or it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def test_the_directory_is_made_private_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with locked(path) as held:
        assert held == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert (path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_second_holder_is_refused_with_the_pid_and_the_lock_goes_with_kill_minus_nine(
    tmp_path: Path,
) -> None:
    with holder(tmp_path) as child:
        with (
            pytest.raises(StateLocked, match=f"in use by process {child.pid}: "),
            locked(tmp_path),
        ):
            raise AssertionError("held twice")
        child.kill()
        child.wait()
        with locked(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_the_lock_is_exclusive_within_one_process_too_and_free_after_the_block(
    tmp_path: Path,
) -> None:
    with locked(tmp_path), pytest.raises(StateLocked), locked(tmp_path):
        raise AssertionError("held twice")
    with locked(tmp_path):
        pass


def test_an_error_in_the_block_frees_the_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        pass


def test_a_refused_holder_leaves_the_pid_of_the_first_alone(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(StateLocked), locked(tmp_path):
            raise AssertionError("held twice")
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_shorter_pid_overwrites_a_longer_one_whole(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("123456789012345\n")
    with locked(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_file_in_place_of_the_directory_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ConfigError, match="cannot be used as a state directory"), locked(path):
        raise AssertionError("a file was locked as a directory")


def test_a_file_is_written_and_replaced_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for data in (b"old", b"new and longer", b""):
        write_atomically(path, data)
        assert path.read_bytes() == data
        assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_interrupt_in_mid_write_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "model", b"new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_before_the_end_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "model"
    write_atomically(path, b"old")

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, disk_full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
