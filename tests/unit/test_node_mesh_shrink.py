"""A mesh on fewer devices: compared with every mesh there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.mesh import AXES, Mesh, shrink
from protocol.errors import ConfigError

SIZES = st.integers(1, 12)
MESHES = st.builds(Mesh, replicate=SIZES, shard=SIZES) | st.builds(
    Mesh,
    replicate=SIZES,
    shard=SIZES,
    pipeline=st.integers(1, 3),
    context=st.integers(1, 3),
    expert=st.integers(1, 3),
    tensor=st.integers(1, 3),
)
FIXED = [axis for axis in AXES if axis not in ("replicate", "shard")]


def choices(mesh: Mesh, ranks: int) -> list[Mesh]:
    """All that fit and cut the batch as evenly as `mesh` does."""
    return [
        mesh.model_copy(update={"replicate": replicate, "shard": shard})
        for replicate, shard in itertools.product(range(1, 13), repeat=2)
        if mesh.replicate % replicate == 0
        and mesh.shard % shard == 0
        and mesh.ranks // (mesh.replicate * mesh.shard) * replicate * shard <= ranks
    ]


@given(MESHES, st.integers(0, 200))
def test_a_mesh_shrinks_to_the_largest_that_fits_and_shards_the_most(
    mesh: Mesh, ranks: int
) -> None:
    possible = choices(mesh, ranks)
    if not possible:
        with pytest.raises(ConfigError, match=rf"^island\.mesh: {mesh} does not fit on {ranks}"):
            shrink(mesh, ranks)
        return
    assert shrink(mesh, ranks) == max(possible, key=lambda m: (m.ranks, m.shard))


@given(MESHES, st.integers(1, 200))
def test_only_replicate_and_shard_shrink_and_batches_still_divide(mesh: Mesh, ranks: int) -> None:
    fixed = mesh.ranks // (mesh.replicate * mesh.shard)
    if fixed > ranks:
        return
    smaller = shrink(mesh, ranks)
    assert smaller.ranks <= ranks
    assert all(getattr(smaller, axis) == getattr(mesh, axis) for axis in FIXED)
    assert mesh.batch_shards % smaller.batch_shards == 0


@given(MESHES, st.integers(0, 20))
def test_a_mesh_that_fits_stays_as_it_is(mesh: Mesh, spare: int) -> None:
    assert shrink(mesh, mesh.ranks + spare) == mesh


@given(MESHES, st.integers(1, 200), st.integers(1, 200))
def test_devices_lost_one_after_another_leave_what_is_left_of_all_at_once_or_less(
    mesh: Mesh, first: int, then: int
) -> None:
    fixed = mesh.ranks // (mesh.replicate * mesh.shard)
    if fixed > min(first, then):
        return
    assert shrink(shrink(mesh, first), then).ranks <= shrink(mesh, min(first, then)).ranks
