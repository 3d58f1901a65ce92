from __future__ import annotations

import pytest

from node.edge_messages import (
    MAX_LINE_BYTES,
    Applied,
    Apply,
    Boundary,
    Buffers,
    Evaluation,
    Follow,
    FragmentLayout,
    GoOn,
    Hello,
    Message,
    Refused,
    Stop,
    TensorSlot,
    Welcome,
    decode,
    encode,
)
from protocol.layout import TensorLayout

FRAGMENT = FragmentLayout(6, (TensorSlot("a.weight", 0, 6),))
MESSAGES: list[Message] = [
    Hello(
        "life", 7, (TensorLayout("a.weight", (2, 3), "float32"), TensorLayout("s", (), "bfloat16"))
    ),
    Boundary(1, "life", 0, 5, 640, 5, 2.5, 0.25, 0.0),
    Boundary(1, "life", 0, 5, 640, 5, None, 1, 0, (0.5, 0.75), {"forward": 0.25}, 2),
    Follow(3, "life"),
    Buffers(6),
    Applied(0, 3, 1),
    Evaluation(3, 1.75),
    Welcome((FRAGMENT, FRAGMENT), (0, 1), -1, 0, 5, 0, 0, 4, 1, True, 10, 100, 0.1),
    Apply(1, 0, 3, "anchor", 1, 10, 0, 2560, 4, False, False),
    GoOn(1, 10, 0),
    Refused("ä \n newline"),
    Stop(""),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_decode_is_the_inverse_of_encode_on_one_line(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not a JSON line"),
        (b"\xff", "not a JSON line"),
        (b"[" * 100_000, "not a JSON line"),
        (b"[]", "unknown message type"),
        (b'{"type":["Stop"]}', "unknown message type"),
        (b'{"type":"Dance"}', "unknown message type 'Dance'"),
        (b'{"type":"GoOn","sequence":1,"next_edge_step":2}', "GoOn: next_fragment: "),
        (b'{"type":"Stop","reason":"a","more":1}', "Stop: more: "),
        (b'{"type":"Stop","reason":1}', "Stop: reason: "),
        (b'{"type":"Applied","fragment":"0","round":1,"sequence":1}', "Applied: fragment: "),
    ],
)
def test_bad_input_is_a_value_error_of_one_line(line: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        decode(line)
    assert "\n" not in str(caught.value)


def test_a_reference_must_be_one_of_three() -> None:
    line = encode(next(m for m in MESSAGES if isinstance(m, Apply))).replace(b'"anchor"', b'"moon"')
    with pytest.raises(ValueError, match="Apply: ref: "):
        decode(line)


def test_a_line_over_16_mib_is_neither_sent_nor_read() -> None:
    with pytest.raises(ValueError, match="longer"):
        encode(Stop("x" * MAX_LINE_BYTES))
    with pytest.raises(ValueError, match="longer"):
        decode(b" " * (MAX_LINE_BYTES + 1))
