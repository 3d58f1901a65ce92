"""A run directory, as `run init` leaves it and `run start` reads it.

run.toml             the agreed spec
owner.key            the run's identity: keep it, and keep it secret
start.signed         run id, layout and roots of the start state, signed by the owner
start.safetensors    the start state itself
tokenizer.json       only for a trained vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.chain import verified_start
from protocol.errors import BadFrame, ConfigError, RunMismatch
from protocol.identity import Identity, load
from protocol.merkle import digest
from protocol.messages import Signed, Start
from protocol.spec import RunSpec, load_spec
from protocol.wire import decode_signed


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "run.toml"

    @property
    def owner_key(self) -> Path:
        return self.path / "owner.key"

    @property
    def start(self) -> Path:
        return self.path / "start.signed"

    @property
    def start_state(self) -> Path:
        return self.path / "start.safetensors"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"


@dataclass(frozen=True)
class Run:
    """Everything a coordinator needs to open the run."""

    spec: RunSpec
    owner: Identity
    signed_start: Signed
    start: Start
    tokenizer_json: bytes


def run_directory(path: Path) -> RunDirectory:
    """`path` is the directory or the run.toml in it."""
    return RunDirectory(path.parent if path.is_file() else path)


def load_run(path: Path) -> Run:
    """Raises ConfigError if something is missing, RunMismatch if the spec was edited after init."""
    files = run_directory(path)
    spec = load_spec(files.spec if files.spec.exists() else path)
    for needed in (files.owner_key, files.start):
        if not needed.exists():
            raise ConfigError(f"{needed}: missing: make it with `atoll run init {files.path}`")
    owner = load(files.owner_key)
    try:
        signed = decode_signed(files.start.read_bytes())
        start = verified_start(signed, owner.island)
    except BadFrame as error:
        raise ConfigError(f"{files.start}: {error}: make it again with `atoll run init`") from None
    if start.spec_digest != spec.digest():
        raise RunMismatch(
            f"{files.spec} was changed after `atoll run init`: undo the change, "
            "or start a new run in another directory"
        )
    tokenizer = files.tokenizer.read_bytes() if start.tokenizer_digest else b""
    if start.tokenizer_digest and digest(tokenizer) != start.tokenizer_digest:
        raise RunMismatch(f"{files.tokenizer} is not the one the run was made with: restore it")
    return Run(spec, owner, signed, start, tokenizer)
