"""`atoll run init`: the spec, the owner key and the start state, made once by the run's creator.

The start state is made by torch in a process of its own (a seed does not give the same weights on unlike
CPUs, so it is made once and everybody fetches it); its layout and roots are then signed by the owner key.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

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
from protocol.spec import RunSpec, load_spec
from protocol.state_dir import write_atomically
from protocol.wire import encode_signed, encode_start


def init_run(
    path: Path, spec_path: Path | None, cache: Path, owner_secret: bytes | None = None
) -> Start:
    """Fills the run directory `path`; refuses one that already holds a start state."""
    require_torch("making a start state")
    files = RunDirectory(path)
    path.mkdir(parents=True, exist_ok=True)
    if files.start.exists():
        raise ConfigError(
            f"{path}: already holds a run: take another directory, or remove this one"
        )
    if spec_path is not None and spec_path.resolve() != files.spec.resolve():
        load_spec(spec_path)
        shutil.copyfile(spec_path, files.spec)
    elif not files.spec.exists():
        with quickstart_files() as folder:
            shutil.copyfile(folder / "run.toml", files.spec)
    spec = load_spec(files.spec)
    if owner_secret is not None and not files.owner_key.exists():
        create(files.owner_key, owner_secret)
    owner = load_or_create(files.owner_key)
    if spec.data.tokenizer == "bpe":
        train_bpe(expand(spec.data.text), spec.built_in_model.vocab_size, files.tokenizer)
    check_text(spec, files.tokenizer, cache)
    start = _make_start(files, spec, cache)
    write_atomically(files.start, encode_signed(owner.sign("start", encode_start(start))))
    return start


def _make_start(files: RunDirectory, spec: RunSpec, cache: Path) -> Start:
    tensors = _make_start_state(files, spec, cache)
    layout = build_layout(
        tensors, spec.outer.fragments, spec.sync.cell_values, spec.sync.expected_islands
    )
    return Start(
        run_id=f"{spec.name}-{os.urandom(4).hex()}",
        spec_digest=spec.digest(),
        layout=tuple(tensors),
        fragment_roots=_roots(layout, spec, files.start_state),
        tokenizer_digest=digest(files.tokenizer.read_bytes()) if files.tokenizer.exists() else b"",
    )


def _make_start_state(files: RunDirectory, spec: RunSpec, cache: Path) -> list[TensorLayout]:
    """Runs torch elsewhere; leaves start.safetensors and returns its layout."""
    settings = files.path / "start.json"
    place = Place(cache, files.tokenizer)
    made = settings_for(spec, spec.sync.expected_islands, place, str(files.spec))
    write_atomically(settings, made.model_dump_json().encode())
    command = [
        sys.executable,
        "-P",
        "-m",
        "node.start_state",
        str(settings),
        str(files.start_state),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RunFailed(f"the start state could not be made: {last.removeprefix('error: ')}")
    layout_file = files.start_state.with_suffix(".layout.json")
    table = json.loads(layout_file.read_bytes())
    layout_file.unlink()
    settings.unlink()
    return [TensorLayout(name, tuple(shape), dtype) for name, shape, dtype in table]


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
