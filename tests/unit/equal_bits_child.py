"""Run by test_outer_equal_bits.py: one round over many values, its digest and the CPU features in use."""

import json

import numpy as np
from blake3 import blake3
from numpy._core import _multiarray_umath as features
from numpy.typing import NDArray

from outer_optimizer.aggregate import weighted_mean
from outer_optimizer.codec import codec_for
from outer_optimizer.digest import state_digest
from outer_optimizer.optimizer import transform_for
from outer_optimizer.pseudo_gradient import pseudo_gradient
from outer_optimizer.transform import Hyper, State

VALUES = 1_000_003  # no multiple of any vector length
SEGMENTS = (0, 1, 511, 512, 700_001, VALUES - 701_025)
WEIGHTS = (np.float32(0.3), np.float32(0.45), np.float32(0.25))


def numbers(stream: int) -> NDArray[np.float32]:
    """Signed values of magnitude 2^-12 to 16, from integer arithmetic on the index alone."""
    z = np.arange(1, VALUES + 1, dtype=np.uint64) + np.uint64(stream << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    fraction, exponent = z & np.uint64(0x807FFFFF), np.uint64(115) + (z >> np.uint64(60))
    return (fraction | (exponent << np.uint64(23))).astype(np.uint32).view(np.float32)


def main() -> None:
    hasher = blake3()
    anchor, *locals_ = (numbers(stream) for stream in range(4))
    deltas = []
    for local in locals_:
        deltas.append(np.empty_like(anchor))
        pseudo_gradient(anchor, local, deltas[-1])
    mean = np.empty_like(anchor)
    weighted_mean(deltas, WEIGHTS, mean)
    hasher.update(mean.tobytes())

    gradients = []
    for name in ("fp32", "bf16", "int8"):
        codec = codec_for(name)
        data = codec.encode(mean, SEGMENTS)
        gradients.append(np.empty_like(mean))
        codec.decode(data, SEGMENTS, gradients[-1])
        hasher.update(data)
        hasher.update(gradients[-1].tobytes())

    for name in ("average", "sgd", "nesterov", "adam", "yogi"):
        transform, current = transform_for(name), anchor
        state: State = tuple(np.empty_like(anchor) for _ in transform.state_names)
        transform.init(state)
        for gradient in gradients[1:]:
            new, new_state = np.empty_like(anchor), tuple(np.empty_like(anchor) for _ in state)
            hyper = Hyper(lr=0.7, momentum=0.9)
            transform.update(current, gradient, state, hyper, new, new_state)
            current, state = new, new_state
        hasher.update(state_digest(current, state))

    report = {
        "round": hasher.hexdigest(),
        "exp": blake3(np.exp(anchor).tobytes()).hexdigest(),
        "levels": {name: features.__cpu_features__[name] for name in features.__cpu_dispatch__},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
