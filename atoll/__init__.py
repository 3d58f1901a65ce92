"""Atoll's front door: `atoll.attach` for one's own training loop, the command line, the simulator.

Importing it is cheap; torch is loaded only by what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.attach import Island, attach

__all__ = ["Island", "attach"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from node import attach as module

        return getattr(module, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
