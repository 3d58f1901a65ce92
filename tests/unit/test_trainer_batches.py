from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.baseline import batches_of
from node.batches import Batches, Ramp, Slice, held_out_batches
from node.settings import TrainerSettings
from node.text import TextError, split_tokens

CONTEXT, BATCH, ISLANDS = 8, 2, 3


def settings_of(**changes: object) -> TrainerSettings:
    table = {
        "seed": 5,
        "target_tokens": 10_000,
        "model": {"width": 16, "depth": 1, "heads": 2, "context": CONTEXT},
        "data": {"text": ["unused"], "held_out": 0.1, "eval_sequences": 5},
        "inner": {"batch_size": BATCH},
        "cache_dir": "unused",
        "index": 0,
        "islands": ISLANDS,
    }
    return TrainerSettings.model_validate(table | changes)


def stream(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint16)


def starts(inputs: torch.Tensor) -> list[int]:
    return inputs[:, 0].tolist()


def test_targets_are_the_next_tokens_and_windows_start_at_multiples_of_context() -> None:
    inputs, targets = Batches(stream(1_000), settings_of()).at(3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == (BATCH, CONTEXT)
    assert torch.equal(targets, inputs + 1)
    assert all(start % CONTEXT == 0 for start in starts(inputs))


def test_islands_are_disjoint_and_their_union_is_the_data_parallel_batch() -> None:
    tokens, settings = stream(1_000), settings_of()
    one = settings_of(islands=1, inner={"batch_size": BATCH * ISLANDS})
    for step in range(5):
        parts = [starts(batches.at(step)[0]) for batches in batches_of(ISLANDS, tokens, settings)]
        together = [start for part in parts for start in part]
        assert len(set(together)) == BATCH * ISLANDS
        assert together == starts(Batches(tokens, one).at(step)[0])


def test_an_epoch_sees_every_window_once() -> None:
    settings = settings_of(islands=1)
    batches = Batches(stream(20 * CONTEXT + 1), settings)
    seen = [start for step in range(10) for start in starts(batches.at(step)[0])]
    assert sorted(seen) == list(range(0, 20 * CONTEXT, CONTEXT))


def test_held_out_tokens_never_appear_in_training() -> None:
    training, held_out = split_tokens(stream(1_000), CONTEXT, 0.1)
    assert len(held_out) == 100
    batches = Batches(training, settings_of(islands=1))
    seen = {
        token
        for step in range(200)
        for part in batches.at(step)
        for token in part.flatten().tolist()
    }
    assert seen.isdisjoint(held_out.tolist())


def test_held_out_batches_are_fixed_spread_out_and_never_overlap() -> None:
    held_out = stream(20 * CONTEXT + 1)
    first, second = (list(held_out_batches(held_out, CONTEXT, 5, 2)) for _ in range(2))
    found = [start for inputs, _, _ in first for start in starts(inputs)]
    assert found == [0, 32, 64, 96, 128]
    assert all(torch.equal(a, b) for (a, _, _), (b, _, _) in zip(first, second, strict=True))
    batches = held_out_batches(held_out, CONTEXT, 99, 7)
    every = [start for inputs, _, _ in batches for start in starts(inputs)]
    assert every == list(range(0, 20 * CONTEXT, CONTEXT))


@pytest.mark.parametrize(("tokens", "part"), [(8, "training"), (60, "held-out")])
def test_too_little_text_is_an_error_that_names_the_key(tokens: int, part: str) -> None:
    with pytest.raises(
        TextError, match=rf"^data\.text: its {part} part .* model\.context \+ 1 = 9"
    ):
        split_tokens(stream(tokens), CONTEXT, 0.1)


# --- ranks of one island -----------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "contexts"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_the_ranks_of_an_island_tile_its_batch(shards: int, contexts: int) -> None:
    tokens, settings = stream(1_000), settings_of(inner={"batch_size": 4})
    whole, _ = Batches(tokens, settings).at(3)
    rows = []
    for shard in range(shards):
        slices = [Slice(shard, shards, rank, contexts) for rank in range(contexts)]
        rows.append(torch.cat([Batches(tokens, settings, s).at(3)[0] for s in slices], dim=1))
    assert torch.equal(torch.cat(rows), whole)


def test_held_out_samples_count_once_over_all_ranks_and_all_ranks_get_as_many_batches() -> None:
    tokens = stream(20 * CONTEXT + 1)
    counted: list[int] = []
    lengths = set()
    for shard in range(3):
        batches = list(held_out_batches(tokens, CONTEXT, 10, 2, Slice(shard, 3)))
        lengths.add(len(batches))
        for inputs, _, count in batches:
            assert len(inputs) >= max(1, count)
            counted += starts(inputs[:count])
    assert len(lengths) == 1
    assert sorted(counted) == [CONTEXT * (k * 20 // 10) for k in range(10)]


# --- the batch ramp ----------------------------------------------------------------------------


def ramped(*phases: tuple[int, int], **changes: object) -> TrainerSettings:
    ramp = [{"until_tokens": tokens, "batch_size": size} for tokens, size in phases]
    return settings_of(inner={"batch_size": 4, "batch_ramp": ramp}, **changes)


def test_a_ramp_changes_the_batch_at_the_first_step_that_has_seen_its_tokens() -> None:
    step_tokens = ISLANDS * CONTEXT  # per sample of an island
    settings = ramped((2 * step_tokens, 1), (5 * step_tokens, 2))
    sizes = [len(Batches(stream(1_000), settings).at(step)[0]) for step in range(6)]
    assert sizes == [1, 1, 2, 2, 4, 4]


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 6)), max_size=4),
    st.integers(1, 3),
    st.integers(0, 30),
)
def test_a_ramp_leaves_no_gap_and_overlaps_nowhere(
    grown: list[tuple[int, int]], islands: int, steps: int
) -> None:
    until = np.cumsum([tokens for tokens, _ in grown]).tolist()
    phases = [(int(t), size) for t, (_, size) in zip(until, grown, strict=True)]
    ramp = Ramp.of(ramped(*phases, islands=islands))
    taken: list[int] = []
    for step in range(steps):
        size, before = ramp.at(step)
        for index in range(islands):
            first = before * islands + index * size
            taken += range(first, first + size)
    assert taken == list(range(len(taken)))


def test_without_a_ramp_positions_are_those_of_a_constant_batch() -> None:
    ramp = Ramp.of(settings_of())
    assert [ramp.at(step) for step in (0, 1, 7)] == [(BATCH, 0), (BATCH, BATCH), (BATCH, 7 * BATCH)]
