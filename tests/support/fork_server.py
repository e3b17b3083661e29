"""Children that need not import: one process has imported torch, transformers and the package, and forks for each command.

An interpreter that imports them takes five seconds of a core; a fork takes a tenth of one. A command is given to the
server by fork_client.py, which stays in its place: it has the command's process id, gets its signals, ends with its status.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys

PRELOADED = [
    "foredraft.train.run",
    "foredraft.train.search.search",
    "foredraft.inference.serve.app",
    "foredraft.inference.serve.worker",
    "foredraft.inference.serve.accepted_log",
    "foredraft.scripts.serve",
    "foredraft.scripts.generate",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "foredraft.train.optimizer",
    "torch.distributed.run",
]
if not os.path.exists("/dev/nvidiactl"):  # it asks for the device, and CUDA that has begun cannot be forked
    PRELOADED.append("deepspeed")  # accelerate imports it where it is installed, for two more seconds


class Server:
    """Forks a child for every connection, and tells the connection how the child ended."""

    def __init__(self, address: str):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.children: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.woken, waker = socket.socketpair()
        for end in (self.woken, waker):
            end.setblocking(False)
        self.waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.woken, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)  # closed when the tests end

    def run(self) -> dict | None:
        """In the server None, at its end; in each child the request that it is to run."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is self.listener:
                    if (request := self.fork(self.listener.accept()[0])) is not None:
                        return request
                elif key.fileobj is self.woken:
                    self.reap()
                else:
                    self.kill(key.fileobj)

    def fork(self, connection: socket.socket) -> dict | None:
        request, descriptors = receive(connection)
        if request is None:
            connection.close()
            return None
        child = os.fork()
        if child == 0:
            self.become(request, descriptors, connection)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        self.children[child] = connection
        self.selector.register(connection, selectors.EVENT_READ)
        connection.sendall(f"{child}\n".encode())
        return None

    def become(self, request: dict, descriptors: list[int], connection: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for opened in (connection, self.listener, self.woken, self.waker, *self.children.values()):
            opened.close()
        self.selector.close()
        os.setsid()
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])

    def reap(self) -> None:
        self.woken.recv(4096)
        while self.children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            connection = self.children.pop(child)
            self.selector.unregister(connection)
            with contextlib.suppress(OSError):  # a client that is gone
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()

    def kill(self, connection: object) -> None:
        """The client was killed, by what cannot be passed on: so is its child."""
        for child, its in self.children.items():
            if its is connection:
                os.kill(child, signal.SIGKILL)


def receive(connection: socket.socket) -> tuple[dict | None, list[int]]:
    """A request is its length, with standard input, output and error attached, and as much JSON."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    if len(head) < 8:
        return None, list(descriptors)
    length, body = int.from_bytes(head, "big"), b""
    while len(body) < length:
        if not (part := connection.recv(length - len(body))):
            return None, list(descriptors)
        body += part
    return json.loads(body), list(descriptors)


def run_program(arguments: list[str]) -> None:
    """As `python arguments` would, in this process: `script ...`, `-m module ...` or `-c code ...`, all after -u or not."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(write_through=True)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def leave_with(code: int) -> None:
    """The very last thing at exit, in place of taking thousands of modules down, which takes most of a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


if __name__ == "__main__":
    ended_with = 0
    atexit.register(lambda: leave_with(ended_with))  # before all imports: handlers run in reverse
    sys.path.pop(0)  # this folder; a child has its own
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages of what is imported stay shared
    server = Server(sys.argv[1])
    print("ready", flush=True)
    if (asked := server.run()) is not None:
        try:
            run_program(asked["arguments"])
        except BaseException as error:
            ended_with = exit_code(error)
            raise
