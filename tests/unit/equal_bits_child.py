"""Run by test_outer_equal_bits.py: computes one of everything and prints digests as a line of JSON.

Inputs come from integer arithmetic alone, so that they are the same on every CPU.
"""

import json

import numpy as np
from blake3 import blake3
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from outer_optimizer.aggregate import weighted_mean
from outer_optimizer.codec import codec_for
from outer_optimizer.digest import state_digest
from outer_optimizer.optimizer import transform_for
from outer_optimizer.transform import FloatArray, Hyper

VALUES = 1_000_003
SEGMENTS = (700_000, 0, 1, 300_001, 1)


def scrambled(seed: int) -> FloatArray:
    """Values in [-1, 1) with 24 random bits: splitmix64 of their index."""
    z = np.arange(VALUES, dtype=np.uint64) + np.uint64(seed << 32)
    z *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    whole = (z >> np.uint64(40)).astype(np.int32) - (1 << 23)
    return whole.astype(np.float32) / np.float32(1 << 23)


def agreed() -> dict[str, str]:
    """Digest of each thing that islands agree on."""
    digests = {}
    contributions = [scrambled(seed) for seed in range(3)]
    gradient = np.empty(VALUES, np.float32)
    weighted_mean(contributions, [np.float32(w) for w in (0.71, 0.22, 0.07)], gradient)
    digests["mean"] = state_digest(gradient, ())
    for name in ("average", "sgd", "nesterov", "adam", "yogi"):
        transform = transform_for(name)
        anchor = scrambled(3)
        state = tuple(np.empty(VALUES, np.float32) for _ in transform.state_names)
        transform.init(state)
        for g in (gradient, contributions[0]):
            new_anchor = np.empty_like(anchor)
            new_state = tuple(np.empty_like(array) for array in state)
            transform.update(anchor, g, state, Hyper(0.7, 0.9), new_anchor, new_state)
            anchor, state = new_anchor, new_state
        digests[name] = state_digest(anchor, state)
    for name in ("fp32", "bf16", "int8"):
        encoded = codec_for(name).encode(gradient, SEGMENTS)
        decoded = np.empty_like(gradient)
        codec_for(name).decode(encoded, SEGMENTS, decoded)
        digests[name] = blake3(encoded + decoded.tobytes()).digest()
    return {name: digest.hex() for name, digest in digests.items()}


def main() -> None:
    report = {
        "inputs": state_digest(scrambled(0), ()).hex(),
        "agreed": agreed(),
        "exp": state_digest(np.exp(scrambled(0)), ()).hex(),
        "simd": [name for name in __cpu_dispatch__ if __cpu_features__[name]],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
