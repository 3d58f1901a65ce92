"""Outer optimizers by their name in the run spec."""

from __future__ import annotations

from outer_optimizer.adaptive import adam, yogi
from outer_optimizer.sgd import average, nesterov, sgd
from outer_optimizer.transform import OuterTransform


def transform_for(name: str) -> OuterTransform:
    """Raises ValueError on an unknown name."""
    for transform in (nesterov, sgd, average, adam, yogi):
        if transform.name == name:
            return transform
    raise ValueError(f"unknown outer optimizer {name!r}: nesterov, sgd, average, adam or yogi")
