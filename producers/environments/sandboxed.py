"""Runs code of a policy in a process of its own, which first shuts itself in: a script of sandbox.py.

It imports nothing of rollstream. The code shares this process, so nothing here is a secret from it: the right results
are not here, and whatever the code writes in place of this script is a result to compare, as a returned value is.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would double the time that a process takes to start
    from collections.abc import Iterator, Sequence
    from typing import Any

_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000 | 0x04000000
"""Mounts, IPC, processes, network and host name (CLONE_NEW* of linux/sched.h)."""
_USER_NAMESPACE = 0x10000000
_BIND, _RECURSIVE, _PRIVATE, _NO_DEVICES, _NO_SETUID = 4096, 16384, 1 << 18, 4, 2
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1 | 2 | 4
_RULESET, _RULE, _RESTRICT = 444, 445, 446
"""Landlock's system calls, whose numbers are the same on every architecture."""
_READ_BENEATH = 1 | 4 | 8
"""Execute, read a file, read a directory (LANDLOCK_ACCESS_FS_*)."""
_NEW_ROOT = "/sys"
"""Where the new root is built: a folder of every Linux that has nothing of Python's in it."""
_libc = ctypes.CDLL(None, use_errno=True)


def _call(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def enter_namespaces(folders: Sequence[str], hidden: Sequence[str], disk_bytes: int) -> None:
    """Leave this machine's files, processes and network; on return, this is process 1 of its own.

    Of files there remain `folders`, read-only and without `hidden`, and a small file system in memory at /tmp. The
    process that was started waits outside, and ends the new one when it is told to.
    """
    uid, gid = os.geteuid(), os.getegid()
    _call(_libc.unshare(_NAMESPACES | (_USER_NAMESPACE if uid else 0)), "unshare")
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    options = f"size={disk_bytes},nr_inodes=1000,mode=755"
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _NO_DEVICES | _NO_SETUID, options)
    for folder in folders:
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), _NEW_ROOT + folder)
        else:
            os.makedirs(_NEW_ROOT + folder, exist_ok=True)
            _mount(folder, _NEW_ROOT + folder, None, _BIND | _RECURSIVE)
    for folder in hidden:
        if os.path.isdir(_NEW_ROOT + folder):
            _mount("tmpfs", _NEW_ROOT + folder, "tmpfs", 0, "nr_inodes=1,mode=000")
    for folder in folders:
        if not os.path.islink(folder):
            attributes = struct.pack("=4Q", _READ_ONLY, 0, 0, 0)
            path = (_NEW_ROOT + folder).encode()
            _call(
                _libc.syscall(_MOUNT_SETATTR, -100, path, _AT_RECURSIVE, attributes, len(attributes)), "mount_setattr"
            )
    os.mkdir(f"{_NEW_ROOT}/tmp")
    os.chmod(f"{_NEW_ROOT}/tmp", 0o777)
    if child := os.fork():
        _wait_outside(child)
    # A signal to the process group must not reach the process that waits outside.
    os.setsid()
    # A process in a changed root can make no user namespace, in which it would have capabilities again.
    os.chroot(_NEW_ROOT)
    os.chdir("/tmp")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = (None if text is None else text.encode() for text in (source, target, kind))
    _call(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()), f"mount at {target}")


def _wait_outside(child: int) -> None:
    """End as process 1 of the namespace does; SIGTERM, and the end of the worker, kill it and all others in there."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _libc.prctl(1, signal.SIGTERM)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    _, status = os.waitpid(child, 0)
    os._exit(abs(os.waitstatus_to_exitcode(status)))


def restrict_files(folders: Sequence[str]) -> None:
    """Allow reading `folders` and nothing else of files, no TCP, and no signals to other processes.

    What Landlock does not know on this kernel stays allowed. Raises OSError where there is no Landlock.
    """
    version = _call(_libc.syscall(_RULESET, None, 0, 1), "landlock")
    files = (1 << (13 if version < 2 else 14 if version < 3 else 15)) - 1
    rules = struct.pack("=3Q", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call(_libc.syscall(_RULESET, rules, size, 0), "landlock")
    for folder in folders:
        beneath = os.open(folder, os.O_PATH)
        _call(_libc.syscall(_RULE, ruleset, 1, struct.pack("=Qi", _READ_BENEATH, beneath), 0), "landlock")
        os.close(beneath)
    _call(_libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _call(_libc.syscall(_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def drop_privileges() -> None:
    """Become a user of its own if this is root, without capabilities and without a way to get them again."""
    if os.geteuid() == 0:
        own = (1 << 30) + os.getpid()
        os.setgroups([])
        os.setresgid(own, own, own)
        os.setresuid(own, own, own)
    # Version 3 of the header, this process, and three empty sets of two words.
    _call(_libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capset")
    _call(_libc.prctl(38, 1, 0, 0, 0), "no_new_privs")


def call(code: str, function: str, calls: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Execute code, then call its function with each list of arguments; yields what it returned, or an error."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(code, "<code>", "exec"), names)
    except BaseException as error:
        yield {"error": _told(error)}
        return
    if function and not callable(names.get(function)):
        yield {"error": f"the code defines no function {function}"}
        return
    yield {}
    for arguments in calls:
        try:
            yield {"value": json.loads(json.dumps(names[function](*arguments)))}
        except BaseException as error:
            yield {"error": _told(error)}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def main() -> None:
    """Carry out the request on standard input: results are lines on standard output, prints go to the other pipe."""
    request = json.loads(sys.stdin.buffer.read())
    results = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    if request["isolation"] == "namespaces":
        enter_namespaces(request["folders"], request["hidden"], request["disk_bytes"])
    elif request["isolation"] == "landlock":
        restrict_files(request["folders"])
    drop_privileges()
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    # If the worker is killed, so is this process; the code can turn this off only where there are no namespaces.
    _libc.prctl(1, signal.SIGKILL)
    results.write(b"ready\n")
    for result in call(request["code"], request["function"], request["calls"]):
        results.write(json.dumps(result).encode() + b"\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
