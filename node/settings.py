"""Settings of one trainer process, written by its daemon as a JSON file.

The tables `model`, `data` and `inner` are the run spec's own, so their bounds stand in one place; what
this file adds is local to one island. Every fault is a ConfigError that names the key.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from node.island_settings import IslandSettings
from protocol.errors import ConfigError
from protocol.spec import BuiltInModel, Data, Inner, Positive, RunSpec, Table, parse_table

VARIABLE = "ATOLL_TRAINER_SETTINGS"


class TrainerSettings(Table):
    """`index` is this island's place in the data order: it takes batch `index` of every `islands`."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    target_tokens: Positive
    model: BuiltInModel
    data: Data
    inner: Inner
    tokenizer_path: str | None = None
    cache_dir: str
    index: Annotated[int, Field(ge=0)]
    islands: Annotated[int, Field(ge=1, le=1_024)]
    island: IslandSettings = IslandSettings()
    checkpoint_dir: str | None = None

    @model_validator(mode="after")
    def _keys_agree(self) -> TrainerSettings:
        if self.index >= self.islands:
            raise ValueError(f"index = {self.index} must be below islands = {self.islands}")
        if self.target_tokens < self.step_tokens:
            raise ValueError(
                f"target_tokens = {self.target_tokens} is less than one step of all islands, "
                f"{self.step_tokens} tokens: raise it"
            )
        if self.data.tokenizer != "bytes" and self.tokenizer_path is None:
            raise ValueError(
                f'tokenizer_path: data.tokenizer = "{self.data.tokenizer}" needs a tokenizer file'
            )
        return self

    @property
    def step_tokens(self) -> int:
        """Tokens of the whole run per inner step, all islands together."""
        return self.islands * self.inner.batch_size * self.model.context


@dataclass(frozen=True)
class Place:
    """What is local about a trainer: whose batches it takes, and where its files are."""

    cache: Path
    tokenizer: Path
    index: int = 0
    island: IslandSettings = IslandSettings()
    text: tuple[str, ...] = ()  # replaces the spec's where this host's files lie elsewhere
    checkpoints: Path | None = None  # of optimizer and random state; None = none are kept


def settings_for(spec: RunSpec, islands: int, place: Place, source: str) -> TrainerSettings:
    """Raises ConfigError, naming `source`, if the spec's tables do not make a trainer."""
    data = spec.data.model_copy(update={"text": place.text}) if place.text else spec.data
    table = {
        "seed": spec.seed,
        "target_tokens": spec.target_tokens,
        "model": spec.built_in_model,
        "data": data,
        "inner": spec.inner,
        "tokenizer_path": str(place.tokenizer) if data.tokenizer != "bytes" else None,
        "cache_dir": str(place.cache),
        "index": place.index,
        "islands": islands,
        "island": place.island,
        "checkpoint_dir": str(place.checkpoints) if place.checkpoints is not None else None,
    }
    return parse_table(TrainerSettings, table, source)


def load_settings(path: Path) -> TrainerSettings:
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    return parse_table(TrainerSettings, table, str(path))


def settings_from_environment() -> TrainerSettings:
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError(f"{VARIABLE} is not set: it names the trainer's settings file")
    return load_settings(Path(path))
