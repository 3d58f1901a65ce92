"""`atoll run init`: the spec, the owner key and the start state, made once by the run's creator.

The start state is made in a process of its own, with torch unless the model is the islands' own (a seed
does not give the same weights on unlike CPUs, so it is made once and everybody fetches it); its layout and
roots are then signed by the owner key. Nothing is made before the spec is known to be right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.hf_source import config_of, tokenizer_of, with_config
from atoll.quickstart import quickstart_files
from node.replica import Replica
from node.settings import Place, settings_for
from node.start_donor import flat_from_file
from node.text import check_text, expand, train_bpe
from node.torch_extra import require_torch
from outer_optimizer.codec import codec_for
from outer_optimizer.optimizer import transform_for
from protocol.errors import ConfigError, RunFailed
from protocol.identity import create, load_or_create
from protocol.layout import Layout, TensorLayout, build_layout
from protocol.merkle import digest
from protocol.messages import Digest, Start
from protocol.run_files import RunDirectory
from protocol.spec import OwnModel, RunSpec, load_spec, parse_spec
from protocol.state_dir import write_atomically
from protocol.wire import encode_signed, encode_start

MAX_TOKENIZER_BYTES = 12 << 20  # it travels in one message to every node


@dataclass(frozen=True)
class Origin:
    """What a run begins with, besides its spec.

    hf: directory, config.json or hub name of the causal language model to train; fills in the spec.
    weights: safetensors to start from; None = random, by the seed.
    """

    hf: str | None = None
    weights: Path | None = None


def init_run(
    path: Path,
    spec_path: Path | None,
    cache: Path,
    owner_secret: bytes | None = None,
    origin: Origin = Origin(),
) -> Start:
    """Fills the run directory `path`; refuses one that already holds a start state."""
    files = RunDirectory(path)
    if files.start.exists():
        raise ConfigError(
            f"{path}: already holds a run: take another directory, or remove this one"
        )
    text, spec = _spec_for(files, spec_path, origin)
    own = isinstance(spec.model, OwnModel)
    if own and origin.weights is None:
        raise ConfigError(
            'model.recipe = "own" needs its start state: write it with atoll.save_start(model, FILE) '
            "and give it as --weights FILE"
        )
    if not own:
        require_torch("making a start state")
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(files.spec, text)
    if owner_secret is not None and not files.owner_key.exists():
        create(files.owner_key, owner_secret)
    owner = load_or_create(files.owner_key)
    if not own:
        _prepare_text(files, spec, cache, origin)
    start = _make_start(files, spec, cache, origin.weights)
    write_atomically(files.start, encode_signed(owner.sign("start", encode_start(start))))
    return start


def _spec_for(files: RunDirectory, spec_path: Path | None, origin: Origin) -> tuple[bytes, RunSpec]:
    """The text of the run's spec, and what it says: a given one, that of the directory, or the quickstart."""
    with quickstart_files() as folder:
        default = spec_path is None and not files.spec.exists()
        source = folder / "run.toml" if default else spec_path or files.spec
        if origin.hf is None:
            spec = load_spec(source)
            return source.read_bytes(), spec
        text = with_config(source, config_of(origin.hf), new_model=default)
    return text.encode(), parse_spec(tomllib.loads(text), str(source))


def _prepare_text(files: RunDirectory, spec: RunSpec, cache: Path, origin: Origin) -> None:
    """The tokenizer that the run hands out, and a look whether there is text enough."""
    if spec.data.tokenizer == "bpe":
        train_bpe(expand(spec.data.text), spec.built_in_model.vocab_size, files.tokenizer)
    elif spec.data.tokenizer == "model" and origin.hf is not None:
        write_atomically(files.tokenizer, tokenizer_of(origin.hf))
    elif spec.data.tokenizer == "model" and not files.tokenizer.exists():
        raise ConfigError(
            f'data.tokenizer = "model": its tokenizer is missing: give --hf SOURCE, or lay it there as '
            f"{files.tokenizer}"
        )
    if spec.data.tokenizer != "bytes" and files.tokenizer.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ConfigError(
            f"{files.tokenizer}: larger than the {MAX_TOKENIZER_BYTES} bytes that a run hands out: "
            "take one with fewer tokens"
        )
    check_text(spec, files.tokenizer, cache)


def _make_start(files: RunDirectory, spec: RunSpec, cache: Path, weights: Path | None) -> Start:
    tensors = _make_start_state(files, spec, cache, weights)
    layout = build_layout(
        tensors, spec.outer.fragments, spec.sync.cell_values, spec.sync.expected_islands
    )
    tokenizer = files.tokenizer.read_bytes() if spec.data.tokenizer != "bytes" else b""
    return Start(
        run_id=f"{spec.name}-{os.urandom(4).hex()}",
        spec_digest=spec.digest(),
        layout=tuple(tensors),
        fragment_roots=_roots(layout, spec, files.start_state),
        tokenizer_digest=digest(tokenizer) if tokenizer else b"",
    )


def _make_start_state(
    files: RunDirectory, spec: RunSpec, cache: Path, weights: Path | None
) -> list[TensorLayout]:
    """In a process of its own; leaves start.safetensors and returns its layout."""
    options = [] if weights is None else ["--weights", str(weights)]
    settings = files.path / "start.json"
    if not isinstance(spec.model, OwnModel):
        place = Place(cache, files.tokenizer)
        made = settings_for(spec, spec.sync.expected_islands, place, str(files.spec))
        write_atomically(settings, made.model_dump_json().encode())
        options += ["--settings", str(settings)]
    command = [sys.executable, "-P", "-m", "node.start_state", str(files.start_state), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    settings.unlink(missing_ok=True)
    if done.returncode == ConfigError.exit_code:
        raise ConfigError(_why(done))
    if done.returncode:
        raise RunFailed(f"the start state could not be made: {_why(done)}")
    layout_file = files.start_state.with_suffix(".layout.json")
    table = json.loads(layout_file.read_bytes())
    layout_file.unlink()
    return [TensorLayout(name, tuple(shape), dtype) for name, shape, dtype in table]


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says why: the last one that names an error, else the last one."""
    lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
    named = [line for line in lines if line.startswith("error: ")]
    return (named or lines)[-1].removeprefix("error: ")


def _roots(layout: Layout, spec: RunSpec, file: Path) -> tuple[Digest, ...]:
    replica = Replica(layout, transform_for(spec.outer.optimizer), codec_for(spec.outer.codec))
    roots = []
    for number, fragment in enumerate(layout.fragments):
        flat = flat_from_file(fragment, file)
        if not np.isfinite(flat).all():
            raise ConfigError(f"{file}: the start state holds values that are not finite")
        replica.load_anchor(number, 0, flat)
        roots.append(replica.root(number))
    return tuple(roots)
