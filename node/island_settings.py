"""Settings of one island's ranks, which no other island needs to know.

[island]
compute = "bf16"
microbatch = 4
[island.mesh]
shard = 4
tensor = 2
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from node.mesh import Mesh
from protocol.spec import Positive, Table, parse_table, read_toml


class IslandSettings(Table):
    """
    device: "auto" takes CUDA where there is one. NCCL joins GPUs, gloo joins CPUs.
    zero: 3 frees gathered parameters after each forward; 2 keeps them until the backward is done.
    compute: dtype of forward and backward; parameters and optimizer state stay fp32.
    offload: parameters, gradients and optimizer state live in host memory (CUDA only).
    microbatch: samples per forward on one rank (gradients add up over them); None = all at once.
        In a pipeline: samples per microbatch; None = as many microbatches as stages.
    checkpoint_rounds: rounds between two saves of optimizer state and random state; 0 = never.
    restarts: rank failures that torchrun mends by itself before the daemon starts it anew.
    silent_s: the daemon says so when the trainer has not been heard of for this long.
    peak_flops: of one rank's device, for MFU where the device table does not know it.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1_024)] = 1
    zero: Literal[2, 3] = 3
    compute: Literal["fp32", "bf16"] = "fp32"
    offload: bool = False
    activation_checkpoints: bool = False
    microbatch: Positive | None = None
    checkpoint_rounds: Annotated[int, Field(ge=0, le=1 << 50)] = 4
    restarts: Annotated[int, Field(ge=0, le=1_000)] = 8
    silent_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    peak_flops: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    mesh: Mesh = Mesh()

    @property
    def wraps_one_rank(self) -> bool:
        """Whether even a single rank needs FSDP2, for what it does besides sharding."""
        return self.compute == "bf16" or self.offload

    @model_validator(mode="after")
    def _offload_needs_cuda(self) -> IslandSettings:
        if self.offload and self.device == "cpu":
            raise ValueError('island.offload needs island.device = "cuda"')
        return self


class IslandFile(Table):
    island: IslandSettings = IslandSettings()


def load_island(path: Path) -> IslandSettings:
    """Reads `[island]` of a TOML file. Raises ConfigError with one line per wrong key."""
    return parse_table(IslandFile, read_toml(path), str(path)).island
