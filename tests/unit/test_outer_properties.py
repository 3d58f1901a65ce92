"""Independence of cells and segments for any cut, and codecs where their rounding is at its worst."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outer_optimizer.codec import codec_for
from outer_optimizer.codec_int8 import BLOCK_VALUES
from outer_optimizer.optimizer import transform_for
from outer_optimizer.transform import FloatArray, Hyper, State

f32 = np.float32
values_of = hnp.arrays(f32, st.integers(1, 60), elements=st.floats(-1e6, 1e6, width=32))


@pytest.mark.parametrize("name", ["average", "sgd", "nesterov", "adam", "yogi"])
@settings(max_examples=40, deadline=None)
@given(anchor=values_of, data=st.data())
def test_any_cut_into_cells_gives_the_bits_of_the_whole(
    name: str, anchor: FloatArray, data: st.DataObject
) -> None:
    transform, hyper = transform_for(name), Hyper(lr=0.7, momentum=0.9)
    gradient = anchor[::-1] * f32(0.1)
    state: State = tuple(np.abs(anchor) * f32(0.01) for _ in transform.state_names)
    cuts = sorted(data.draw(st.lists(st.integers(0, anchor.size), max_size=6)))

    def results(bounds: list[int]) -> list[bytes]:
        new = tuple(np.full_like(anchor, np.nan) for _ in (anchor, *state))
        for start, end in zip(bounds, bounds[1:], strict=False):
            at = slice(start, end)
            old_state, new_state = (tuple(a[at] for a in arrays) for arrays in (state, new[1:]))
            transform.update(anchor[at], gradient[at], old_state, hyper, new[0][at], new_state)
        return [array.tobytes() for array in new]

    assert results([0, *cuts, anchor.size]) == results([0, anchor.size])


@settings(max_examples=60, deadline=None)
@given(values_of, st.floats(0, 2))
def test_nesterov_with_zero_momentum_is_sgd_bit_for_bit(anchor: FloatArray, lr: float) -> None:
    gradient, hyper = anchor[::-1] * f32(0.37) + f32(0.0), Hyper(lr, momentum=0.0)  # -0 becomes 0
    sgd, nesterov = np.empty_like(anchor), np.empty_like(anchor)
    transform_for("sgd").update(anchor, gradient, (), hyper, sgd, ())
    buffer, new_buffer = anchor.copy(), np.empty_like(anchor)
    transform_for("nesterov").update(anchor, gradient, (buffer,), hyper, nesterov, (new_buffer,))
    assert nesterov.tobytes() == sgd.tobytes()


def by_segment(data: bytes, segments: tuple[int, ...]) -> list[tuple[bytes, bytes]]:
    """Scales and codes of each segment, read from the int8 wire without the codec's help."""
    blocks = [-(-length // BLOCK_VALUES) for length in segments]
    pieces, scale_at, code_at = [], 0, 4 * sum(blocks)
    for count, length in zip(blocks, segments, strict=True):
        scales = data[scale_at : scale_at + 4 * count]
        pieces.append((scales, data[code_at : code_at + length]))
        scale_at, code_at = scale_at + 4 * count, code_at + length
    return pieces


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 3, 511, 512, 513, 1100]), min_size=1, max_size=5).map(tuple),
    values_of,
    st.data(),
)
def test_int8_segments_are_encoded_each_by_itself(
    segments: tuple[int, ...], pattern: FloatArray, data: st.DataObject
) -> None:
    codec, changed = codec_for("int8"), data.draw(st.integers(0, len(segments) - 1))
    values = np.resize(pattern, sum(segments)).astype(f32)
    altered = values.copy()
    altered[sum(segments[:changed]) : sum(segments[: changed + 1])] += f32(3e6)
    before, after = (by_segment(codec.encode(v, segments), segments) for v in (values, altered))
    differing = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert differing == ([changed] if segments[changed] else [])


def test_bf16_rounds_every_tie_to_the_even_neighbour_and_its_neighbours_to_the_nearest() -> None:
    uppers = np.arange(0x7F7F, dtype=np.uint32)  # all finite magnitudes but the largest
    for dropped, expected in (
        (0x7FFF, uppers),
        (0x8000, uppers + uppers % 2),
        (0x8001, uppers + 1),
    ):
        values = (uppers << np.uint32(16) | np.uint32(dropped)).view(f32)
        for sign, signed in ((0, values), (0x8000, -values)):
            data = codec_for("bf16").encode(signed, (values.size,))
            assert np.array_equal(np.frombuffer(data, "<u2"), expected | sign)


def test_int8_error_bound_holds_within_a_few_ulp_of_every_half_code() -> None:
    halves = np.tile(np.arange(127).astype(f32) + f32(0.5), 4)
    steps = np.repeat(np.array([-1, 0, 1, 2], np.int32), 127)
    excess = 0.0
    for absmax in np.linspace(1, 2, 200, endpoint=False).astype(f32):
        scale = absmax / f32(127)
        near = ((halves * scale).view(np.int32) + steps).view(f32)
        values = np.concatenate([np.array([absmax], f32), near])
        out, codec = np.empty_like(values), codec_for("int8")
        codec.decode(codec.encode(values, (values.size,)), (values.size,), out)
        error = np.abs(out.astype(np.float64) - values.astype(np.float64)).max()
        excess = max(excess, error / (float(scale) / 2) - 1)
    assert 2.0**-20 < excess <= 2.0**-15  # the bound holds, and rounding does use some of it
