"""Plain averaging, SGD, and Nesterov momentum as DiLoCo uses it.

With g the weighted mean of the pseudo-gradients (anchor - local):
    average    anchor - g                                   the weighted mean of the local parameters
    sgd        anchor - lr g                                FedAvg (arXiv 1602.05629) for lr = 1
    nesterov   b = mu b + g;  anchor - lr (g + mu b)        DiLoCo (arXiv 2311.08105), PyTorch's form

Nesterov is not heavy ball (anchor - lr b): its step looks ahead by mu b, with b already updated. In the
long run a constant g moves the anchor by lr / (1 - mu) g per round, 7 g for the paper's 0.7 and 0.9: stable
only because g is an average of small, shrinking deltas.
"""

from __future__ import annotations

import numpy as np

from outer_optimizer.transform import FloatArray, Hyper, OuterTransform, State, zeros


def _average(
    anchor: FloatArray,
    gradient: FloatArray,
    state: State,
    hyper: Hyper,
    new_anchor: FloatArray,
    new_state: State,
) -> None:
    del state, hyper, new_state
    np.subtract(anchor, gradient, out=new_anchor)


def _sgd(
    anchor: FloatArray,
    gradient: FloatArray,
    state: State,
    hyper: Hyper,
    new_anchor: FloatArray,
    new_state: State,
) -> None:
    del state, new_state
    np.multiply(gradient, np.float32(hyper.lr), out=new_anchor)
    np.subtract(anchor, new_anchor, out=new_anchor)


def _nesterov(
    anchor: FloatArray,
    gradient: FloatArray,
    state: State,
    hyper: Hyper,
    new_anchor: FloatArray,
    new_state: State,
) -> None:
    lr, mu = np.float32(hyper.lr), np.float32(hyper.momentum)
    (old_buffer,), (buffer,) = state, new_state
    np.multiply(old_buffer, mu, out=buffer)
    np.add(buffer, gradient, out=buffer)
    np.multiply(buffer, mu, out=new_anchor)
    np.add(new_anchor, gradient, out=new_anchor)
    np.multiply(new_anchor, lr, out=new_anchor)
    np.subtract(anchor, new_anchor, out=new_anchor)


average = OuterTransform("average", (), zeros, _average)
sgd = OuterTransform("sgd", (), zeros, _sgd)
nesterov = OuterTransform("nesterov", ("momentum",), zeros, _nesterov)
