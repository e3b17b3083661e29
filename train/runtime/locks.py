"""One process at a time writes a directory or a file of results, and a file completely or not at all."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from foredraft.inference.evaluation.progress import report

FILE = ".lock"  # in a directory
held = WeakSet[Any]()


def hold(path: Path, name: str, wait: bool = False) -> IO[bytes]:
    """Lock a file, which is created, or the file `.lock` of a directory until the result is closed. However this process
    ends, the kernel unlocks it then. What this process holds already (a search that evaluates its heads) is not locked again.
    name: the setting that gave the path. Raise ValueError if another process holds it, or wait for it."""
    file = (path / FILE if path.is_dir() else path).open("ab")
    same = os.fstat(file.fileno())
    if any(not one.closed and os.path.samestat(os.fstat(one.fileno()), same) for one in held):
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_locked = error.errno in (errno.EAGAIN, errno.EACCES)  # some network file systems have no locks
        if is_locked and not wait:
            raise ValueError(
                f"{name}={path} is being written by {holder(file)}: wait until that has ended, or give another {name}"
            ) from None
        if is_locked:
            report(f"another process writes {path}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
    held.add(file)
    return file


def holder(file: IO[bytes]) -> str:
    """Name the process, if it runs on this machine and Linux says which it is."""
    inode, locks = str(os.fstat(file.fileno()).st_ino), Path("/proc/locks")
    for line in locks.read_text().splitlines() if locks.exists() else ():
        _, kind, *_, pid, where, _, _ = line.split()
        if kind == "FLOCK" and where.rpartition(":")[2] == inode and int(pid) > 0:
            return f"process {pid}"
    return "another process"


def write_atomically(file: Path, content: bytes | str) -> None:
    """Write a file completely or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(file)


def close_in_child() -> None:
    """Close locks in a forked child: a lock lasts until its last copy is closed, and a DataLoader's workers must not keep it
    after their parent was killed."""
    for file in list(held):
        file.close()


os.register_at_fork(after_in_child=close_in_child)
