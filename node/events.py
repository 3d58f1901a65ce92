"""What happened on this island, one JSON object per line, in `events.jsonl` of its state directory.

Times are seconds of the host's monotonic clock; reports are made from these files.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Events:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed by close)

    def write(self, event: str, **fields: Any) -> None:
        line = {"at_s": round(time.monotonic(), 4), "event": event, **fields}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()
