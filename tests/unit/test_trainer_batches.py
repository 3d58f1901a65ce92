from __future__ import annotations

import numpy as np
import pytest
import torch

from node.baseline import batches_of
from node.batches import Batches, held_out_batches
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
    found = [start for inputs, _ in first for start in starts(inputs)]
    assert found == [0, 32, 64, 96, 128]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))
    every = [s for inputs, _ in held_out_batches(held_out, CONTEXT, 99, 7) for s in starts(inputs)]
    assert every == list(range(0, 20 * CONTEXT, CONTEXT))


@pytest.mark.parametrize(("tokens", "part"), [(8, "training"), (60, "held-out")])
def test_too_little_text_is_an_error_that_names_the_key(tokens: int, part: str) -> None:
    with pytest.raises(
        TextError, match=rf"^data\.text: its {part} part .* model\.context \+ 1 = 9"
    ):
        split_tokens(stream(tokens), CONTEXT, 0.1)
