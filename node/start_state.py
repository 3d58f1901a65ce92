"""Makes a run's start state: `python -P -m node.start_state SETTINGS.json OUT.safetensors`.

The parameters follow from the seed alone. OUT.layout.json beside it lists [name, shape, dtype] in layout
order; both files are whole or absent, and the layout is there before the state.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from safetensors.torch import save

from node.parameters import layout_of, trained_parameters
from node.settings import TrainerSettings, load_settings
from node.trainer import build_model
from protocol.errors import AtollError
from protocol.layout import TensorLayout
from protocol.state_dir import write_atomically


def write_start_state(settings: TrainerSettings, out: Path) -> tuple[TensorLayout, ...]:
    parameters = trained_parameters(build_model(settings))
    layout = layout_of(parameters)
    write_atomically(out.with_suffix(".layout.json"), json.dumps(layout).encode())
    write_atomically(out, save({name: p.detach().float() for name, p in parameters.items()}))
    return layout


def main() -> int:
    parser = argparse.ArgumentParser(prog="node.start_state", description=__doc__)
    parser.add_argument("settings", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    try:
        layout = write_start_state(load_settings(arguments.settings), arguments.out)
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(layout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
