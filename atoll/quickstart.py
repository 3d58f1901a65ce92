"""The demo's scenario: `examples/quickstart` in a checkout, the same files from the package elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path


@contextmanager
def quickstart_scenario() -> Iterator[Path]:
    """Path of scenario.toml; run.toml lies beside it."""
    checkout = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "scenario.toml"
    if checkout.exists():
        yield checkout
        return
    with resources.as_file(resources.files("atoll") / "quickstart_files") as folder:
        yield folder / "scenario.toml"
