"""Processes that tests fork are as those of `subprocess`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import processes
import pytest

SAYS = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["SAID"], __name__, flush=True)
print("and this", file=sys.stderr)
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "sys.exit('no')", "os._exit(4)", "os.abort()", "raise ValueError"])
@pytest.mark.parametrize("how", ["code", "script", "module"])
def test_they_say_and_end_with_the_same(tmp_path, how, end):
    code = SAYS.format(end=end)
    (tmp_path / "script.py").write_text(code)
    program = {"code": ["-c", code], "script": ["script.py"], "module": ["-m", "script"]}[how]
    command = [sys.executable, *program, "one", "two"]
    options = {"cwd": tmp_path, "env": os.environ | {"SAID": "this"}, "capture_output": True, "text": True}
    run, reference = (module.run(command, timeout=60, **options) for module in (processes, subprocess))
    assert (run.returncode, run.stdout) == (reference.returncode, reference.stdout)
    assert run.stderr.splitlines()[0] == "and this" and run.stderr.splitlines()[-1] == reference.stderr.splitlines()[-1]


def test_one_that_waits_is_told_to_go_on_or_killed():
    code = "import sys; print('ready', flush=True); print(sys.stdin.readline().upper(), end='', flush=True); input()"
    pipes = {"stdin": processes.PIPE, "stdout": processes.PIPE, "text": True}
    process = processes.Popen([sys.executable, "-c", code], **pipes)
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "GO ON\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.kill()
        assert process.wait(60) == process.poll() == -signal.SIGKILL
        assert process.stdout.read() == ""


def test_one_that_takes_too_long_is_ended_and_one_that_fails_raises():
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.3)
    with pytest.raises(subprocess.CalledProcessError):
        processes.run([sys.executable, "-c", "raise SystemExit(1)"], check=True, timeout=60)
