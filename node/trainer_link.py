"""The daemon's end of the unix socket: one trainer at a time, messages into a callback.

The socket lies in the state directory (mode 0700), or in a private temporary directory where the path
would be too long for the kernel.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from node.edge_messages import MAX_LINE_BYTES, Message, decode, encode

log = structlog.get_logger()

_MAX_PATH_BYTES = 100
_MAX_DESCRIPTORS_PER_CALL = 200
_READ_BYTES = 1 << 16


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
        self._listener.listen(4)
        self._connection: socket.socket | None = None

    async def run(self, on_message: OnMessage) -> None:
        """Serves one trainer after the other, until cancelled; None says that one has gone."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            self._connection = connection
            try:
                await self._read(connection, on_message)
            except (OSError, ValueError) as error:
                log.error("trainer_link", reason=str(error))
            finally:
                self._connection = None
                connection.close()
                on_message(None)

    async def _read(self, connection: socket.socket, on_message: OnMessage) -> None:
        loop, rest = asyncio.get_running_loop(), b""
        while data := await loop.sock_recv(connection, _READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
            for line in lines:
                on_message(decode(line))

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """To the present trainer; without one the message is dropped: the next one says Hello."""
        connection = self._connection
        if connection is None:
            return
        data = encode(message)
        try:
            for first in range(0, len(descriptors), _MAX_DESCRIPTORS_PER_CALL):
                batch = descriptors[first : first + _MAX_DESCRIPTORS_PER_CALL]
                socket.send_fds(connection, [data[:1]], batch)
                data = data[1:]
            await asyncio.get_running_loop().sock_sendall(connection, data)
        except OSError as error:
            log.warning("trainer_gone", reason=error.strerror)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
