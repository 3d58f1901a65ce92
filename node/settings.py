"""Settings of one trainer process, written by its daemon as a JSON file.

The tables `model`, `data` and `inner` are the run spec's own, so their bounds stand in one place; what
this file adds is local to one island. Every fault is a ConfigError that names the key.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from protocol.errors import ConfigError
from protocol.spec import Data, Inner, Model, Positive, Table, parse_table

VARIABLE = "ATOLL_TRAINER_SETTINGS"


class TrainerSettings(Table):
    """`index` is this island's place in the data order: it takes batch `index` of every `islands`."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    target_tokens: Positive
    model: Model
    data: Data
    inner: Inner
    tokenizer_path: str | None = None
    cache_dir: str
    index: Annotated[int, Field(ge=0)]
    islands: Annotated[int, Field(ge=1, le=1_024)]
    threads: Annotated[int, Field(ge=1, le=1_024)] = 1

    @model_validator(mode="after")
    def _keys_agree(self) -> TrainerSettings:
        if self.index >= self.islands:
            raise ValueError(f"index = {self.index} must be below islands = {self.islands}")
        if self.target_tokens < self.step_tokens:
            raise ValueError(
                f"target_tokens = {self.target_tokens} is less than one step of all islands, "
                f"{self.step_tokens} tokens: raise it"
            )
        if self.data.tokenizer == "bpe" and self.tokenizer_path is None:
            raise ValueError('tokenizer_path: data.tokenizer = "bpe" needs a tokenizer file')
        return self

    @property
    def step_tokens(self) -> int:
        """Tokens of the whole run per inner step, all islands together."""
        return self.islands * self.inner.batch_size * self.model.context


def load_settings(path: Path) -> TrainerSettings:
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    return parse_table(TrainerSettings, table, str(path))


def settings_from_environment() -> TrainerSettings:
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError(f"{VARIABLE} is not set: it names the trainer's settings file")
    return load_settings(Path(path))
