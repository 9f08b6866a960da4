"""Opens and reads files that nobody vouches for: regular ones alone, without waiting, and never through a map.

Serves manifest, libraries and policy. What is opened is what is judged, and later loaded: a path may mean another file
a moment later, a descriptor does not. A map of a file that is overwritten ends the process by SIGBUS, a read does not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 16
_CHUNK: Final = 1 << 20
#: How often, a millisecond apart, a lease is asked for while somebody has the file open for writing.
_LEASE_TRIES: Final = 50
#: <fcntl.h>; Python's module has no name for it.
_F_SETSIG: Final = 10


def exists(path: Path) -> bool:
    """Whether there is a file, as far as this user may see."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def real_path(path: Path) -> str:
    """The path behind all links; the path itself where they cannot be followed."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return os.path.abspath(path)  # noqa: PTH100


def absence(path: Path) -> str:
    """What is so of a path at which no file is."""
    try:
        return "is a link that leads to no file" if path.is_symlink() else "does not exist"
    except (OSError, ValueError):
        return "does not exist"


class NotRegularError(OSError):
    """A folder, a pipe, a socket or a device where a file should be."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def _place_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return ""


class OpenFile:
    """A regular file that is open for reading until nobody holds this object.

    Raises OSError (NotRegularError among them) and, for a path with a zero byte, ValueError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        # Opening alone can do things to a device; O_NONBLOCK is for a pipe that takes the path in between.
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            raise NotRegularError(path)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularError(path)
        #: Where this file is, whatever `path` leads to later.
        self.place = _place_of(self.descriptor) or real_path(path)
        self.size = status.st_size
        self.owner = status.st_uid
        self.stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        self._block_at, self._block = 0, b""

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`, fewer where the file ends."""
        if size > _BLOCK // 4:
            return self._pread(offset, size)
        at = offset - self._block_at
        if not 0 <= at <= at + size <= len(self._block):
            self._block_at, self._block = offset, self._pread(offset, _BLOCK)
            at = 0
        return self._block[at : at + size]

    def _pread(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(self.descriptor, min(size, 1 << 30), offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    @cached_property
    def sha256(self) -> str:
        """The hash of the whole file as it was when it was opened, read piece by piece."""
        digest, buffer, offset = hashlib.sha256(), memoryview(bytearray(_CHUNK)), 0
        while count := os.preadv(self.descriptor, [buffer[: self.size - offset]], offset):
            digest.update(buffer[:count])
            offset += count
        return digest.hexdigest()

    def is_unchanged(self) -> bool:
        """Whether nobody has written to the file since it was opened, as far as one can tell."""
        try:
            status = os.fstat(self.descriptor)
        except OSError:
            return False
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) == self.stamp


@contextlib.contextmanager
def kept_from_writers(files: Sequence[OpenFile]) -> Iterator[None]:
    """For a moment, whoever wants to write to one of the files waits (a read lease, fcntl(2)).

    The system grants leases on a user's own files, on most file systems. On others there is none, and nothing is
    promised: who may write to them is somebody else's choice.
    """
    leased = [file for file in files if _lease(file)]
    try:
        yield
    finally:
        for file in leased:
            with contextlib.suppress(OSError):
                fcntl.fcntl(file.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _lease(file: OpenFile) -> bool:
    for _ in range(_LEASE_TRIES):
        try:
            # What the kernel sends when a writer comes: by itself a signal that ends the process; this one is ignored.
            fcntl.fcntl(file.descriptor, _F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file.descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return False
            time.sleep(0.001)
        else:
            return True
    return False
