"""Token stream -> batches: which rank trains on which sequences at which step.

The stream's front is cut into windows of `context` tokens (plus one, the last target), its last
`held_out` fraction is for evaluation only. At a step of B samples per island, island i takes the windows at
global positions (first + i * B + k) of the seeded order, where `first` counts all samples of all steps before:
islands are disjoint within an epoch, and their union at a step is the batch of one data-parallel run with the
same seed. B follows the batch ramp, a pure function of the step.

Within the island each batch shard takes an equal run of the samples, each context rank a slice of every
sequence; tensor and pipeline ranks see what their neighbours see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.order import sample_at
from node.settings import TrainerSettings
from node.text import Tokens

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Slice:
    """Which of the island's samples, and which tokens of each, one rank sees."""

    batch_shard: int = 0
    batch_shards: int = 1
    context_rank: int = 0
    context_ranks: int = 1

    def samples(self, count: int) -> slice:
        size = count // self.batch_shards
        return slice(self.batch_shard * size, (self.batch_shard + 1) * size)

    def tokens(self, pair: Pair) -> Pair:
        inputs, targets = (
            part.chunk(self.context_ranks, dim=1)[self.context_rank].contiguous() for part in pair
        )
        return inputs, targets


class Batches:
    """Training batches of island `index` of `islands`; `tokens` is the training part."""

    def __init__(self, tokens: Tokens, settings: TrainerSettings, mine: Slice = Slice()) -> None:
        self._tokens, self._mine = tokens, mine
        self._context = settings.model.context
        self._seed = settings.seed
        self._islands = settings.islands
        self._index = settings.index
        self._ramp = Ramp.of(settings)
        self.samples = (len(tokens) - 1) // self._context

    def at(self, step: int) -> Pair:
        """(inputs, targets) of inner step `step` for this rank, each (samples, tokens) int64."""
        size, before = self._ramp.at(step)
        first = before * self._islands + self._index * size
        positions = np.arange(first, first + size)[self._mine.samples(size)]
        numbers = sample_at(positions, self.samples, self._seed)
        return self._mine.tokens(windows(self._tokens, numbers, self._context))

    def tokens_at(self, step: int) -> int:
        """What the island trains on at `step`, all ranks together."""
        return self._ramp.at(step)[0] * self._context


@dataclass(frozen=True)
class Ramp:
    """Phases (steps, samples per island and step); the last batch size goes on for ever."""

    phases: tuple[tuple[int, int], ...]
    final: int

    @classmethod
    def of(cls, settings: TrainerSettings) -> Ramp:
        """A phase ends with the first step at which the run has seen its `until_tokens`."""
        per_sample = settings.islands * settings.model.context
        phases, seen = [], 0
        for phase in settings.inner.batch_ramp:
            step_tokens = phase.batch_size * per_sample
            steps = max(0, -(-(phase.until_tokens - seen) // step_tokens))
            phases.append((steps, phase.batch_size))
            seen += steps * step_tokens
        return cls(tuple(phases), settings.inner.batch_size)

    def at(self, step: int) -> tuple[int, int]:
        """(samples of this island at `step`, its samples at all steps before)."""
        before = 0
        for steps, size in self.phases:
            if step < steps:
                return size, before + step * size
            step -= steps
            before += steps * size
        return self.final, before + step * self.final


def held_out_batches(
    tokens: Tokens, context: int, sequences: int, batch_size: int, mine: Slice = Slice()
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """At most `sequences` windows of the held-out part, evenly spaced, the same at every call.

    (inputs, targets, how many of the samples count); every rank gets as many batches. One that runs out of
    samples gets one that does not count.
    """
    samples = (len(tokens) - 1) // context
    count = min(sequences, samples)
    numbers = np.arange(count) * samples // count
    for start in range(0, count, batch_size * mine.batch_shards):
        first = start + mine.batch_shard * batch_size
        taken = numbers[first : first + batch_size]
        pair = windows(tokens, taken if len(taken) else numbers[:1], context)
        yield *mine.tokens(pair), len(taken)


def windows(tokens: Tokens, numbers: npt.NDArray[np.int64], context: int) -> Pair:
    places = numbers[:, None] * context + np.arange(context + 1)
    taken = torch.from_numpy(tokens[places].astype(np.int64))
    return taken[:, :-1], taken[:, 1:]
