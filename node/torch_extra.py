"""PyTorch is an extra: a coordinator, a donor or a daemon with its own trainer command needs none."""

from __future__ import annotations

from importlib.util import find_spec

from protocol.errors import ConfigError


def require_torch(purpose: str) -> None:
    """Raises ConfigError where PyTorch is not installed; does not import it."""
    if find_spec("torch") is None:
        raise ConfigError(
            f"{purpose} needs PyTorch, which is not installed here: pip install 'atoll[train]'"
        )
