"""The `atoll` command. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import os
import sys

from atoll.cli import app
from atoll.process import fail
from protocol.errors import AtollError


def main() -> None:
    if sys.platform != "linux":
        print(
            "error: Atoll runs on Linux (memfd, network namespaces). Elsewhere use a Linux container "
            "or, on Windows, WSL2",
            file=sys.stderr,
        )
        sys.exit(1)
    # What it would print is in our own error lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except AtollError as error:
        fail(error)


if __name__ == "__main__":
    main()
