"""Plain averaging, SGD, and Nesterov momentum as DiLoCo uses it.

With g = weighted mean of (anchor - local):
    average    anchor - g                                   the weighted mean of the local parameters
    sgd        anchor - lr g                                FedAvg for lr = 1
    nesterov   b = mu b + g;  anchor - lr (g + mu b)        DiLoCo (arXiv 2311.08105), PyTorch's form

Nesterov is not heavy ball: the step looks ahead by g + mu b, with b already updated. Its effective gain is
about lr / (1 - mu), 7 for the paper's 0.7 / 0.9: stable only because g is an average of small deltas.
"""

from __future__ import annotations

import numpy as np

from outer_optimizer.transform import FloatArray, Hyper, OuterTransform, State


def _no_state(state: State) -> None:
    del state


def _zeros(state: State) -> None:
    for array in state:
        array.fill(0.0)


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


average = OuterTransform("average", (), _no_state, _average)
sgd = OuterTransform("sgd", (), _no_state, _sgd)
nesterov = OuterTransform("nesterov", ("momentum",), _zeros, _nesterov)
