from __future__ import annotations

import os

import pytest

from node.shared_buffer import SharedBuffer


def test_two_mappings_see_the_same_values() -> None:
    ours = SharedBuffer.create("test", 1_000)
    theirs = SharedBuffer.open(os.dup(ours.fd), 1_000)
    assert not theirs.values.any()
    ours.values[7] = 3.5
    assert theirs.values[7] == 3.5
    ours.close()
    assert theirs.values[7] == 3.5
    theirs.close()


def test_a_wrong_size_is_refused() -> None:
    buffer = SharedBuffer.create("test", 10)
    with pytest.raises(ValueError, match="40 bytes does not hold 11"):
        SharedBuffer.open(buffer.fd, 11)
    buffer.close()


def test_nobody_can_shrink_it() -> None:
    buffer = SharedBuffer.create("test", 10)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    buffer.close()


def test_close_gives_the_descriptor_back_and_may_be_repeated() -> None:
    buffer = SharedBuffer.create("test", 10)
    fd = buffer.fd
    buffer.close()
    buffer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
