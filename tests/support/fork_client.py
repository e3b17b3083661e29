#!/usr/bin/env python3
"""Stands for a child of fork_server.py: `fork_client.py ADDRESS ARGUMENTS...` is `python ARGUMENTS...`, started by a fork.

Imports next to nothing, so that it starts in a hundredth of a second.
"""

import json
import os
import signal
import socket
import sys

SENT = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT")
PASSED_ON = {getattr(signal, f"SIG{name}"): getattr(signal, f"SIG{name}") for name in SENT}
PASSED_ON[signal.SIGRTMIN] = signal.SIGKILL  # SIGKILL itself would end this process alone (processes.Forked)


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is somebody to pass them on to
    request = {"arguments": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(sys.argv[1])
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        child = int(connection.recv(32))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(child, PASSED_ON[number]))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for standard in range(3):
            os.close(standard)  # the child has them: who reads from it sees when it ends
        return int(connection.recv(32))


if __name__ == "__main__":
    code = main()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
