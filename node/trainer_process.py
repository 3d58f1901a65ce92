"""The island's ranks: one torchrun, in a session of its own, that ends with the daemon.

The launcher asks the kernel for SIGTERM when its parent dies, so not even kill -9 of the daemon leaves a
trainer behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from protocol.errors import TrainerFailed

log = structlog.get_logger()

_TERM_GRACE_S = 5.0
_TAIL_BYTES = 1 << 16
_ERROR = re.compile(
    r"(\[\w+\]:)?\s*(error: |[\w.]*(Error|Exception|Lost|Broken|Mismatch|Failed): )"
)
_MONITOR_S = 0.1  # between torchrun's looks at its ranks


def torchrun_command(log_dir: Path, ranks: int, restarts: int) -> list[str]:
    """torchrun with the built-in trainer; its own folders go below `log_dir`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    options = [
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        f"--monitor-interval={_MONITOR_S}",
        f"--log-dir={log_dir}",
    ]
    return [sys.executable, "-P", *torchrun, *options, "-m", "node.trainer"]


class TrainerProcess:
    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self._command, self._environment, self._log_path = command, environment, log_path
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Starts it and waits for its end. Raises TrainerFailed unless it ends well."""
        launcher = [sys.executable, "-P", "-m", "node.launcher", *self._command]
        output = os.open(
            self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        began = os.fstat(output).st_size
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launcher,
                env={**os.environ, **self._environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            os.close(output)
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever it has left behind
        if code:
            last = _last_line(self._log_path, began)
            raise TrainerFailed(
                f"the trainer ended with code {code}: {last} (all of it: {self._log_path})"
            )

    async def stop(self) -> None:
        """SIGTERM to the whole session, SIGKILL if it takes too long."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            try:
                async with asyncio.timeout(_TERM_GRACE_S):
                    await process.wait()
                    return
            except TimeoutError:
                log.warning("trainer_slow_to_stop", sent=sign.name)


def _last_line(path: Path, began: int) -> str:
    """The line that says why: the last one since byte `began` that names an error, else the last one."""
    with open(path, "rb") as log_file:
        size = log_file.seek(0, os.SEEK_END)
        log_file.seek(max(began, size - _TAIL_BYTES))
        text = log_file.read(_TAIL_BYTES).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip(" =-")]
    named = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    return (named or lines or ["no output"])[-1].strip()[:500]
