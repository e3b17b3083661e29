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
import select
import signal
import socket
import sys

PRELOADED = [f"foredraft.{name}" for name in ("train.run", "train.search", "scripts.serve", "scripts.generate")]
PRELOADED += [f"foredraft.inference.serve.{name}" for name in ("app", "worker", "accepted_log")]
PRELOADED += ["transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto"]
PRELOADED += ["transformers.tokenization_utils_tokenizers", "foredraft.train.optimizer", "torch.distributed.run"]
if not os.path.exists("/dev/nvidiactl"):  # it asks for the device, and CUDA cannot be forked once it has started
    PRELOADED.append("deepspeed")  # accelerate imports it where it is installed, for two more seconds


def remember_configs() -> None:
    """Compose what most runs start from, so that every child has it (tests/support/configs.py)."""
    config = importlib.import_module("foredraft.config")
    importlib.import_module("tests.support.configs")
    with config.opened():
        config.check("train", ["head=eagle3", "data=text", "preset=test_model", "target.device=cpu"])


def serve(address: str) -> dict | None:
    """Start one process for every connection. Return None at the end of the tests, and the request in each process that is
    to run a program."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a request is one message
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those end that attend
    print("ready", flush=True)
    while 0 not in select.select([listener, 0], [], [])[0]:  # standard input is closed when the tests end
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return attend(connection)
        connection.close()
    return None


def attend(connection: socket.socket) -> dict:
    """Start the program, and send its process id and how it ended to the connection. Returns only in the program's
    process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, _, _ = socket.recv_fds(connection, 2**20, 3)
    if not request:  # a client that is gone
        os._exit(0)
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        asked = json.loads(request)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        return asked
    os.closerange(0, 3)  # of the server, who reads from them sees when it ends
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(child)
    with contextlib.suppress(OSError):  # a client that is gone
        connection.send(str(child).encode())
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)  # as the client was, by what cannot be passed on
    with contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)


def run_program(arguments: list[str]) -> None:
    """Run what `python arguments` would run, in this process: `[-u] script ...`, `-m module ...` or `-c code ...`."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
        for number, name in enumerate(("stdout", "stderr"), start=1):
            raw, old = io.FileIO(number, "w", closefd=False), getattr(sys, name)
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True))
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
    """Exit immediately, as the last thing at exit, instead of unloading thousands of modules for most of a second."""
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
    remember_configs()
    gc.collect()
    gc.freeze()  # pages of what is imported stay shared
    if (asked := serve(sys.argv[1])) is not None:
        try:
            run_program(asked["arguments"])
        except BaseException as error:
            ended_with = exit_code(error)
            raise
