"""FedAdam and FedYogi: Reddi et al. 2021, "Adaptive Federated Optimization" (arXiv 2003.00295), algorithm 2.

    m = beta1 m + (1 - beta1) g
    adam:  v = beta2 v + (1 - beta2) g^2
    yogi:  v = v - (1 - beta2) g^2 sign(v - g^2)
    anchor - lr m / (sqrt(v) + epsilon)

No bias correction, as in the paper, so the state needs no step count. v starts at epsilon^2, the paper's
lower bound. The stored array starts as zeros and a zero is read as epsilon^2, because epsilon is a setting
of the run and no part of the state. Later v is zero only where it underflowed or where beta2 = 0; reading
that as epsilon^2 adds to the denominator at most the epsilon that is in it anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outer_optimizer.transform import FloatArray, Hyper, OuterTransform, State, Update, zeros

_ONE = np.float32(1.0)

SecondMoment = Callable[[FloatArray, FloatArray, np.float32, FloatArray], None]
"""second(v, g^2, beta2, new_v)."""


def _adam_second(v: FloatArray, squared: FloatArray, beta2: np.float32, new_v: FloatArray) -> None:
    np.multiply(v, beta2, out=new_v)
    np.add(new_v, squared * (_ONE - beta2), out=new_v)


def _yogi_second(v: FloatArray, squared: FloatArray, beta2: np.float32, new_v: FloatArray) -> None:
    np.subtract(v, squared, out=new_v)
    np.sign(new_v, out=new_v)
    np.multiply(new_v, squared * (_ONE - beta2), out=new_v)
    np.subtract(v, new_v, out=new_v)


def _update_with(second: SecondMoment) -> Update:
    def update(
        anchor: FloatArray,
        gradient: FloatArray,
        state: State,
        hyper: Hyper,
        new_anchor: FloatArray,
        new_state: State,
    ) -> None:
        beta1, epsilon = np.float32(hyper.beta1), np.float32(hyper.epsilon)
        (m, v), (new_m, new_v) = state, new_state
        np.multiply(m, beta1, out=new_m)
        np.add(new_m, gradient * (_ONE - beta1), out=new_m)
        begun = np.where(v == 0, epsilon * epsilon, v)
        second(begun, gradient * gradient, np.float32(hyper.beta2), new_v)
        np.sqrt(new_v, out=new_anchor)
        np.add(new_anchor, epsilon, out=new_anchor)
        np.divide(new_m, new_anchor, out=new_anchor)
        np.multiply(new_anchor, np.float32(hyper.lr), out=new_anchor)
        np.subtract(anchor, new_anchor, out=new_anchor)

    return update


adam = OuterTransform("adam", ("first", "second"), zeros, _update_with(_adam_second))
yogi = OuterTransform("yogi", ("first", "second"), zeros, _update_with(_yogi_second))
