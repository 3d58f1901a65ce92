"""Every error a user or an operator can meet, in one tree.

    AtollError                    one line: what, which key / file / peer, how to mend
    ├── ConfigError          (2)  a spec, scenario or setting is wrong
    ├── RunMismatch          (3)  this node and the run disagree: spec, layout, owner
    ├── AddressInUse         (4)  a port is taken
    ├── StateLocked          (5)  another process holds the state directory
    ├── TransportError       (6)  the other side cannot be reached, or broke off
    │   ├── PeerUnreachable
    │   ├── StreamClosed
    │   └── BadFrame              bytes that are not what the protocol says
    ├── NotAdmitted          (7)  the coordinator answered no, and why
    ├── StaleTerm            (8)  another coordinator term rules
    ├── TrainerFailed        (9)  the trainer process ended or never came up
    ├── RunFailed           (10)  a simulation failed, or the start state could not be made
    └── InvariantBroken     (70)  a promise of the protocol does not hold: stop, never go on

The number is the process's exit code; it is stable. A lost peer is *data* to the round machine,
not an exception: exceptions here end a call, a stream or the process.
"""

from __future__ import annotations


class AtollError(Exception):
    """Base of the tree. `str(error)` is the one line to show; no traceback is needed with it."""

    exit_code = 1


class ConfigError(AtollError):
    exit_code = 2


class RunMismatch(AtollError):
    exit_code = 3


class AddressInUse(AtollError):
    exit_code = 4


class StateLocked(AtollError):
    exit_code = 5


class TransportError(AtollError):
    exit_code = 6


class PeerUnreachable(TransportError):
    """Nobody answers at the address, or not in time."""


class StreamClosed(TransportError):
    """The stream ended under a send or a receive."""


class BadFrame(TransportError):
    """A frame or message that does not decode, or lies about its size."""


class NotAdmitted(AtollError):
    exit_code = 7


class StaleTerm(AtollError):
    exit_code = 8


class TrainerFailed(AtollError):
    exit_code = 9


class RunFailed(AtollError):
    exit_code = 10


class InvariantBroken(AtollError):
    """Safety first: raised by explicit checks that stay on in production."""

    exit_code = 70
