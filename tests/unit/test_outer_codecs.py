"""Codecs cover a cell exactly, within their stated error, and take nothing but encoded cells back."""

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outer_optimizer.codec import Codec, codec_for
from outer_optimizer.encoding import BadEncoding
from outer_optimizer.finite import NonFinite
from outer_optimizer.transform import FloatArray

NAMES = ("fp32", "bf16", "int8")
LARGEST = float(np.finfo(np.float32).max)
BLOCK = 512

lengths = st.one_of(st.integers(0, 3), st.sampled_from([511, 512, 513, 1024, 1300]))
segment_tuples = st.lists(lengths, max_size=5).map(tuple)
magnitudes = st.sampled_from([0.0, 1e-45, 1e-38, 2.0**-100, 1e-29, 1e-6, 1.0, 1e20, LARGEST])
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def cells(draw: st.DrawFn) -> tuple[FloatArray, tuple[int, ...]]:
    """Random values at one magnitude per segment, with a few arbitrary finite ones among them."""
    segments = draw(segment_tuples)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts = [draw(magnitudes) * rng.uniform(-1, 1, length) for length in segments]
    values = np.concatenate([np.zeros(0), *parts]).astype(np.float32)
    for value in draw(st.lists(finite, max_size=3)) if values.size else []:
        values[rng.integers(values.size)] = value
    return values, segments


def there_and_back(codec: Codec, values: FloatArray, segments: tuple[int, ...]) -> FloatArray:
    out = np.full_like(values, np.nan)
    codec.decode(codec.encode(values, segments), segments, out)
    return out


def bf16_reference(value: float) -> float:
    """The nearest bf16, ties to the even one, saturating; by search among its neighbours."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    below = bits >> 16
    candidates = [c for c in (below, below + 1) if c & 0x7FFF <= 0x7F7F]
    decoded = {c: struct.unpack("<f", struct.pack("<I", c << 16))[0] for c in candidates}
    nearest = min(candidates, key=lambda c: (abs(Fraction(decoded[c]) - Fraction(value)), c & 1))
    return float(decoded[nearest])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(cell=cells())
def test_the_size_is_known_beforehand_and_every_value_is_covered(
    name: str, cell: tuple[FloatArray, tuple[int, ...]]
) -> None:
    (values, segments), codec = cell, codec_for(name)
    values.flags.writeable = False  # encode leaves its input alone
    data = codec.encode(values, segments)
    assert len(data) == codec.encoded_bytes(segments)
    out = np.full_like(values, np.nan)
    codec.decode(memoryview(data), segments, out)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(cell=cells())
def test_there_and_back_twice_is_the_same_as_once(
    name: str, cell: tuple[FloatArray, tuple[int, ...]]
) -> None:
    (values, segments), codec = cell, codec_for(name)
    once = there_and_back(codec, values, segments)
    assert there_and_back(codec, once, segments).tobytes() == once.tobytes()


@settings(max_examples=60, deadline=None)
@given(cell=cells())
def test_fp32_is_exact_and_little_endian(cell: tuple[FloatArray, tuple[int, ...]]) -> None:
    values, segments = cell
    codec = codec_for("fp32")
    assert codec.encode(values, segments) == struct.pack(f"<{values.size}f", *values)
    assert there_and_back(codec, values, segments).tobytes() == values.tobytes()


@settings(max_examples=200, deadline=None)
@given(st.lists(finite, max_size=20))
def test_bf16_rounds_to_the_nearest_even(many: list[float]) -> None:
    values = np.array(many, np.float32)
    decoded = there_and_back(codec_for("bf16"), values, (values.size,))
    assert decoded.tolist() == [bf16_reference(value) for value in many]


def test_bf16_ties_go_to_the_even_neighbour_and_nothing_becomes_infinite() -> None:
    steps = [1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256, LARGEST, -LARGEST, -0.0]
    decoded = there_and_back(codec_for("bf16"), np.array(steps, np.float32), (6,))
    largest = (2 - 2.0**-7) * 2.0**127
    expected = [1.0, 1 + 2 / 128, -1.0, largest, -largest, -0.0]
    assert decoded.tobytes() == np.array(expected, np.float32).tobytes()


@settings(max_examples=60, deadline=None)
@given(cell=cells())
def test_bf16_error_is_bounded(cell: tuple[FloatArray, tuple[int, ...]]) -> None:
    values, segments = cell
    decoded = there_and_back(codec_for("bf16"), values, segments)
    error = np.abs(decoded.astype(np.float64) - values)
    assert (error <= np.maximum(2.0**-8 * np.abs(values.astype(np.float64)), 2.0**-134)).all()


@settings(max_examples=100, deadline=None)
@given(cell=cells())
def test_int8_error_is_half_a_step_of_the_values_own_block(
    cell: tuple[FloatArray, tuple[int, ...]],
) -> None:
    values, segments = cell
    decoded = there_and_back(codec_for("int8"), values, segments)
    begin = 0
    for length in segments:
        for start in range(begin, begin + length, BLOCK):
            at = slice(start, min(start + BLOCK, begin + length))
            block = values[at].astype(np.float64)
            absmax = np.abs(block).max()
            bound = absmax if absmax < 2.0**-100 else absmax / 127 / 2 * (1 + 2.0**-15)
            assert np.abs(decoded[at] - block).max() <= bound
        begin += length


def test_int8_wire_is_all_scales_then_all_codes() -> None:
    values = np.zeros(BLOCK + 3, np.float32)
    values[:3] = 127.0, -63.5, 2.5  # scale 1; ties to even: -64 and 2
    values[BLOCK] = 254.0  # a second block in the same segment: scale 2
    values[BLOCK + 1] = -0.5  # a second segment of one value: scale 0.5 / 127
    values[BLOCK + 2] = 0.0  # a third one, all zero: scale 0
    data = codec_for("int8").encode(values, (BLOCK + 1, 1, 1))
    codes = [127, -64, 2, *[0] * (BLOCK - 3), 127, -127, 0]
    tiny = float(np.float32(0.5) / np.float32(127))
    assert data == struct.pack(f"<4f{len(codes)}b", 1.0, 2.0, tiny, 0.0, *codes)


def test_int8_blocks_restart_at_each_segment() -> None:
    values = np.array([1000.0, 1e-3, 2e-3], np.float32)
    decoded = there_and_back(codec_for("int8"), values, (1, 2))
    np.testing.assert_allclose(decoded, values, rtol=0.01)


def test_int8_of_the_largest_values_stays_finite_and_bounded() -> None:
    values = np.array([LARGEST, -LARGEST], np.float32)
    decoded = there_and_back(codec_for("int8"), values, (2,))
    np.testing.assert_allclose(decoded, values, rtol=1e-6)


@pytest.mark.parametrize("absmax", [2.0**-149, 180 * 2.0**-149, 2.0**-100 * (1 - 2.0**-24)])
def test_int8_makes_zeros_of_a_block_that_is_negligible(absmax: float) -> None:
    # 180 of the smallest denormal would have the scale 1 of them and the code 180, which is no int8.
    values = np.array([absmax, -absmax / 2], np.float32)
    assert there_and_back(codec_for("int8"), values, (2,)).tolist() == [0.0, 0.0]


def test_int8_keeps_a_block_from_2_to_the_minus_100_on() -> None:
    values = np.array([2.0**-100], np.float32)
    assert there_and_back(codec_for("int8"), values, (1,)).tolist() == [2.0**-100]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_codec_encodes_what_is_not_finite(name: str, bad: float) -> None:
    with pytest.raises(NonFinite, match="value 2 "):
        codec_for(name).encode(np.array([1, 2, bad, 3], np.float32), (4,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_a_wrong_length_is_refused_before_anything_is_written(name: str, change: int) -> None:
    codec, out = codec_for(name), np.full(600, 7, np.float32)
    with pytest.raises(BadEncoding, match="bytes"):
        codec.decode(bytes(codec.encoded_bytes((600,)) + change), (600,), out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        *(("fp32", struct.pack("<f", bad)) for bad in (np.nan, np.inf, -np.inf)),
        *(("bf16", struct.pack("<H", bad)) for bad in (0x7F80, 0x7FC0, 0xFF80, 0xFFFF)),
        *(("int8", struct.pack("<fb", bad, 1)) for bad in (np.nan, np.inf, -1.0, LARGEST / 127)),
        ("int8", struct.pack("<fb", 1.0, -128)),
    ],
)
def test_content_that_no_encoder_makes_is_refused(name: str, data: bytes) -> None:
    out = np.full(1, 7, np.float32)
    with pytest.raises(BadEncoding):
        codec_for(name).decode(data, (1,), out)
    assert out == 7


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_is_found_by_its_name(name: str) -> None:
    assert codec_for(name).name == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'int4': fp32, bf16 or int8"):
        codec_for("int4")
