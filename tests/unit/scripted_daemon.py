"""A daemon that answers a trainer by a script, at the other end of a real socket and real shared memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from node.edge_messages import (
    Apply,
    Boundary,
    FragmentLayout,
    Message,
    TensorSlot,
    Welcome,
    decode,
    encode,
)
from node.parameters import Models, trained_parameters
from node.shared_buffer import SharedBuffer

Answer = Callable[["Daemon", Boundary], Message | None]


class Daemon:
    """One fragment, one trainer; answers each boundary with the next of `answers`.

    An answer of None closes the connection. `heard` is complete after `join`.
    """

    def __init__(self, path: Path, model: Models) -> None:
        self.heard: list[Message] = []
        self.answers: list[Answer] = []
        self.greeting: Message | None = None
        tensors, offset = [], 0
        for name, parameter in trained_parameters(model).items():
            tensors.append(TensorSlot(name, offset, parameter.numel()))
            offset += parameter.numel()
        self.fragment = FragmentLayout(offset, tuple(tensors))
        self.buffers = [SharedBuffer.create("test", offset) for _ in range(3)]
        self.slot = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def snapshot(self) -> np.ndarray:
        return self.buffers[0].values

    def anchor(self, slot: int) -> np.ndarray:
        return self.buffers[1 + slot].values

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._listener.close()
        for buffer in self.buffers:
            buffer.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as lines:
            self.heard.append(decode(lines.readline()))
            greeting = self.greeting or self.welcome()
            fds = [buffer.fd for buffer in self.buffers] if isinstance(greeting, Welcome) else []
            line = encode(greeting)
            socket.send_fds(connection, [line[:1]], fds)
            connection.sendall(line[1:])
            for line in lines:
                self.heard.append(decode(line))
                if not isinstance(self.heard[-1], Boundary):
                    continue
                answer = self.answers.pop(0)(self, self.heard[-1])
                if answer is None:
                    return
                connection.sendall(encode(answer))

    def welcome(self, **changes: object) -> Welcome:
        fields = {
            "fragments": (self.fragment,),
            "anchor_slot": (self.slot,),
            "round": 0,
            "first_step": 0,
            "next_edge_step": 2,
            "next_fragment": 0,
            "committed_tokens": 0,
            "islands": 4,
            "index": 1,
            "evaluate": False,
            "warmup_tokens": 0,
            "target_tokens": 1_000,
            "min_lr_ratio": 0.1,
        }
        return Welcome(**(fields | changes))  # type: ignore[arg-type]

    def apply(self, boundary: Boundary, **changes: object) -> Apply:
        fields = {
            "sequence": boundary.sequence,
            "fragment": 0,
            "round": 1,
            "ref": "snapshot",
            "anchor_slot": 1 - self.slot,
            "next_edge_step": boundary.step + 2,
            "next_fragment": 0,
            "committed_tokens": 100,
            "islands": 4,
            "evaluate": False,
            "last": False,
        }
        self.slot = 1 - self.slot
        return Apply(**(fields | changes))  # type: ignore[arg-type]
