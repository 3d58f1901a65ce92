"""From a coroutine to a process: log lines, signals, one line per error, a stable exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import structlog

from protocol.errors import AtollError

_INTERRUPTED = 130


def set_up_logging() -> None:
    """Human lines on a terminal, JSON otherwise, always to stderr."""
    renderer: Any = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def fail(error: AtollError) -> NoReturn:
    """The error's line on stderr, its exit code; never a traceback."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    sys.exit(error.exit_code)


def run_to_end(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs it; SIGINT and SIGTERM cancel it, so everything it started is stopped. Ends the process on
    an error or a signal."""
    set_up_logging()
    try:
        return asyncio.run(_with_signals(main))
    except AtollError as error:
        fail(error)
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        sys.exit(_INTERRUPTED)


async def _with_signals(main: Coroutine[Any, Any, Any]) -> Any:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    cancel: Callable[[], object] = task.cancel
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel)
    return await task
