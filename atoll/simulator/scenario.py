"""A scenario: a run, its islands, and what their links to the world are like. One TOML file.

run = "run.toml"            # relative to this file
[link]                      # of every island, unless it says otherwise
up_bps = 50e6
down_bps = 100e6
delay_s = 0.02              # one way, between the island and the middle of the network
[[islands]]
name = "amsterdam"
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from node.island_settings import IslandSettings
from protocol.errors import ConfigError
from protocol.spec import NAME, RunSpec, Table, load_spec, parse_table, read_toml


class Link(Table):
    """An island's line to the network. Its delay counts once in each direction."""

    up_bps: Annotated[float, Field(gt=0)] = 1e9
    down_bps: Annotated[float, Field(gt=0)] = 1e9
    delay_s: Annotated[float, Field(ge=0, le=60)] = 0.0


class IslandTable(IslandSettings):
    name: Annotated[str, Field(pattern=NAME)]
    link: Link | None = None

    @property
    def settings(self) -> IslandSettings:
        return IslandSettings(**self.model_dump(include=set(IslandSettings.model_fields)))


class ScenarioTable(Table):
    run: str = "run.toml"
    link: Link = Link()
    islands: Annotated[tuple[IslandTable, ...], Field(min_length=1, max_length=64)]
    baseline_lrs: Annotated[tuple[float, ...], Field(min_length=1, max_length=16)] = (1e-3,)

    @model_validator(mode="after")
    def _names_differ(self) -> ScenarioTable:
        names = [island.name for island in self.islands]
        if len(set(names)) != len(names):
            raise ValueError("islands: every name must be another one")
        return self


class Scenario:
    """A checked scenario with its run spec."""

    def __init__(self, table: ScenarioTable, spec_path: Path, spec: RunSpec) -> None:
        self.spec_path, self.spec = spec_path, spec
        self.islands = table.islands
        self.baseline_lrs = table.baseline_lrs
        self._link = table.link

    def link_of(self, island: IslandTable) -> Link:
        return island.link or self._link


def load_scenario(path: Path) -> Scenario:
    """Raises ConfigError if the scenario or its spec is wrong, or their numbers of islands differ."""
    table = parse_table(ScenarioTable, read_toml(path), str(path))
    spec_path = path.parent / table.run
    spec = load_spec(spec_path)
    if len(table.islands) != spec.sync.expected_islands:
        raise ConfigError(
            f"{path}: has {len(table.islands)} [[islands]], but sync.expected_islands = "
            f"{spec.sync.expected_islands} in {spec_path}: make them the same"
        )
    return Scenario(table, spec_path, spec)
