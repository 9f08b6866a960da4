"""Linux's seccomp: a filter that denies a process, for good, system calls that a backend has no use for.

A denied call fails with EPERM, so that a library may go another way; used by rights.py in a backend's own process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass, field
from typing import Final

_PR_SET_SECCOMP_FILTER, _TSYNC, _GET_ACTION = 1, 1, 2
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
#: Offsets in struct seccomp_data; the lower half of argument N is at _ARGUMENT + 8 * N (little endian).
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_EVERY_BIT: Final = 0xFFFFFFFF

_X86_64: Final = 0xC000003E
_X32_BIT: Final = 0x40000000
#: The number of seccomp(2) itself, where the table below holds.
_SECCOMP: Final = {"x86_64": 317}

_CLONE_THREAD: Final = 0x00010000
#: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: a process of its own rights elsewhere.
_CLONE_NEW: Final = 0x7E020000
_NEGATIVE: Final = 0x80000000
#: What is typed into the user's terminal: TIOCSTI, TIOCLINUX.
_TERMINAL: Final = (0x5412, 0x541C)

#: By topic, of x86-64. What is not named stays allowed.
_PROGRAMS: Final = (59, 322)  # execve execveat
_PROCESSES: Final = (57, 58)  # fork vfork; clone below
_NETWORK: Final = (41, 42, 43, 49, 50, 288)  # socket connect accept bind listen accept4
_OWNERS: Final = (90, 91, 92, 93, 94, 260, 268, 452, 188, 189, 190, 197, 198, 199)  # chmod chown setxattr removexattr
_DENIED: Final = (
    101, 310, 311, 312, 438, 440,  # ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise
    160,  # setrlimit
    200, 424,  # tkill pidfd_send_signal
    248, 249, 250,  # add_key request_key keyctl
    165, 166, 155, 161, 428, 429, 430, 431, 432, 433, 442, 467,  # mount umount2 pivot_root chroot fsopen ...
    272, 308, 133, 259,  # unshare setns mknod mknodat
    321, 298, 323, 425, 426, 427,  # bpf perf_event_open userfaultfd io_uring_*
    167, 168, 169, 170, 171, 172, 173, 175, 176, 313, 246, 320,  # swap reboot names iopl ioperm modules kexec
    103, 153, 159, 163, 164, 179, 227, 305, 443,  # syslog vhangup clocks acct quotactl
    300, 303, 304, 154, 212, 180, 447,  # fanotify_init *_handle_at modify_ldt lookup_dcookie nfsservctl memfd_secret
)  # fmt: skip
_CLONE, _CLONE3, _KILL, _IOCTL, _PRLIMIT = 56, 435, 62, 16, 302
_SIGNALS: Final = (
    62,
    129,
    234,
    297,
)  # kill rt_sigqueueinfo tgkill rt_tgsigqueueinfo: the process is their first argument


@dataclass
class _Program:
    """Instructions of classic BPF; a test jumps over what follows it where it does not hold."""

    code: bytearray = field(default_factory=bytearray)

    def emit(self, operation: int, value: int, jump_true: int = 0, jump_false: int = 0) -> None:
        self.code += struct.pack("=HBBI", operation, jump_true, jump_false, value)

    def deny_if(self, test: int, value: int, code: int = errno.EPERM) -> None:
        self.emit(test, value, 0, 1)
        self.emit(_RETURN, _ERRNO | code)

    def allow_if(self, test: int, value: int) -> None:
        self.emit(test, value, 0, 1)
        self.emit(_RETURN, _ALLOW)

    def add(self, number: int, body: _Program) -> None:
        """What decides about one call; it ends with a verdict, after which the number is not loaded any more."""
        length = len(body.code) // 8
        self.emit(_EQUAL, number, 0, length)
        self.code += body.code


def _about(argument: int) -> _Program:
    program = _Program()
    program.emit(_LOAD, _ARGUMENT + 8 * argument)
    return program


def _clone(may_start: bool) -> _Program:
    program = _about(0)
    program.deny_if(_ANY_BIT, _CLONE_NEW)
    if not may_start:
        program.allow_if(_ANY_BIT, _CLONE_THREAD)
    program.emit(_RETURN, _ALLOW if may_start else _ERRNO | errno.EPERM)
    return program


def _signal(own: int, host: int, may_start: bool) -> _Program:
    program = _about(0)
    if may_start:  # to processes that it has started, whose numbers nobody knows yet
        program.deny_if(_EQUAL, host)
        program.deny_if(_ANY_BIT, _NEGATIVE)
        program.emit(_RETURN, _ALLOW)
    else:
        program.allow_if(_EQUAL, own)
        program.emit(_RETURN, _ERRNO | errno.EPERM)
    return program


def filter_program(own: int, host: int, *, programs: bool, network: bool) -> bytes:
    """The filter of process `own`, on x86-64: with `programs` it may start programs, with `network` open sockets."""
    program = _Program()
    program.emit(_LOAD, _ARCHITECTURE)
    program.emit(_EQUAL, _X86_64, 1, 0)
    program.emit(_RETURN, _KILL_PROCESS)
    program.emit(_LOAD, _NUMBER)
    program.deny_if(_AT_LEAST, _X32_BIT, errno.ENOSYS)
    # Its flags are in memory, where no filter looks: the C library then takes clone.
    program.deny_if(_EQUAL, _CLONE3, errno.ENOSYS)
    denied = [*_DENIED, *(() if network else _NETWORK)]
    denied += () if programs else (*_PROGRAMS, *_PROCESSES, *_OWNERS)
    for number in denied:
        program.deny_if(_EQUAL, number)
    program.add(_CLONE, _clone(programs))
    for number in _SIGNALS:
        program.add(number, _signal(own, host, programs))
    limits = _Program()  # they are read, of anybody, and set no more: the third argument is NULL
    for half in (0, 4):
        limits.emit(_LOAD, _ARGUMENT + 8 * 2 + half)
        limits.deny_if(_ANY_BIT, _EVERY_BIT)
    limits.emit(_RETURN, _ALLOW)
    program.add(_PRLIMIT, limits)
    terminal = _about(1)
    for request in _TERMINAL:
        terminal.deny_if(_EQUAL, request)
    terminal.emit(_RETURN, _ALLOW)
    program.add(_IOCTL, terminal)
    program.emit(_RETURN, _ALLOW)
    return bytes(program.code)


def absence() -> str:
    """Why no filter can be set here; "" where one can."""
    machine = os.uname().machine
    number = _SECCOMP.get(machine)
    if number is None:
        return f"the numbers of system calls are not known for {machine}"
    library = ctypes.CDLL(None, use_errno=True)
    action = ctypes.c_uint32(_ERRNO)
    if library.syscall(ctypes.c_long(number), ctypes.c_uint(_GET_ACTION), ctypes.c_uint(0), ctypes.byref(action)) != 0:
        return f"this kernel was built without filters: {os.strerror(ctypes.get_errno())}"
    return ""


def install(program: bytes) -> None:
    """Sets a filter for all threads of this process, for good. Raises OSError. The process has no_new_privs."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    library = ctypes.CDLL(None, use_errno=True)
    filters = Filter(len(program) // 8, program)
    number = ctypes.c_long(_SECCOMP[os.uname().machine])
    result = library.syscall(
        number, ctypes.c_uint(_PR_SET_SECCOMP_FILTER), ctypes.c_uint(_TSYNC), ctypes.byref(filters)
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code) if code else "a thread does not take the filter")
