"""What the callbacks for other people's trainers have in common."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from node.attach import Island
from node.parameters import Models, trained_parameters
from protocol.errors import ConfigError


def require(package: str, purpose: str) -> None:
    """Raises ConfigError where `package` is not installed; does not import it."""
    if find_spec(package) is None:
        raise ConfigError(
            f"{purpose} needs {package}, which is not installed here: pip install {package}"
        )


@torch.no_grad()
def leave_anchor(island: Island, model: Models) -> None:
    """Ends this trainer's part: the parameters become the run's anchor, for good.

    They may lie apart from it: where late work was carried, a trainer keeps what it has not handed over.
    """
    if not island.attached:
        return
    with island.anchor():
        anchor = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    for name, parameter in trained_parameters(model).items():
        parameter.copy_(anchor[name])
    island.close()
