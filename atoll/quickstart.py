"""The quickstart's files: `examples/quickstart` in a checkout, the same from the package elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path


@contextmanager
def quickstart_files() -> Iterator[Path]:
    """A folder with run.toml and scenario.toml."""
    checkout = Path(__file__).resolve().parent.parent / "examples" / "quickstart"
    if checkout.is_dir():
        yield checkout
        return
    with resources.as_file(resources.files("atoll") / "quickstart_files") as folder:
        yield folder
