"""`python -m node.launcher COMMAND...`: becomes COMMAND, which then dies with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(sign: signal.Signals) -> None:
    """Asks the kernel to send `sign` to this process when its parent ends, whatever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sign)


def main() -> None:
    die_with_parent(signal.SIGTERM)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
