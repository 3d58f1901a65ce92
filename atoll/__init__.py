"""Atoll's front door: `atoll.attach` for one's own training loop, the command line, the simulator.

Importing it is cheap; torch is loaded only by what needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.attach import Island, attach
    from node.own_start import save_start

__all__ = ["Island", "attach", "save_start"]

_MODULES = {"Island": "node.attach", "attach": "node.attach", "save_start": "node.own_start"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
