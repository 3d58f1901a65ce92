"""A contribution: encoded once, fixed by its root, with the norms of what others will decode."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from blake3 import blake3

from node.contribution import (
    LEAF_BYTES,
    Contribution,
    leaf_content,
    make_contribution,
    split_leaf,
)
from outer_optimizer.codec import codec_for
from outer_optimizer.finite import NonFinite
from outer_optimizer.transform import FloatArray
from protocol.layout import Fragment, TensorLayout, build_layout
from protocol.merkle import leaf, prove_range, root, verify_range

TENSORS = (
    TensorLayout("small", (3,), "float32"),
    TensorLayout("large", (5_000,), "float32"),
    TensorLayout("scale", (), "float32"),
    TensorLayout("other", (40, 200), "float32"),
    TensorLayout("bias", (7,), "float32"),
)
CODECS = ["fp32", "bf16", "int8"]


def make_fragment() -> Fragment:
    return build_layout(TENSORS, 1, 4_096, 2).fragments[0]


def values(seed: int) -> FloatArray:
    count = make_fragment().values
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def contribution(
    codec: str = "int8", anchor: FloatArray | None = None, local: FloatArray | None = None
) -> Contribution:
    anchor = values(1) if anchor is None else anchor
    local = values(2) if local is None else local
    return make_contribution(0, make_fragment(), codec_for(codec), anchor, local, (500, 5))


def decoded(made: Contribution, codec: str) -> FloatArray:
    """What an owner sees, in the order of the fragment's flat vector."""
    out = np.empty(make_fragment().values, np.float32)
    for cell, data in zip(make_fragment().cells, made.cells, strict=True):
        codec_for(codec).decode(data, cell.lengths, out[cell.start : cell.start + cell.values])
    return out


def test_the_difference_of_anchor_and_local_is_what_travels() -> None:
    made = contribution("fp32")
    assert np.array_equal(decoded(made, "fp32"), values(1) - values(2))
    assert (made.fragment, made.tokens, made.steps) == (0, 500, 5)


@pytest.mark.parametrize("codec", CODECS)
def test_the_root_is_merkle_over_digest_and_norm_of_every_cell(codec: str) -> None:
    made = contribution(codec)
    cells = make_fragment().cells
    assert len(made.cells) == len(cells) > 3
    seen = decoded(made, codec).astype(np.float64)
    leaves = []
    for cell, data in zip(cells, made.cells, strict=True):
        assert len(data) == codec_for(codec).encoded_bytes(cell.lengths)
        norm = float(np.sum(seen[cell.start : cell.start + cell.values] ** 2))
        (told,) = struct.unpack("<d", made.leaf_contents[len(leaves)][32:])
        assert told == pytest.approx(norm, rel=1e-12)
        leaves.append(leaf(blake3(data).digest() + struct.pack("<d", told)))
    assert made.leaves == leaves
    assert made.root == root(leaves)


@pytest.mark.parametrize("codec", CODECS)
def test_norms_are_those_of_the_decoded_tensors_in_layout_order(codec: str) -> None:
    made, fragment = contribution(codec), make_fragment()
    seen = decoded(made, codec).astype(np.float64)
    expected = [
        float(np.sum(seen[offset : offset + tensor.values] ** 2))
        for tensor, offset in zip(fragment.tensors, fragment.offsets, strict=True)
    ]
    assert made.squared_norms == pytest.approx(expected, rel=1e-12)
    cells = [split_leaf(content)[1] for content in made.leaf_contents]
    assert sum(cells) == pytest.approx(sum(expected), rel=1e-12)


def test_equal_work_gives_an_equal_root_and_any_other_another() -> None:
    first = contribution()
    assert contribution().root == first.root
    local = values(2)
    local[4_099] += 1
    assert contribution(local=local).root != first.root
    assert contribution("bf16").root != first.root


def test_counts_are_no_part_of_the_root() -> None:
    made = make_contribution(3, make_fragment(), codec_for("int8"), values(1), values(2), (7, 1))
    assert made.root == contribution().root


def test_the_leaves_of_a_part_prove_themselves_against_the_root() -> None:
    made = contribution()
    proof = prove_range(made.leaves, 1, 2)
    part = [leaf(content) for content in made.leaf_contents[1:3]]
    assert verify_range(made.root, len(made.cells), 1, part, proof)
    louder = leaf_content(made.cells[1], split_leaf(made.leaf_contents[1])[1] * 2)
    assert not verify_range(made.root, len(made.cells), 1, [leaf(louder), part[1]], proof)


def test_a_leaf_is_a_digest_and_a_norm() -> None:
    content = leaf_content(b"cell", 2.5)
    assert len(content) == LEAF_BYTES == 40
    assert split_leaf(content) == (blake3(b"cell").digest(), 2.5)
    assert leaf_content(memoryview(b"cell"), 2.5) == content


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS)
def test_work_that_is_not_finite_is_refused(bad: float, codec: str) -> None:
    local = values(2)
    local[-1] = bad
    with pytest.raises(NonFinite):
        contribution(codec, local=local)


def test_a_difference_that_overflows_is_refused() -> None:
    anchor, local = values(1), values(2)
    anchor[0], local[0] = 3e38, -3e38
    with pytest.raises(NonFinite):
        contribution(anchor=anchor, local=local)


def test_no_work_at_all_is_a_contribution_of_zeros() -> None:
    made = contribution(local=values(1))
    assert made.squared_norms == (0.0,) * len(TENSORS)
    assert not decoded(made, "int8").any()


def test_a_bf16_tensor_that_nobody_trained_contributes_zeros() -> None:
    tensors = [
        TensorLayout("wide", (5_000,), "float32"),
        TensorLayout("narrow", (70, 70), "bfloat16"),
    ]
    fragment = build_layout(tensors, 1, 4_096, 2).fragments[0]
    anchor = np.random.default_rng(0).standard_normal(fragment.values).astype(np.float32)
    local = anchor.copy()
    narrow = slice(fragment.offsets[1], fragment.offsets[1] + 4_900)
    local[narrow] = torch.from_numpy(anchor[narrow].copy()).bfloat16().float().numpy()
    made = make_contribution(0, fragment, codec_for("fp32"), anchor, local, (1, 1))
    assert made.squared_norms == (0.0, 0.0)
