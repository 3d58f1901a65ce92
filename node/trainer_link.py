"""The daemon's end of the unix socket: one trainer at a time, messages into a callback.

The ranks behind a trainer's first one connect once each and are served the same descriptors.

The socket lies in the state directory (mode 0700), or in a private temporary directory where the path
would be too long for the kernel.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from node.edge_messages import (
    MAX_LINE_BYTES,
    Buffers,
    Follow,
    Hello,
    Message,
    Refused,
    decode,
    encode,
)

log = structlog.get_logger()

_MAX_PATH_BYTES = 100
_MAX_DESCRIPTORS_PER_CALL = 200
_READ_BYTES = 1 << 16
_BACKLOG = 1_024  # all ranks of a large island connect at once


OnMessage = Callable[[Message | None], None]


class TrainerLink:
    def __init__(self, state: Path) -> None:
        self._temporary: str | None = None
        self.path = str(state / "trainer.sock")
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            self._temporary = tempfile.mkdtemp(prefix="atoll-")
            self.path = f"{self._temporary}/trainer.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        Path(self.path).unlink(missing_ok=True)
        self._listener.bind(self.path)
        os.chmod(self.path, 0o600)
        self._listener.listen(_BACKLOG)
        self._connection: socket.socket | None = None
        self._greeters: dict[str, socket.socket] = {}  # whose Hello waits to be answered
        self._incarnation = ""
        self._descriptors: Sequence[int] = ()

    async def run(self, on_message: OnMessage) -> None:
        """Serves ranks until cancelled; None says that the present trainer has gone."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as serving:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                serving.create_task(self._serve(connection, on_message))

    async def _serve(self, connection: socket.socket, on_message: OnMessage) -> None:
        try:
            async for message in _messages(connection):
                if isinstance(message, Follow):
                    await self._serve_follower(connection, message)
                    continue
                if isinstance(message, Hello):
                    self._greeters[message.incarnation] = connection
                elif connection is not self._connection:
                    continue  # of a trainer that another has replaced
                on_message(message)
        except ConnectionResetError:
            pass  # the end of a process that had not read all of ours
        except (OSError, ValueError) as error:
            log.error("trainer_link", reason=str(error))
        finally:
            connection.close()
            self._greeters = {k: c for k, c in self._greeters.items() if c is not connection}
            if connection is self._connection:
                self._connection = None
                on_message(None)

    async def _serve_follower(self, connection: socket.socket, message: Follow) -> None:
        if message.incarnation == self._incarnation:
            await _send(connection, Buffers(len(self._descriptors)), self._descriptors)
        else:
            await _send(connection, Refused("this daemon serves another trainer"))

    def turn_to(self, incarnation: str) -> None:
        """From now on `send` speaks to the trainer that said Hello as `incarnation`, if it is still there."""
        self._incarnation = incarnation
        old, self._connection = self._connection, self._greeters.pop(incarnation, None)
        if old is not None:
            with suppress(OSError):
                old.shutdown(socket.SHUT_RDWR)  # an orphan that still trains ends at its next edge

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """To the present trainer; without one the message is dropped: the next one says Hello.

        `descriptors` are then also those that the trainer's other ranks get.
        """
        if descriptors:
            self._descriptors = descriptors
        if self._connection is not None:
            await _send(self._connection, message, descriptors)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


async def _messages(connection: socket.socket) -> AsyncIterator[Message]:
    """Raises ValueError on whatever is not a message."""
    loop, rest = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(connection, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            yield decode(line)


async def _send(
    connection: socket.socket, message: Message, descriptors: Sequence[int] = ()
) -> None:
    data = encode(message)
    try:
        for first in range(0, len(descriptors), _MAX_DESCRIPTORS_PER_CALL):
            batch = descriptors[first : first + _MAX_DESCRIPTORS_PER_CALL]
            socket.send_fds(connection, [data[:1]], batch)
            data = data[1:]
        await asyncio.get_running_loop().sock_sendall(connection, data)
    except OSError as error:
        log.warning("trainer_gone", reason=error.strerror)
