"""Outer optimizers by their name in the run spec."""

from __future__ import annotations

from outer_optimizer.adaptive import adam, yogi
from outer_optimizer.sgd import average, nesterov, sgd
from outer_optimizer.transform import OuterTransform


def transform_for(name: str) -> OuterTransform:
    """Raises ValueError on an unknown name."""
    match name:
        case "nesterov":
            return nesterov
        case "sgd":
            return sgd
        case "average":
            return average
        case "adam":
            return adam
        case "yogi":
            return yogi
        case _:
            raise ValueError(
                f"unknown outer optimizer {name!r}: nesterov, sgd, average, adam or yogi"
            )
