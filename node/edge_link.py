"""The trainer's end of the unix socket: blocking, one message at a time.

Whatever ends the connection becomes one DaemonLost. A blocked `receive` can be interrupted by a signal
handler that raises, so Ctrl-C and SIGTERM never hang on a silent daemon.
"""

from __future__ import annotations

import os
import socket

from node.edge_messages import MAX_LINE_BYTES, Message, decode, encode
from protocol.errors import TransportError

CHUNK_BYTES = 1 << 16
MAX_DESCRIPTORS_PER_CALL = 253  # SCM_MAX_FD of Linux


class DaemonLost(TransportError):
    """The island's daemon cannot be reached or has gone; the trainer cannot go on without it."""


class EdgeLink:
    """Messages in order; file descriptors that came along wait for `take_descriptors`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rest = b""
        self._descriptors: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise self._lost(error) from None

    def send(self, message: Message) -> None:
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            raise self._lost(error) from None

    def receive(self) -> Message:
        """Waits for the next message. Raises DaemonLost at the end of the stream."""
        pieces = [self._rest]
        size_bytes = len(self._rest)
        while b"\n" not in pieces[-1]:
            pieces.append(self._read())
            size_bytes += len(pieces[-1])
            if size_bytes > MAX_LINE_BYTES + CHUNK_BYTES:
                raise DaemonLost(f"{self._path}: a line of more than {MAX_LINE_BYTES} bytes")
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        try:
            return decode(line)
        except ValueError as error:
            raise DaemonLost(f"{self._path}: the daemon speaks another language: {error}") from None

    def take_descriptors(self, count: int) -> list[int]:
        """The next `count` descriptors, in the order they were sent; now the caller's to close."""
        if len(self._descriptors) < count:
            raise DaemonLost(f"{self._path}: the daemon sent too few file descriptors")
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return taken

    def _read(self) -> bytes:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, CHUNK_BYTES, MAX_DESCRIPTORS_PER_CALL, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise self._lost(error) from None
        self._descriptors += descriptors
        if not data:
            raise DaemonLost(f"{self._path}: the daemon closed the connection")
        return data

    def _lost(self, error: OSError) -> DaemonLost:
        reason = error.strerror or str(error)
        return DaemonLost(f"{self._path}: the daemon cannot be reached: {reason}")

    def close(self) -> None:
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())
