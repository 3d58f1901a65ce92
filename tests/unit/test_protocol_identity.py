"""Key files: secret, made once, never replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from protocol import identity
from protocol.errors import ConfigError
from protocol.identity import Identity, load, load_or_create


def test_a_key_is_made_on_first_use_and_is_the_same_ever_after(tmp_path: Path) -> None:
    path = tmp_path / "island.key"
    made = load_or_create(path)
    before = path.read_bytes()
    assert load_or_create(path).island == made.island == load(path).island
    assert path.read_bytes() == before


def test_two_keys_are_two_islands(tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "a").island != load_or_create(tmp_path / "b").island


def test_only_its_owner_may_read_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "island.key"
    load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "island.key"
    identity.create(path, b"1" * 32)
    with pytest.raises(FileExistsError):
        identity.create(path, b"2" * 32)
    assert load(path).island == Identity(b"1" * 32).island
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "abc", "z" * 64, "a" * 62, "a" * 66, "ab cd"])
def test_a_damaged_key_is_an_error_that_names_the_file_and_keeps_it(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "island.key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"island\.key: not a key file"):
        load_or_create(path)
    assert path.read_text() == text


@pytest.mark.parametrize("data", [b"\xff\xfe" * 32, b"a" * 63 + b"\xff", b"\0" * 64])
def test_a_key_file_that_is_no_text_is_damaged_and_kept(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "island.key"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"island\.key: not a key file"):
        load_or_create(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("failing", ["fsync", "link"])
def test_a_failure_while_a_key_is_made_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "island.key"

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, disk_full)
        with pytest.raises(OSError, match="No space left"):
            identity.create(path, b"1" * 32)
    assert list(tmp_path.iterdir()) == []
    assert load_or_create(path).island == load(path).island
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_key_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.key")


def test_equal_secrets_sign_equally() -> None:
    one, same = Identity(b"1" * 32), Identity(b"1" * 32)
    assert one.sign("ready", b"x") == same.sign("ready", b"x")
    assert len(one.island) == 32


def test_the_short_form_is_eight_hex_digits() -> None:
    assert identity.short(bytes(range(32))) == "00010203"
