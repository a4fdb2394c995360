"""Python processes for tests, with the interface of `subprocess`, forked from a process with all imports.

Importing torch and transformers takes seconds. For tests of what processes share, a fork of a process that has only
imported them is as good as a new one. Use `subprocess` for tests of imports, of the hash seed, of variables that
libraries read when they are loaded, and of the interpreter's end, unless the code calls `Py_Exit` itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, TimeoutExpired
from types import ModuleType
from typing import IO, Any

_IMPORTED = (
    "hf_tiered_cache.tiered_cache",  # which imports nearly all others
    "transformers.generation.utils",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "gemma3")),
)
_REQUEST_BYTES = 100_000
"""Maximum size of a request with command and environment."""


class Popen:
    """Process that runs `[sys.executable, "-c", code, *arguments]`, or `-m` and a module, or a script.

    Arguments are those of `subprocess.Popen`; texts are UTF-8. PyTorch uses one thread.
    """

    def __init__(
        self,
        command: Sequence[Any],
        *,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        text: bool = False,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = [os.fspath(word) for word in command]
        assert self.args[0] == sys.executable, command
        self.returncode: int | None = None
        ends: list[IO[Any] | None] = []
        with ExitStack() as stack:
            files = []
            for number, stream in enumerate((stdin, stdout, stderr)):
                ends.append(None)
                if stream == PIPE:
                    own_end, child_end = os.pipe() if number else os.pipe()[::-1]
                    stack.callback(os.close, child_end)
                    ends[-1] = os.fdopen(own_end, ("r" if number else "w") + ("" if text else "b"))
                elif stream == DEVNULL:
                    child_end = stack.enter_context(open(os.devnull, "r+b")).fileno()
                else:
                    child_end = number if stream is None else stream if isinstance(stream, int) else stream.fileno()
                files.append(child_end)
            own_end, child_end = os.pipe()
            stack.callback(os.close, child_end)
            self._status = os.fdopen(own_end)  # a line with the number of the process, and one with its exit status
            request_fields = {
                "command": self.args[1:],
                "env": {**(os.environ if env is None else env)},
                "cwd": os.path.abspath(cwd or "."),
                "session": start_new_session,
            }
            request = json.dumps(request_fields).encode()
            assert len(request) <= _REQUEST_BYTES
            socket.send_fds(_origin(os.getpid()), [request], [*files, child_end])
        self.stdin, self.stdout, self.stderr = ends
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        """Return the exit status, less than 0 for a signal; None while the process runs."""
        if self.returncode is None and self._has_ended(0):
            return self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit status.

        Raises:
            TimeoutExpired: The process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds, and return whether the process has ended.

        `select` does not support files beyond the 1,024th.
        """
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[Any],
    *,
    capture_output: bool = False,
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
    check: bool = False,
    timeout: float | None = None,
    text: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a process to its end, as `subprocess.run` does."""
    streams = (PIPE, PIPE) if capture_output else (stdout, stderr)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = [file if stream == PIPE else stream for stream, file in zip(streams, (out, err), strict=True)]
        process = Popen(command, stdout=files[0], stderr=files[1], **options)
        try:
            process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        outputs: list[Any] = []
        for stream, file in zip(streams, (out, err), strict=True):
            file.seek(0)
            content = file.read() if stream == PIPE else None
            outputs.append(content.decode() if text and content is not None else content)
    result = subprocess.CompletedProcess(process.args, process.returncode or 0, *outputs)
    if check:
        result.check_returncode()
    return result


@functools.cache
def _origin(pid: int) -> socket.socket:
    """Return a connection to the process from which others are forked, which all workers of a test run share.

    The process ends when its last connection is closed.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    address = f"\0hf-tiered-cache-{run}-{zlib.crc32(__file__.encode()):x}" if run else ""  # "": choose a new one
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(OSError):
            _start_origin(connection, address)
            if connection.recv(1):
                atexit.register(connection.close)
                return connection
        connection.close()  # the process was about to end


def _start_origin(connection: socket.socket, address: str) -> None:
    """Connect to the process with this address, which is started unless it runs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            connection.connect(address)
            return
        listener.listen()
        connection.connect(listener.getsockname())
        process = subprocess.Popen([sys.executable, __file__], stdin=listener)
    process.returncode = 0  # nobody waits for its end, which other workers may delay


# --- in the process that forks


def _serve(listener: socket.socket) -> None:
    """Start the requested processes until all connections are closed."""
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)  # the package of this checkout, even if another one is installed
    for name in _IMPORTED:
        importlib.import_module(name)
    sys.path.remove(root)
    gc.freeze()  # keep all imports in every process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the intermediate processes need no wait
    sockets: list[socket.socket] = [listener]
    while True:
        for readable in select.select(sockets, (), ())[0]:
            if readable is listener:
                sockets.append(listener.accept()[0])
                sockets[-1].send(b"+")
                continue
            try:
                request, files, _, _ = socket.recv_fds(readable, _REQUEST_BYTES, 4)
            except ConnectionError:  # the worker was killed
                request, files = b"", []
            if not request:
                sockets.remove(readable)
                readable.close()
            elif not os.fork():
                for inherited in sockets:
                    inherited.close()
                _start(json.loads(request), files)
            for file in files:
                os.close(file)
        if len(sockets) == 1:
            return


def _start(request: dict[str, Any], files: list[int]) -> None:
    """Fork the requested process from an intermediate one, and report its number and exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, status_file = files
    pid = os.fork()
    if not pid:
        os.close(status_file)
        _become(request, standard)
    for file in standard:
        os.close(file)
    os.write(status_file, f"{pid}\n".encode())
    os.write(status_file, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], standard: list[int]) -> None:
    """Run the requested process to its end."""
    import torch

    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    torch.set_num_threads(1)
    status = 0
    try:
        _run_python(*request["command"])
    except SystemExit as exit_request:
        status = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
        if isinstance(exit_request.code, str):
            print(exit_request.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_python(first: str, *arguments: str) -> None:
    """Run `python first *arguments`."""
    path_entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    libraries = [*path_entries, *sys.path[1:]]  # the first is this file's folder
    if first == "-c":
        code, *arguments = arguments
        sys.argv, sys.path = ["-c", *arguments], ["", *libraries]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif first == "-m":
        name, *arguments = arguments
        sys.argv, sys.path = [name, *arguments], [os.getcwd(), *libraries]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path = [first, *arguments], [str(Path(first).resolve().parent), *libraries]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=0))
