"""Codecs: exact sizes, documented error bounds, segments kept apart, bad bytes refused untouched."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outer_optimizer.codec import Codec, codec_for
from outer_optimizer.codec_int8 import BLOCK_VALUES
from outer_optimizer.encoding import BadEncoding
from outer_optimizer.finite import NonFinite
from outer_optimizer.transform import FloatArray

NAMES = ("fp32", "bf16", "int8")
LARGEST = float(np.finfo(np.float32).max)
f32 = np.float32

lengths = st.one_of(
    st.sampled_from([0, 1, 511, 512, 513, 1024, 1025]), st.integers(0, 40), st.integers(0, 1500)
)
splits = st.lists(lengths, max_size=5).map(tuple)
finite = st.floats(-LARGEST, LARGEST, width=32)
normal_sized = st.floats(-1000, 1000, width=32)


@st.composite
def cells(
    draw: st.DrawFn, elements: st.SearchStrategy[float] = finite
) -> tuple[FloatArray, tuple[int, ...]]:
    """A few drawn values, repeated with varying factors so that long cells stay cheap to draw."""
    segments = draw(splits)
    seed = draw(hnp.arrays(f32, st.integers(1, 24), elements=elements))
    values = np.resize(seed, sum(segments)).astype(f32)
    values *= (np.arange(values.size) % 97 + 1).astype(f32) / f32(97)
    return values, segments


def decoded(codec: Codec, data: bytes, segments: tuple[int, ...]) -> FloatArray:
    out = np.full(sum(segments), np.nan, f32)
    codec.decode(data, segments, out)
    return out


def int8_scales(data: bytes, segments: tuple[int, ...]) -> FloatArray:
    """One scale per value, read from the wire without the codec's help."""
    sizes = [min(BLOCK_VALUES, n - at) for n in segments for at in range(0, n, BLOCK_VALUES)]
    return np.repeat(np.frombuffer(data, "<f4", len(sizes)), sizes)


@pytest.mark.parametrize("name", NAMES)
@given(cell=cells())
def test_an_encoded_cell_has_the_promised_size_and_decodes_to_finite_values(
    name: str, cell: tuple[FloatArray, tuple[int, ...]]
) -> None:
    values, segments = cell
    codec = codec_for(name)
    data = codec.encode(values, segments)
    assert len(data) == codec.encoded_bytes(segments)
    assert np.isfinite(decoded(codec, data, segments)).all()
    codec.decode(memoryview(data), segments, np.empty_like(values))


def test_sizes_are_those_of_the_wire_formats() -> None:
    segments = (0, 1, 512, 513)
    assert codec_for("fp32").encoded_bytes(segments) == 4 * 1026
    assert codec_for("bf16").encoded_bytes(segments) == 2 * 1026
    assert codec_for("int8").encoded_bytes(segments) == 1026 + 4 * (0 + 1 + 1 + 2)


@pytest.mark.parametrize("name", NAMES)
@given(cell=cells())
def test_encoding_what_was_decoded_gives_the_same_bytes(
    name: str, cell: tuple[FloatArray, tuple[int, ...]]
) -> None:
    values, segments = cell
    codec = codec_for(name)
    data = codec.encode(values, segments)
    assert codec.encode(decoded(codec, data, segments), segments) == data


@pytest.mark.parametrize("name", NAMES)
@given(cell=cells())
def test_encode_leaves_its_input_alone(name: str, cell: tuple[FloatArray, tuple[int, ...]]) -> None:
    values, segments = cell
    before = values.tobytes()
    values.flags.writeable = False
    codec_for(name).encode(values, segments)
    assert values.tobytes() == before


@given(cells())
def test_fp32_is_exact(cell: tuple[FloatArray, tuple[int, ...]]) -> None:
    values, segments = cell
    codec = codec_for("fp32")
    data = codec.encode(values, segments)
    assert data == values.astype("<f4").tobytes()
    assert decoded(codec, data, segments).tobytes() == values.tobytes()


def nearest_bf16(value: float) -> float:
    """Round to 8 significant bits, ties to even, by exact float64 arithmetic; saturating."""
    if value == 0:
        return value
    exponent = max(math.frexp(value)[1], -125)  # denormals keep the spacing of 2^-126
    spacing = math.ldexp(1.0, exponent - 8)
    largest = (2 - 2.0**-7) * 2.0**127
    return max(-largest, min(largest, round(value / spacing) * spacing))


ties = st.integers(0x0000, 0x7F7F).map(lambda upper: upper << 16 | 0x8000)
near_ties = st.builds(lambda bits, by: bits + by, ties, st.integers(-2, 2))
bit_patterns = st.builds(
    lambda bits, sign: float(np.array(min(bits, 0x7F7FFFFF) | sign, np.uint32).view(f32)),
    st.one_of(near_ties, st.integers(0, 0x7F7FFFFF)),
    st.sampled_from([0, 1 << 31]),
)


@given(st.lists(bit_patterns, min_size=1, max_size=50))
def test_bf16_rounds_to_nearest_even_and_saturates(many: list[float]) -> None:
    values = np.array(many, f32)
    codec = codec_for("bf16")
    out = decoded(codec, codec.encode(values, (len(many),)), (len(many),))
    assert out.tolist() == [nearest_bf16(v) for v in many]
    assert np.signbit(out).tolist() == np.signbit(values).tolist()


def test_bf16_rounds_every_tie_to_the_even_neighbour() -> None:
    uppers = np.arange(0x7F7F, dtype=np.uint32)
    values = (uppers << np.uint32(16) | np.uint32(0x8000)).view(f32)
    data = codec_for("bf16").encode(values, (values.size,))
    even = [upper + upper % 2 for upper in range(0x7F7F)]
    assert np.frombuffer(data, "<u2").tolist() == even


def test_bf16_keeps_the_largest_fp32_finite() -> None:
    codec = codec_for("bf16")
    out = decoded(codec, codec.encode(np.array([LARGEST, -LARGEST], f32), (2,)), (2,))
    assert out.tolist() == [nearest_bf16(LARGEST), -nearest_bf16(LARGEST)]


@given(cells())
def test_bf16_error_is_within_its_bound(cell: tuple[FloatArray, tuple[int, ...]]) -> None:
    values, segments = cell
    codec = codec_for("bf16")
    wide = values.astype(np.float64)
    error = np.abs(decoded(codec, codec.encode(values, segments), segments) - wide)
    assert np.all(error <= 2.0**-8 * np.maximum(np.abs(wide), 2.0**-126))


@given(cells(st.one_of(normal_sized, st.floats(-(2.0**126), 2.0**126, width=32))))
def test_int8_error_is_within_its_bound(cell: tuple[FloatArray, tuple[int, ...]]) -> None:
    values, segments = cell
    codec = codec_for("int8")
    data = codec.encode(values, segments)
    wide = values.astype(np.float64)
    error = np.abs(decoded(codec, data, segments).astype(np.float64) - wide)
    scale = int8_scales(data, segments).astype(np.float64)
    bound = np.where(scale > 0, scale / 2 * (1 + 2.0**-15), 2.0**-100)
    assert np.all(error <= bound)


def test_int8_of_the_largest_fp32_is_off_by_one_scale_at_most() -> None:
    values = np.array([LARGEST, -LARGEST, 1.0], f32)
    codec = codec_for("int8")
    data = codec.encode(values, (3,))
    error = np.abs(decoded(codec, data, (3,)).astype(np.float64) - values.astype(np.float64))
    assert np.all(error <= int8_scales(data, (3,)).astype(np.float64))


def test_int8_error_bound_holds_where_codes_change() -> None:
    """Values a few steps around every half code, where rounding twice hurts most."""
    codec = codec_for("int8")
    halves = np.repeat(np.arange(127) + f32(0.5), 4)[:511].astype(f32)
    for absmax in (1.0, 1.1, 1.7390123, 1.9999999):
        scale = f32(absmax) / f32(127)
        near = halves * scale
        for step in range(4):
            near[step::4] = (near.view(np.uint32)[step::4] + step - 1).view(f32)
        values = np.concatenate([np.array([absmax], f32), near])
        out = decoded(codec, codec.encode(values, (512,)), (512,))
        error = np.abs(out.astype(np.float64) - values.astype(np.float64))
        assert error.max() <= float(scale) / 2 * (1 + 2.0**-15)


def test_int8_of_negligible_blocks_is_zero_and_others_keep_their_absmax() -> None:
    codec = codec_for("int8")
    tiny, least = f32(2.0**-101), f32(2.0**-100)
    out = decoded(codec, codec.encode(np.array([tiny, -tiny, least, 0], f32), (2, 2)), (2, 2))
    assert out.tolist() == [0, 0, float(least), 0]


@given(cells(normal_sized), st.data())
def test_int8_blocks_restart_at_each_segment(
    cell: tuple[FloatArray, tuple[int, ...]], data: st.DataObject
) -> None:
    values, segments = cell
    changed = data.draw(st.integers(0, len(segments) - 1)) if segments else 0
    start, end = sum(segments[:changed]), sum(segments[: changed + 1])
    others = np.ones(values.size, bool)
    others[start:end] = False
    altered = values.copy()
    altered[start:end] = f32(50_000) - altered[start:end]
    codec = codec_for("int8")
    before, after = codec.encode(values, segments), codec.encode(altered, segments)
    assert (int8_scales(before, segments) == int8_scales(after, segments))[others].all()
    codes = [np.frombuffer(d, np.int8)[len(d) - values.size :] for d in (before, after)]
    assert (codes[0] == codes[1])[others].all()


def test_int8_gives_each_block_its_own_scale() -> None:
    values = np.concatenate([np.full(512, 127), np.full(1, 2540), np.full(3, 12.7)]).astype(f32)
    data = codec_for("int8").encode(values, (513, 0, 3))
    assert np.frombuffer(data, "<f4", 3).tolist() == [1, 20, float(f32(12.7) / f32(127))]
    assert set(data[12:]) == {127}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_naming_its_place(name: str, bad: float) -> None:
    values = np.ones(700, f32)
    values[613] = bad
    with pytest.raises(NonFinite, match="613"):
        codec_for(name).encode(values, (100, 600))


def refused_untouched(name: str, data: bytes, segments: tuple[int, ...]) -> None:
    out = np.full(sum(segments), 7, f32)
    with pytest.raises(BadEncoding):
        codec_for(name).decode(data, segments, out)
    assert (out == 7).all()


@pytest.mark.parametrize("name", NAMES)
@given(cell=cells(normal_sized), by=st.integers(-5, 5).filter(bool))
def test_a_wrong_length_is_refused(
    name: str, cell: tuple[FloatArray, tuple[int, ...]], by: int
) -> None:
    values, segments = cell
    data = codec_for(name).encode(values, segments)
    if by < -len(data):
        return
    refused_untouched(name, data[:by] if by < 0 else data + bytes(by), segments)


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_encoded_values_that_are_not_finite_are_refused(bits: int) -> None:
    refused_untouched("fp32", bytes(4) + bits.to_bytes(4, "little"), (2,))
    if bits >> 16 & 0x7F or not bits & 1:
        refused_untouched("bf16", bytes(2) + (bits >> 16).to_bytes(2, "little"), (1, 1))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, 2.0**121 * 1.0001, LARGEST])
def test_an_impossible_int8_scale_is_refused(scale: float) -> None:
    scales = np.array([1.0, scale], "<f4").tobytes()
    refused_untouched("int8", scales + bytes([1, 2, 3]), (1, 2))


def test_the_int8_code_no_encoder_writes_is_refused() -> None:
    scale = np.array([2.0**121], "<f4").tobytes()
    refused_untouched("int8", scale + bytes([1, 0x80]), (2,))
    out = decoded(codec_for("int8"), scale + bytes([0x7F, 0x81]), (2,))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_found_by_its_name(name: str) -> None:
    assert codec_for(name).name == name


def test_an_unknown_codec_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ValueError, match="fp8") as refusal:
        codec_for("fp8")
    assert all(name in str(refusal.value) for name in NAMES)
