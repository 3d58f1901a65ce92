"""The seeded global order of training samples: position -> sample, in constant memory.

Every epoch is a pseudo-random permutation of the samples: a Feistel network over the smallest even
number of bits that holds them, walked on until it lands inside (format-preserving encryption; Black and
Rogaway 2002). Integer arithmetic only, so every machine and NumPy version computes the same order, and
any island can start at any position.

Invariant: position -> sample is a bijection on each run of `samples` positions that starts at a
multiple of `samples`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

FEISTEL_ROUNDS = 6


def sample_at(position: npt.ArrayLike, samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Sample numbers at one position or an array of them, in the shape of `position`."""
    positions = np.asarray(position, np.uint64)
    epoch, place = np.divmod(positions.reshape(-1), np.uint64(samples))
    keys = _mix(_mix(np.full_like(epoch, seed)) ^ epoch)
    half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    found = _feistel(place, keys, half_bits)
    while (outside := found >= samples).any():
        found[outside] = _feistel(found[outside], keys[outside], half_bits)
    return found.astype(np.int64).reshape(positions.shape)


def _feistel(values: Words, keys: Words, half_bits: int) -> Words:
    """A keyed bijection on numbers of `2 * half_bits` bits."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in _round_keys(keys):
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _round_keys(keys: Words) -> Iterator[Words]:
    for number in range(FEISTEL_ROUNDS):
        yield _mix(keys + np.uint64(number))


def _mix(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit moves every other."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
