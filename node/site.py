"""Settings local to one node, and the files it keeps.

<state>/lock             one daemon at a time
<state>/identity.key     who this island is (0600)
<state>/journal.db       promise, votes, chain
<state>/updates/         reduced cells of past rounds, by root
<state>/snapshot.safetensors   anchor and outer state after some round
<state>/events.jsonl     what happened; reports are made from it
<state>/trainer.log, trainer.json, tokenizer.json
<state>/inner/           the ranks' optimizer and random state
<state>/final.safetensors      the model when the run is finished
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.island_settings import IslandSettings


@dataclass(frozen=True)
class Site:
    """`text` replaces the spec's paths where this node's files lie elsewhere."""

    name: str
    coordinator: str
    state: Path
    cache: Path
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    spec: Path | None = None
    text: tuple[str, ...] = ()
    island: IslandSettings = IslandSettings()
    command: tuple[str, ...] = ()  # own training script; empty = the built-in recipe

    @property
    def identity_key(self) -> Path:
        return self.state / "identity.key"

    @property
    def journal(self) -> Path:
        return self.state / "journal.db"

    @property
    def updates(self) -> Path:
        return self.state / "updates"

    @property
    def snapshot(self) -> Path:
        return self.state / "snapshot.safetensors"

    @property
    def events(self) -> Path:
        return self.state / "events.jsonl"

    @property
    def trainer_log(self) -> Path:
        return self.state / "trainer.log"

    @property
    def torchrun_logs(self) -> Path:
        return self.state / "torchrun"

    @property
    def trainer_settings(self) -> Path:
        return self.state / "trainer.json"

    @property
    def inner_checkpoints(self) -> Path:
        return self.state / "inner"

    @property
    def tokenizer(self) -> Path:
        return self.state / "tokenizer.json"

    @property
    def final_model(self) -> Path:
        return self.state / "final.safetensors"
