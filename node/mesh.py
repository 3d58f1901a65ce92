"""The mesh of one island: how its ranks share one model. Local to the island; no other island knows.

    replicate   copies of the whole model, each with its own samples (HSDP's outer axis)
    shard       FSDP: each rank holds a slice of every parameter, and its own samples
    context     each rank holds a slice of every sequence (Ulysses: heads and tokens change places)
    expert      each rank holds some of the experts, and its own samples
    tensor      each rank holds a slice of every matrix product
    pipeline    each rank holds some of the blocks

Axes in `AXES` order, outermost first: neighbours on the last axis are neighbours in rank, so the axis that
talks most lies on the fastest link. Their product is the number of ranks.

Invariant: whoever holds a `Mesh` that passed `check_mesh` can build it; every other mesh has been refused by
a line that names the axis.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from protocol.errors import ConfigError
from protocol.spec import BuiltInModel, GptModel, HfModel, Inner, MoeModel, Table

Axis = Literal["pipeline", "replicate", "shard", "context", "expert", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
Size = Annotated[int, Field(ge=1, le=4_096)]

# Pairs nobody has built and tested. Everything else goes together, three and four axes included.
REFUSED: tuple[tuple[Axis, Axis], ...] = (
    ("context", "tensor"),
    ("context", "expert"),
    ("expert", "tensor"),
    ("pipeline", "context"),
    ("pipeline", "expert"),
)


class Mesh(Table):
    pipeline: Size = 1
    replicate: Size = 1
    shard: Size = 1
    context: Size = 1
    expert: Size = 1
    tensor: Size = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """In `AXES` order."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def batch_shards(self) -> int:
        """Ranks that each take samples of their own."""
        return self.replicate * self.shard * self.expert

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return " x ".join(named) or "one rank"


def parse_mesh(text: str) -> Mesh:
    """`shard=2,tensor=2` -> Mesh. Raises ConfigError naming the axis."""
    table: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        axis, equals, size = item.partition("=")
        if axis not in AXES or not equals or not size.isdecimal():
            raise ConfigError(
                f"--mesh {text!r}: {item!r} is not AXIS=SIZE; the axes are {', '.join(AXES)}"
            )
        if axis in table:
            raise ConfigError(f"--mesh {text!r}: {axis} stands there twice")
        table[axis] = size
    try:
        return Mesh.model_validate(table)
    except ValueError:
        raise ConfigError(f"--mesh {text!r}: every size is 1 to 4096") from None


def shrink(mesh: Mesh, ranks: int) -> Mesh:
    """The largest mesh of at most `ranks` ranks that differs from `mesh` in replicate and shard only.

    Raises ConfigError if the other axes alone need more.
    """
    fixed = mesh.ranks // (mesh.replicate * mesh.shard)
    choices = [
        (replicate * shard, shard, replicate)
        for replicate in _divisors(mesh.replicate)
        for shard in _divisors(mesh.shard)
        if fixed * replicate * shard <= ranks
    ]
    if not choices:
        raise ConfigError(f"island.mesh: {mesh} does not fit on {ranks} devices")
    _, shard, replicate = max(choices)
    return mesh.model_copy(update={"replicate": replicate, "shard": shard})


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def check_mesh(mesh: Mesh, model: BuiltInModel, inner: Inner) -> None:
    """Raises ConfigError naming the axis that does not divide, or the axes that do not go together."""
    for a, b in REFUSED:
        if getattr(mesh, a) > 1 and getattr(mesh, b) > 1:
            raise ConfigError(f"island.mesh: {a} and {b} do not go together: set one of them to 1")
    for key, samples in _batch_sizes(inner).items():
        _divides("replicate x shard x expert", mesh.batch_shards, key, samples)
    _divides("context", mesh.context, "model.context", model.context)
    if isinstance(model, HfModel):
        _check_hf(mesh)
        return
    _divides("tensor", mesh.tensor, "model.heads", model.heads)
    _divides("context", mesh.context, "model.heads", model.heads)
    if model.depth < mesh.pipeline:
        raise ConfigError(
            f"island.mesh.pipeline = {mesh.pipeline} is more than model.depth = {model.depth}"
        )
    _check_mlp(mesh, model)


def _batch_sizes(inner: Inner) -> dict[str, int]:
    return {"inner.batch_size": inner.batch_size} | {
        f"inner.batch_ramp[{i}].batch_size": phase.batch_size
        for i, phase in enumerate(inner.batch_ramp)
    }


def check_microbatch(mesh: Mesh, inner: Inner, microbatch: int | None) -> None:
    """Raises ConfigError naming island.microbatch if a pipeline cannot run every batch of the run."""
    if mesh.pipeline > 1:
        for samples in _batch_sizes(inner).values():
            microbatches(samples // mesh.batch_shards, microbatch, mesh.pipeline)


def microbatches(samples: int, microbatch: int | None, stages: int) -> int:
    """How many a rank's samples are cut into; by default as many as stages.

    Raises ConfigError if they are not of equal size, or fewer than stages: some would only ever wait.
    """
    size = microbatch or max((d for d in _divisors(samples) if samples // d >= stages), default=1)
    if samples % size or samples // size < stages:
        raise ConfigError(
            f"island.microbatch = {size}: cuts a rank's {samples} samples into {samples / size:g} "
            f"microbatches; a pipeline of {stages} stages needs at least as many, of equal size"
        )
    return samples // size


def _check_mlp(mesh: Mesh, model: GptModel) -> None:
    if not isinstance(model, MoeModel):
        if mesh.expert > 1:
            raise ConfigError('island.mesh.expert needs model.recipe = "moe"')
        _divides("tensor", mesh.tensor, "model.context", model.context)  # sequence parallel norms
        _divides("tensor", mesh.tensor, "model.vocab_size", model.vocab_size)
        return
    _divides("expert", mesh.expert, "model.experts", model.experts)
    for axis in ("tensor", "pipeline"):
        if getattr(mesh, axis) > 1:
            raise ConfigError(
                f'island.mesh.{axis} does not go with model.recipe = "moe": set it to 1'
            )


def _check_hf(mesh: Mesh) -> None:
    for axis in ("pipeline", "context", "expert"):
        if getattr(mesh, axis) > 1:
            raise ConfigError(
                f'island.mesh.{axis} does not go with model.recipe = "hf": set it to 1'
            )


def _divides(axis: str, ranks: int, key: str, value: int) -> None:
    if value % ranks:
        raise ConfigError(f"island.mesh: {axis} = {ranks} does not divide {key} = {value}")
