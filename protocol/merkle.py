"""Binary Merkle trees over BLAKE3: one 32-byte root stands for any number of cells.

A leaf is BLAKE3(0 ‖ content), a node BLAKE3(1 ‖ left ‖ right); an odd node at the end of a level is
promoted unchanged. A range proof lets the owner of a part check its leaves against the root of the
whole without the other leaves.

Invariants: `verify_range(root, n, start, leaves, prove_range(all_leaves, start, len(leaves)))` holds
exactly for the leaves that stand in the tree at that place.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

DIGEST_BYTES = 32


def digest(data: bytes | memoryview) -> bytes:
    return blake3(data).digest()


def leaf(content: bytes) -> bytes:
    return blake3(b"\0" + content).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return blake3(b"\1" + left + right).digest()


def _parents(level: Sequence[bytes]) -> list[bytes]:
    pairs = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return pairs + [level[-1]] if len(level) % 2 else pairs


def root(leaves: Sequence[bytes]) -> bytes:
    """Root over at least one leaf."""
    if not leaves:
        raise ValueError("a Merkle tree needs at least one leaf")
    level = list(leaves)
    while len(level) > 1:
        level = _parents(level)
    return level[0]


def prove_range(leaves: Sequence[bytes], start: int, count: int) -> list[bytes]:
    """Siblings needed to lift `leaves[start:start+count]` to the root, lowest level first."""
    if count < 1 or start < 0 or start + count > len(leaves):
        raise ValueError(f"leaves {start}..{start + count} are not in a tree of {len(leaves)}")
    level, stop, proof = list(leaves), start + count, []
    while len(level) > 1:
        if start % 2:
            proof.append(level[start - 1])
        if stop % 2 and stop < len(level):
            proof.append(level[stop])
        level, start, stop = _parents(level), start // 2, (stop + 1) // 2
    return proof


def verify_range(
    expected: bytes, total: int, start: int, leaves: Sequence[bytes], proof: Sequence[bytes]
) -> bool:
    """True iff `leaves` stand at `start` in the tree of `total` leaves whose root is `expected`."""
    stop, known, rest = start + len(leaves), list(leaves), list(proof)
    if not known or start < 0 or stop > total:
        return False
    while total > 1:
        if start % 2:
            if not rest:
                return False
            known.insert(0, rest.pop(0))
            start -= 1
        if stop % 2 and stop < total:
            if not rest:
                return False
            known.append(rest.pop(0))
            stop += 1
        known = _parents(known)
        start, stop, total = start // 2, (stop + 1) // 2, (total + 1) // 2
    return not rest and known[0] == expected
