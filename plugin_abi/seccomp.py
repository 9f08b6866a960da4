"""Linux's seccomp: a filter that denies a process, for good, system calls that a backend has no use for.

A denied call fails with EPERM, so that a library may go another way; used by rights.py in a backend's own process.
Where the filter has a listener, somebody outside of the process learns of each such call before it fails
(`refuse_calls`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_PR_SET_SECCOMP_FILTER, _TSYNC, _GET_ACTION = 1, 1, 2
_NEW_LISTENER, _TSYNC_ESRCH = 8, 16
_KILL_PROCESS, _ERRNO, _ALLOW, _USER_NOTIF = 0x80000000, 0x00050000, 0x7FFF0000, 0x7FC00000
#: SECCOMP_IOCTL_NOTIF_RECV and _SEND: of structs of 80 and 24 bytes.
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION, _REFUSAL = struct.Struct("=QIIi60x"), struct.Struct("=QqiI")
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
_PROGRAMS: Final = {59: "execve", 322: "execveat"}
_PROCESSES: Final = {57: "fork", 58: "vfork"}  # clone below
_NETWORK: Final = {41: "socket", 42: "connect", 43: "accept", 49: "bind", 50: "listen", 288: "accept4"}
_OWNERS: Final = {
    90: "chmod",
    91: "fchmod",
    92: "chown",
    93: "fchown",
    94: "lchown",
    260: "fchownat",
    268: "fchmodat",
    452: "fchmodat2",
    188: "setxattr",
    189: "lsetxattr",
    190: "fsetxattr",
    197: "removexattr",
    198: "lremovexattr",
    199: "fremovexattr",
}
_DENIED: Final = {
    101: "ptrace",
    310: "process_vm_readv",
    311: "process_vm_writev",
    312: "kcmp",
    438: "pidfd_getfd",
    440: "process_madvise",
    160: "setrlimit",
    200: "tkill",
    424: "pidfd_send_signal",
    248: "add_key",
    249: "request_key",
    250: "keyctl",
    165: "mount",
    166: "umount2",
    155: "pivot_root",
    161: "chroot",
    428: "open_tree",
    429: "move_mount",
    430: "fsopen",
    431: "fsconfig",
    432: "fsmount",
    433: "fspick",
    442: "mount_setattr",
    467: "open_tree_attr",
    272: "unshare",
    308: "setns",
    133: "mknod",
    259: "mknodat",
    321: "bpf",
    298: "perf_event_open",
    323: "userfaultfd",
    425: "io_uring_setup",
    426: "io_uring_enter",
    427: "io_uring_register",
    167: "swapon",
    168: "swapoff",
    169: "reboot",
    170: "sethostname",
    171: "setdomainname",
    172: "iopl",
    173: "ioperm",
    175: "init_module",
    176: "delete_module",
    313: "finit_module",
    246: "kexec_load",
    320: "kexec_file_load",
    103: "syslog",
    153: "vhangup",
    159: "adjtimex",
    163: "acct",
    164: "settimeofday",
    179: "quotactl",
    227: "clock_settime",
    305: "clock_adjtime",
    443: "quotactl_fd",
    300: "fanotify_init",
    303: "name_to_handle_at",
    304: "open_by_handle_at",
    154: "modify_ldt",
    212: "lookup_dcookie",
    180: "nfsservctl",
    447: "memfd_secret",
}
_CLONE, _CLONE3, _IOCTL, _PRLIMIT, _PRCTL = 56, 435, 16, 302, 157
_PR_SET_SECCOMP: Final = 22
#: Of signals, the process is the first argument.
_SIGNALS: Final = {62: "kill", 129: "rt_sigqueueinfo", 234: "tgkill", 297: "rt_tgsigqueueinfo"}
_WITH_ARGUMENTS: Final = {56: "clone", 16: "ioctl", 302: "prlimit64"}


def denied_calls() -> list[str]:
    """Number and name of each call that a filter may deny: "41 socket"."""
    tables = (_PROGRAMS, _PROCESSES, _NETWORK, _OWNERS, _DENIED, _SIGNALS, _WITH_ARGUMENTS)
    return [f"{number} {name}" for table in tables for number, name in table.items()]


@dataclass
class _Program:
    """Instructions of classic BPF; a test jumps over what follows it where it does not hold."""

    denial: int = _ERRNO | errno.EPERM
    code: bytearray = field(default_factory=bytearray)

    def emit(self, operation: int, value: int, jump_true: int = 0, jump_false: int = 0) -> None:
        self.code += struct.pack("=HBBI", operation, jump_true, jump_false, value)

    def deny_if(self, test: int, value: int, code: int | None = None) -> None:
        """With `code` the call fails as if the kernel had none, which nobody needs to know."""
        self.emit(test, value, 0, 1)
        self.emit(_RETURN, self.denial if code is None else _ERRNO | code)

    def allow_if(self, test: int, value: int) -> None:
        self.emit(test, value, 0, 1)
        self.emit(_RETURN, _ALLOW)

    def add(self, number: int, body: _Program) -> None:
        """What decides about one call; it ends with a verdict, after which the number is not loaded any more."""
        length = len(body.code) // 8
        self.emit(_EQUAL, number, 0, length)
        self.code += body.code


def _about(argument: int, denial: int) -> _Program:
    program = _Program(denial)
    program.emit(_LOAD, _ARGUMENT + 8 * argument)
    return program


def _clone(may_start: bool, denial: int) -> _Program:
    program = _about(0, denial)
    program.deny_if(_ANY_BIT, _CLONE_NEW)
    if not may_start:
        program.allow_if(_ANY_BIT, _CLONE_THREAD)
    program.emit(_RETURN, _ALLOW if may_start else denial)
    return program


def _signal(own: int, host: int, may_start: bool, denial: int) -> _Program:
    program = _about(0, denial)
    if may_start:  # to processes that it has started, whose numbers nobody knows yet
        program.deny_if(_EQUAL, host)
        program.deny_if(_ANY_BIT, _NEGATIVE)
        program.emit(_RETURN, _ALLOW)
    else:
        program.allow_if(_EQUAL, own)
        program.emit(_RETURN, denial)
    return program


def filter_program(own: int, host: int, *, programs: bool, network: bool, listened: bool = False) -> bytes:
    """The filter of process `own`, on x86-64: with `programs` it may start programs, with `network` open sockets.
    `listened`: a listener refuses what is denied."""
    denial = _USER_NOTIF if listened else _ERRNO | errno.EPERM
    program = _Program(denial)
    program.emit(_LOAD, _ARCHITECTURE)
    program.emit(_EQUAL, _X86_64, 1, 0)
    program.emit(_RETURN, _KILL_PROCESS)
    program.emit(_LOAD, _NUMBER)
    program.deny_if(_AT_LEAST, _X32_BIT, errno.ENOSYS)
    # Another filter with a listener, should the first one's ever be closed, would let the process answer itself.
    program.deny_if(_EQUAL, _SECCOMP["x86_64"], errno.EPERM)
    prctl = _about(0, denial)
    prctl.deny_if(_EQUAL, _PR_SET_SECCOMP, errno.EPERM)
    prctl.emit(_RETURN, _ALLOW)
    program.add(_PRCTL, prctl)
    # Its flags are in memory, where no filter looks: the C library then takes clone.
    program.deny_if(_EQUAL, _CLONE3, errno.ENOSYS)
    denied = [*_DENIED, *(() if network else _NETWORK)]
    denied += () if programs else (*_PROGRAMS, *_PROCESSES, *_OWNERS)
    for number in denied:
        program.deny_if(_EQUAL, number)
    program.add(_CLONE, _clone(programs, denial))
    for number in _SIGNALS:
        program.add(number, _signal(own, host, programs, denial))
    limits = _Program(denial)  # they are read, of anybody, and set no more: the third argument is NULL
    for half in (0, 4):
        limits.emit(_LOAD, _ARGUMENT + 8 * 2 + half)
        limits.deny_if(_ANY_BIT, _EVERY_BIT)
    limits.emit(_RETURN, _ALLOW)
    program.add(_PRLIMIT, limits)
    terminal = _about(1, denial)
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


def install(program: bytes, *, listened: bool = False) -> int:
    """Sets a filter for all threads of this process, for good. Raises OSError. The process has no_new_privs.
    `listened`: the descriptor of its listener, which this process hands to another and closes."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    library = ctypes.CDLL(None, use_errno=True)
    filters = Filter(len(program) // 8, program)
    number = ctypes.c_long(_SECCOMP[os.uname().machine])
    flags = _TSYNC | _NEW_LISTENER | _TSYNC_ESRCH if listened else _TSYNC
    result = int(
        library.syscall(number, ctypes.c_uint(_PR_SET_SECCOMP_FILTER), ctypes.c_uint(flags), ctypes.byref(filters))
    )
    if result < 0 or (result != 0 and not listened):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code) if code else "a thread does not take the filter")
    return result


def refuse_calls(listener: int, report: Callable[[str], None]) -> None:
    """Refuses the calls of which `listener` tells, and reports the name of each, until no process has its filter."""
    names = dict(call.split(" ") for call in denied_calls())
    waits = select.poll()
    waits.register(listener, select.POLLIN)
    while True:
        events = dict(waits.poll())
        if not events.get(listener, 0) & select.POLLIN:
            return
        data = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, data)
        except FileNotFoundError:  # who called has ended meanwhile
            continue
        identity, _process, _flags, number = _NOTIFICATION.unpack(data)
        with contextlib.suppress(FileNotFoundError):
            fcntl.ioctl(listener, _SEND, _REFUSAL.pack(identity, 0, -errno.EPERM, 0))
        report(names.get(str(number), f"system call {number}"))
