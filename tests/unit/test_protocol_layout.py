"""Fragments tile the tensors, cells tile the fragment, parts tile the cells: for any sizes and weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.layout import (
    Fragment,
    TensorLayout,
    build_layout,
    default_cell_values,
    first_difference,
)
from protocol.messages import IslandId
from protocol.partition import assign_parts

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 5)),
    st.tuples(st.integers(1, 40_000)),
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
)
models = st.lists(shapes, min_size=1, max_size=20).map(
    lambda many: [TensorLayout(f"t{i}", shape, "float32") for i, shape in enumerate(many)]
)


def covered(fragment: Fragment) -> list[int]:
    return [v for cell in fragment.cells for v in range(cell.start, cell.start + cell.values)]


@given(models, st.integers(1, 4), st.sampled_from([None, 4_096, 8_192]), st.integers(1, 8))
def test_cells_and_segments_tile_the_fragment_exactly(
    tensors: list[TensorLayout], fragments: int, cell_values: int | None, islands: int
) -> None:
    try:
        layout = build_layout(tensors, fragments, cell_values, islands)
    except ConfigError:
        return
    assert [t for f in layout.fragments for t in f.tensors] == tensors
    for fragment in layout.fragments:
        assert covered(fragment) == list(range(fragment.values))
        per_tensor = [0] * len(fragment.tensors)
        for cell in fragment.cells:
            assert cell.values <= (cell_values or 1 << 18)
            for tensor, values in cell.segments:
                place = fragment.offsets[tensor] + per_tensor[tensor]
                assert cell.start <= place
                assert place + values <= cell.start + cell.values
                per_tensor[tensor] += values
        assert per_tensor == [t.values for t in fragment.tensors]


def test_a_large_tensor_has_cells_of_its_own() -> None:
    tensors = [TensorLayout("small", (10,), "float32"), TensorLayout("large", (5_000,), "float32")]
    fragment = build_layout(tensors, 1, 4_096, 1).fragments[0]
    assert fragment.offsets == (5_000, 0)
    assert [[s.tensor for s in cell.segments] for cell in fragment.cells] == [[1], [1], [0]]


def test_a_scalar_and_an_empty_tensor_have_their_places() -> None:
    tensors = [TensorLayout("scalar", (), "float32"), TensorLayout("none", (0, 3), "float32")]
    fragment = build_layout(tensors, 1, None, 2).fragments[0]
    assert fragment.values == 1
    assert fragment.cells[0].segments == ((0, 1),)


def test_more_fragments_than_the_model_can_be_cut_into_name_the_key() -> None:
    with pytest.raises(ConfigError, match=r"outer\.fragments = 3"):
        build_layout([TensorLayout("only", (10,), "float32")], 3, None, 1)


def test_cell_size_gives_each_owner_about_eight_cells() -> None:
    assert default_cell_values(839_936, 4) == 24_576
    assert default_cell_values(100, 4) == 4_096
    assert default_cell_values(10**10, 4) == 262_144


def test_first_difference_names_parameter_shape_and_dtype() -> None:
    mine = [TensorLayout("w", (2, 3), "float32")]
    run = [TensorLayout("w", (3, 2), "float32")]
    assert first_difference(mine, run) == (
        "parameter 0: this model has w [2, 3] float32, the run has w [3, 2] float32"
    )
    assert first_difference(run, run) is None
    assert first_difference(run, []) == "this model has w [3, 2] float32, which the run lacks"
    assert first_difference([], run) == "parameter 0: this model lacks w [3, 2] float32"


def test_first_difference_does_not_mind_the_order() -> None:
    run = [TensorLayout(name, (2,), "float32") for name in "abc"]
    assert first_difference(run[::-1], run) is None
    assert first_difference([*run[:2], TensorLayout("d", (2,), "float32")], run) == (
        "parameter 2: this model has d [2] float32, the run has c [2] float32"
    )


islands = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20, unique=True)


@given(
    st.lists(st.integers(1, 1 << 18), min_size=1, max_size=200),
    islands,
    st.data(),
)
def test_parts_tile_the_cells_for_any_sizes_and_rates(
    sizes: list[int], ids: list[bytes], data: st.DataObject
) -> None:
    rates = {IslandId(i): data.draw(st.floats(0, 1e12)) for i in ids}
    parts = assign_parts(sizes, rates)
    assert [c for p in parts for c in range(p.first_cell, p.stop_cell)] == list(range(len(sizes)))
    assert all(p.cells > 0 for p in parts)
    assert len({p.owner for p in parts}) == len(parts) <= 16
    assert {p.owner for p in parts} <= rates.keys()


@given(st.lists(st.integers(1, 100), min_size=64, max_size=200), st.integers(2, 8))
def test_equal_rates_give_parts_that_differ_by_at_most_a_few_cells(
    sizes: list[int], n: int
) -> None:
    parts = assign_parts(sizes, {IslandId(bytes([i]) * 32): 1.0 for i in range(n)})
    loads = [sum(sizes[p.first_cell : p.stop_cell]) for p in parts]
    assert max(loads) - min(loads) <= 2 * max(sizes)


def test_a_faster_owner_gets_more() -> None:
    slow, fast = IslandId(b"a" * 32), IslandId(b"b" * 32)
    parts = {p.owner: p.cells for p in assign_parts([10] * 100, {slow: 1.0, fast: 3.0})}
    assert parts == {slow: 25, fast: 75}


def test_ownership_stays_unless_moving_gains_a_tenth() -> None:
    a, b = IslandId(b"a" * 32), IslandId(b"b" * 32)
    before = assign_parts([10] * 100, {a: 1.0, b: 1.0})
    assert assign_parts([10] * 100, {a: 1.0, b: 1.1}, before) == before
    assert assign_parts([10] * 100, {a: 1.0, b: 3.0}, before) != before


def test_an_owner_that_is_gone_loses_its_part() -> None:
    a, b, c = (IslandId(x * 32) for x in (b"a", b"b", b"c"))
    before = assign_parts([10] * 9, {a: 1.0, b: 1.0, c: 1.0})
    after = assign_parts([10] * 9, {a: 1.0, c: 1.0}, before)
    assert {p.owner for p in after} == {a, c}
