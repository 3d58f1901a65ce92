"""Token stream -> batches: which island trains on which sequences at which step.

The stream's front is cut into windows of `context` tokens (plus one, the last target), its last
`held_out` fraction is for evaluation only. At step s, island i takes the windows at global positions
(s * islands + i) * batch_size + k of the seeded order: islands are disjoint within an epoch, and their
union at a step is the batch of one data-parallel run with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.order import sample_at
from node.settings import TrainerSettings
from node.text import Tokens

Pair = tuple[Tensor, Tensor]


class Batches:
    """Training batches of island `index` of `islands`; `tokens` is the training part."""

    def __init__(self, tokens: Tokens, settings: TrainerSettings) -> None:
        self._tokens = tokens
        self._context = settings.model.context
        self._batch_size = settings.inner.batch_size
        self._seed = settings.seed
        self._islands = settings.islands
        self._index = settings.index
        self.samples = (len(tokens) - 1) // self._context

    def at(self, step: int) -> Pair:
        """(inputs, targets) of inner step `step`, each (batch_size, context) int64."""
        first = (step * self._islands + self._index) * self._batch_size
        positions = np.arange(first, first + self._batch_size)
        return windows(self._tokens, sample_at(positions, self.samples, self._seed), self._context)


def held_out_batches(
    tokens: Tokens, context: int, sequences: int, batch_size: int
) -> Iterator[Pair]:
    """At most `sequences` windows of the held-out part, evenly spaced, the same at every call."""
    samples = (len(tokens) - 1) // context
    count = min(sequences, samples)
    numbers = np.arange(count) * samples // count
    for start in range(0, count, batch_size):
        yield windows(tokens, numbers[start : start + batch_size], context)


def windows(tokens: Tokens, numbers: npt.NDArray[np.int64], context: int) -> Pair:
    places = numbers[:, None] * context + np.arange(context + 1)
    taken = torch.from_numpy(tokens[places].astype(np.int64))
    return taken[:, :-1], taken[:, 1:]
