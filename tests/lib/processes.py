"""Processes of Python for tests, asked for as of `subprocess`, but forked off one that has imported all libraries.

Importing torch and transformers takes seconds. A fork of a process that has done this, and nothing else, is as good as
a new one for a test of what processes share. It is not for a test of importing, of the hash seed, of variables that
libraries read when they are loaded, or of the interpreter's end: these take `subprocess`.
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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, PIPE, TimeoutExpired
from types import ModuleType
from typing import IO, Any

_IMPORTED = (
    "hf_tiered_cache.tiered_cache",  # which leads to nearly all others
    "transformers.generation.utils",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "gemma3")),
)
_REQUEST_BYTES = 100_000
"""The longest request, command and environment."""


class Popen:
    """A process that runs `[sys.executable, "-c", code, *arguments]` or `[sys.executable, script, *arguments]`.

    Arguments are those of `subprocess.Popen`; texts are UTF-8. Its tensors are computed by one thread.
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
        with ExitStack() as given:
            files = []
            for number, wanted in enumerate((stdin, stdout, stderr)):
                ends.append(None)
                if wanted == PIPE:
                    ours, theirs = os.pipe() if number else os.pipe()[::-1]
                    given.callback(os.close, theirs)
                    ends[-1] = os.fdopen(ours, ("r" if number else "w") + ("" if text else "b"))
                elif wanted == DEVNULL:
                    theirs = given.enter_context(open(os.devnull, "r+b")).fileno()
                else:
                    theirs = number if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno()
                files.append(theirs)
            ours, theirs = os.pipe()
            given.callback(os.close, theirs)
            self._told = os.fdopen(ours)  # a line with the number of the process, and one with its exit status
            asked = {
                "command": self.args[1:],
                "env": {**(os.environ if env is None else env)},
                "cwd": os.path.abspath(cwd or "."),
                "session": start_new_session,
            }
            request = json.dumps(asked).encode()
            assert len(request) <= _REQUEST_BYTES
            socket.send_fds(_origin(os.getpid())[0], [request], [*files, theirs])
        self.stdin, self.stdout, self.stderr = ends
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        """Its exit status, less than 0 for a signal; None while it runs."""
        if self.returncode is None and self._has_ended(0):
            return self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended. Raises `TimeoutExpired`."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        """Waited for up to so many seconds. `select` would not do: it knows no files beyond the 1,024th."""
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Let it end now."""
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
    wanted = (PIPE, PIPE) if capture_output else (stdout, stderr)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = [file if each == PIPE else each for each, file in zip(wanted, (out, err), strict=True)]
        process = Popen(command, stdout=files[0], stderr=files[1], **options)
        try:
            process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        said: list[Any] = []
        for each, file in zip(wanted, (out, err), strict=True):
            file.seek(0)
            read = file.read() if each == PIPE else None
            said.append(read.decode() if text and read is not None else read)
    done = subprocess.CompletedProcess(process.args, process.returncode or 0, *said)
    if check:
        done.check_returncode()
    return done


@functools.cache
def _origin(pid: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that others of this process are forked off, which ends with it, and the way to ask."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, __file__], stdin=theirs)
    atexit.register(process.wait)
    atexit.register(ours.close)  # which ends it; what was registered last runs first
    return ours, process


# --- in that process


def _serve(asking: socket.socket) -> None:
    """Start what is asked for, until nobody is there to ask."""
    root = str(Path(__file__).parents[2])
    sys.path.insert(0, root)  # the package of this checkout, even if another one is installed
    for name in _IMPORTED:
        importlib.import_module(name)
    sys.path.remove(root)
    gc.freeze()  # all of that stays, in every process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those between
    while True:
        request, files, _, _ = socket.recv_fds(asking, _REQUEST_BYTES, 4)
        if not request:
            return
        if not os.fork():
            asking.detach()
            _start(json.loads(request), files)
        for file in files:
            os.close(file)


def _start(asked: dict[str, Any], files: list[int]) -> None:
    """In a process between the two: start the one that is wanted, and tell its number, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, telling = files
    pid = os.fork()
    if not pid:
        os.close(telling)
        _become(asked, standard)
    for file in standard:
        os.close(file)
    os.write(telling, f"{pid}\n".encode())
    os.write(telling, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _become(asked: dict[str, Any], standard: list[int]) -> None:
    """Be the process that is wanted, to its end."""
    import torch

    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["session"]:
        os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    random.seed()
    torch.set_num_threads(1)
    status = 0
    try:
        _run_python(*asked["command"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_python(first: str, *arguments: str) -> None:
    """What `python first *arguments` runs."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    libraries = [*named, *sys.path[1:]]  # the first is this file's folder
    if first == "-c":
        code, *arguments = arguments
        sys.argv, sys.path = ["-c", *arguments], ["", *libraries]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path = [first, *arguments], [str(Path(first).resolve().parent), *libraries]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=0))
