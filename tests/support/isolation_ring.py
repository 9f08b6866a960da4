"""A channel of an isolated backend (docs/isolation.md) by Python alone, so that tests can say on it what no side says.

Needs nothing but the standard library: hostile children, started without a site, load it by its path.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import random
import socket
import struct
import time
from collections.abc import Callable

MAGIC = 0x31474C46
HEADER = struct.Struct("=IIQ")  # magic, size, sequence
RECORD = struct.Struct("=IIQ")  # size, place, sequence
RING_BYTES, PAGE = 1 << 16, 4096
IN_RING, IN_SOCKET = 0, 1
WRITTEN, READ, ASLEEP = 0, 8, 16  # words of eight bytes from the start of a head
HEAD = 24
SEALS = 0x0007  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
F_ADD_SEALS = 1033


def read_exactly(from_socket: socket.socket, size: int) -> bytes:
    """Raises EOFError at the end."""
    data = b""
    while len(data) < size:
        piece = from_socket.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class Channel:
    """One end. Whoever reads looks for messages and never sleeps, so that no bell is due to this side."""

    def __init__(self, end: socket.socket, memory: mmap.mmap, *, is_host: bool) -> None:
        self.socket = end
        self.words = memoryview(memory).cast("Q")
        self.bytes = memoryview(memory)
        self.out = 0 if is_host else 1
        self.written = self.read = 0

    @staticmethod
    def open(end: socket.socket) -> Channel:
        """The host's: makes the memory and sends it."""
        number = os.memfd_create("flagos", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(number, PAGE + 2 * RING_BYTES)
        fcntl.fcntl(number, F_ADD_SEALS, SEALS)
        memory = mmap.mmap(number, PAGE + 2 * RING_BYTES)
        socket.send_fds(end, [HEADER.pack(MAGIC, 0, 0)], [number])
        os.close(number)
        return Channel(end, memory, is_host=True)

    @staticmethod
    def join(end: socket.socket) -> Channel:
        """The child's."""
        _, rights, _, _ = end.recvmsg(HEADER.size, socket.CMSG_SPACE(4))
        if not rights:
            raise EOFError
        number = array.array("i", rights[0][2])[0]
        memory = mmap.mmap(number, PAGE + 2 * RING_BYTES)
        os.close(number)
        return Channel(end, memory, is_host=False)

    def _copy_in(self, position: int, data: bytes) -> None:
        base = PAGE + self.out * RING_BYTES
        for index, byte in enumerate(data):
            self.bytes[base + (position + index) % RING_BYTES] = byte

    def publish(self, raw: bytes, *, advance: int | None = None) -> None:
        """Puts bytes into the ring as they are, says that there are more, and wakes the reader."""
        self._copy_in(self.written, raw)
        self.written += len(raw) if advance is None else advance
        self.words[self.out * HEAD + WRITTEN] = self.written % 2**64
        self.ring_bell()

    def ring_bell(self) -> None:
        """Wakes the reader if it sleeps: one that is still about to has seen the message after a while."""
        time.sleep(0.001)
        if self.words[self.out * HEAD + ASLEEP]:
            self.words[self.out * HEAD + ASLEEP] = 0
            self.socket.sendall(HEADER.pack(MAGIC, 0, 0))

    def send(self, message: bytes, sequence: int) -> None:
        """A message as it should be."""
        self.publish(record(message, sequence))

    def receive(self, seconds: float = 60.0) -> tuple[bytes, int]:
        """The next message and its sequence. Raises EOFError at the other side's end."""
        other, deadline = 1 - self.out, time.monotonic() + seconds
        while self.words[other * HEAD + WRITTEN] == self.read:
            self.socket.setblocking(False)
            try:
                if not self.socket.recv(1, socket.MSG_PEEK):
                    raise EOFError
            except BlockingIOError:
                pass
            except ConnectionError:
                raise EOFError from None
            finally:
                self.socket.setblocking(True)
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.0002)
        size, place, sequence = RECORD.unpack(self._copy_out(other, self.read, RECORD.size))
        if place == IN_SOCKET:
            _, size, sequence = HEADER.unpack(read_exactly(self.socket, HEADER.size))
            message = read_exactly(self.socket, size)
            self.read += RECORD.size
        else:
            message = self._copy_out(other, self.read + RECORD.size, size)
            self.read += RECORD.size + padded(size)
        self.words[other * HEAD + READ] = self.read
        return message, sequence

    def _copy_out(self, ring: int, position: int, size: int) -> bytes:
        base = PAGE + ring * RING_BYTES
        return bytes(self.bytes[base + (position + index) % RING_BYTES] for index in range(size))

    def send_spoiled(self, message: bytes, sequence: int, draw: random.Random) -> str:
        """A message, a record or a ring as no side makes them; says which way."""
        head = self.out * HEAD
        other = (1 - self.out) * HEAD
        cut = message[: draw.randrange(len(message) + 1)]
        flipped = bytearray(message)
        for _ in range(draw.randrange(1, 4)):
            if flipped:
                flipped[draw.randrange(len(flipped))] = draw.randrange(256)
        ways: dict[str, Callable[[], None]] = {
            "truncated": lambda: self.send(cut, sequence),
            "repeated": lambda: self.publish(2 * record(message, sequence)),
            "doubled": lambda: self.send(message + message, sequence),
            "longer": lambda: self.send(message + draw.randbytes(draw.randrange(1, 40)), sequence),
            "flipped": lambda: self.send(bytes(flipped), sequence),
            "out of order": lambda: self.send(message, sequence + draw.randrange(1, 9)),
            "oversized": lambda: self.publish(RECORD.pack(draw.randrange(2**32), IN_RING, sequence) + message),
            "no place": lambda: self.publish(RECORD.pack(0, draw.randrange(2, 2**32), sequence)),
            "half a record": lambda: self.publish(bytes(draw.randrange(1, 16))),
            "noise": lambda: self.publish(draw.randbytes(16 * draw.randrange(1, 12))),
            "written beyond": lambda: self.publish(b"", advance=draw.choice((RING_BYTES + 16, 2**63, -16, 2**64 - 1))),
            "read beyond": lambda: self._spoil(other + READ, draw, message, sequence),
            "never wakes": lambda: self._spoil(head + ASLEEP, draw, message, sequence),
            "oversized in the socket": lambda: self._in_socket(0xFFFFFFFF, message, sequence),
            "in the socket": lambda: self._in_socket(len(message), cut, sequence),
            "bells": lambda: self.socket.sendall(HEADER.pack(MAGIC, 0, 0) * draw.randrange(1, 9)),
        }
        way = draw.choice(sorted(ways))
        ways[way]()
        return way

    def _spoil(self, word: int, draw: random.Random, message: bytes, sequence: int) -> None:
        self.words[word] = draw.randrange(2**64)
        self.send(message, sequence)

    def _in_socket(self, size: int, message: bytes, sequence: int) -> None:
        self.publish(RECORD.pack(size, IN_SOCKET, sequence))
        self.socket.sendall(HEADER.pack(MAGIC, size, sequence) + message)


def record(message: bytes, sequence: int) -> bytes:
    """A message as it lies in a ring."""
    return RECORD.pack(len(message), IN_RING, sequence) + message.ljust(padded(len(message)), b"\0")


def padded(size: int) -> int:
    """What a message takes in a ring."""
    return -(-size // RECORD.size) * RECORD.size
