"""A flat fp32 vector that two processes share.

The memory is anonymous (memfd): it has a descriptor but no name, so nothing is left behind whatever ends
the processes. Its size is sealed, so no holder can shrink it under another. All pages are there from the
start: a boundary never waits for the kernel to find memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

VALUE_BYTES = 4


class SharedBuffer:
    """`values` is the vector, `fd` the descriptor to send; both are this object's to close."""

    def __init__(self, fd: int, values: int) -> None:
        self.fd = fd
        memory = mmap.mmap(fd, values * VALUE_BYTES, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.values: npt.NDArray[np.float32] = np.frombuffer(memory, np.float32)

    @classmethod
    def create(cls, name: str, values: int) -> SharedBuffer:
        """A zeroed buffer; `name` only shows in /proc, for people."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, values * VALUE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(fd, values)

    @classmethod
    def open(cls, fd: int, values: int) -> SharedBuffer:
        """Maps a received descriptor. Raises ValueError if its size is not that of `values`."""
        size_bytes = os.fstat(fd).st_size
        if size_bytes != values * VALUE_BYTES:
            raise ValueError(
                f"a shared buffer of {size_bytes} bytes does not hold {values} fp32 values"
            )
        return cls(fd, values)

    def close(self) -> None:
        """The memory itself goes with the last view of `values`, here and in the other process."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.values = self.values[:0].copy()
