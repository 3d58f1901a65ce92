"""Merkle trees: range proofs hold for the true leaves at the true place, and for nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from protocol import merkle

leaf_lists = st.lists(st.binary(max_size=8), min_size=1, max_size=40)


@given(leaf_lists, st.data())
def test_every_range_proves_itself(contents: list[bytes], data: st.DataObject) -> None:
    leaves = [merkle.leaf(c) for c in contents]
    start = data.draw(st.integers(0, len(leaves) - 1))
    count = data.draw(st.integers(1, len(leaves) - start))
    proof = merkle.prove_range(leaves, start, count)
    part = leaves[start : start + count]
    assert merkle.verify_range(merkle.root(leaves), len(leaves), start, part, proof)


@given(leaf_lists, st.data())
def test_a_changed_leaf_is_refused(contents: list[bytes], data: st.DataObject) -> None:
    leaves = [merkle.leaf(c) for c in contents]
    start = data.draw(st.integers(0, len(leaves) - 1))
    count = data.draw(st.integers(1, len(leaves) - start))
    proof = merkle.prove_range(leaves, start, count)
    part = leaves[start : start + count]
    part[data.draw(st.integers(0, count - 1))] = merkle.leaf(b"another, longer than any")
    assert not merkle.verify_range(merkle.root(leaves), len(leaves), start, part, proof)


@given(leaf_lists, st.data())
def test_true_leaves_at_another_place_are_refused(
    contents: list[bytes], data: st.DataObject
) -> None:
    leaves = [merkle.leaf(bytes([i]) + c) for i, c in enumerate(contents)]
    start = data.draw(st.integers(0, len(leaves) - 1))
    other = data.draw(
        st.integers(0, len(leaves) - 1).filter(lambda i: i != start)
        if len(leaves) > 1
        else st.just(-1)
    )
    proof = merkle.prove_range(leaves, start, 1)
    assert not merkle.verify_range(merkle.root(leaves), len(leaves), other, [leaves[start]], proof)


def test_leaf_and_node_hashes_cannot_be_confused() -> None:
    a, b = merkle.leaf(b"a"), merkle.leaf(b"b")
    assert merkle.root([a, b]) != merkle.leaf(a + b)


def test_an_odd_leaf_is_promoted_not_doubled() -> None:
    leaves = [merkle.leaf(bytes([i])) for i in range(3)]
    assert merkle.root(leaves) != merkle.root([*leaves, leaves[2]])
