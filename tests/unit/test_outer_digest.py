"""Digests see every bit and nothing else."""

import struct

import numpy as np
from blake3 import blake3

from outer_optimizer.digest import state_digest


def test_the_state_digest_is_that_of_the_little_endian_bytes_in_order() -> None:
    anchor, first, second = (np.array(pair, np.float32) for pair in ((1, 2), (3, 4), (5, 6)))
    expected = blake3(struct.pack("<6f", 1, 2, 3, 4, 5, 6)).digest()
    assert state_digest(anchor, (first, second)) == expected
    assert state_digest(anchor, (second, first)) != expected


def test_a_view_of_a_cell_has_the_digest_of_its_copy() -> None:
    whole = np.arange(10, dtype=np.float32)
    assert state_digest(whole[2:5], ()) == state_digest(whole[2:5].copy(), ())
    assert state_digest(whole[::2], ()) == state_digest(whole[::2].copy(), ())


def test_equal_values_with_other_bits_have_another_digest() -> None:
    assert state_digest(np.array([0.0], np.float32), ()) != state_digest(
        np.array([-0.0], np.float32), ()
    )
