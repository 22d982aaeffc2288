"""The parent's end of the pipe: one worker process per candidate, asked with a deadline, replaced when it dies.

A worker that dies, hangs or raises ends as a `Failure` with words for the table; it never takes the run with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from typing import Any

from ..processes import module_command, variables

START_SECONDS = 300.0
_EXIT_SECONDS = 60.0
# FlashAttention-4 keeps what it compiles on disk only where it is asked to. A value that the user sets counts.
LASTING = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
_STDERR_LINES = 40

_HINTS = {
    "SIGILL": "an instruction this CPU or its virtual machine does not run, often AMX: "
    "try again with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
    "SIGSEGV": "a bug in native code; the last lines of its standard error are in the JSON output",
    "SIGKILL": "killed from outside, most often for lack of memory: try a smaller problem",
}


class Failure(Exception):
    """Why a candidate has no answer: `text` for the table, `hint` what to try, `stderr` its last lines.

    `refused` tells a candidate that says no from one that fails.
    """

    def __init__(self, text: str, *, hint: str = "", stderr: str = "", refused: bool = False) -> None:
        self.refused = refused
        self.text = text
        self.hint = hint
        self.stderr = stderr
        super().__init__(text)


class Process:
    """One running worker. After a Failure it is dead, unless the failure was an ordinary exception."""

    def __init__(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self._popen = subprocess.Popen(
            module_command("tilewise.lab.measure.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=LASTING | variables(),
            start_new_session=True,
        )
        self._pending = b""
        self._started = False

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, do: str, limit: float, /, **arguments: Any) -> Any:
        """The answer to one command. Raises Failure if none comes within `limit` seconds, and then kills the worker."""
        if not self._started:
            self._receive(START_SECONDS)
            self._started = True
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # dead: the answer below says how
            self._popen.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
            self._popen.stdin.flush()
        reply = self._receive(limit)
        if "error" not in reply:
            return reply["answer"]
        error = reply["error"]
        stderr = self._last_words()
        if error["fatal"]:
            self.close()
        refused = error["type"] == "UnsupportedProblem"
        raise Failure(f"raised {error['type']}", hint=error["text"], stderr=stderr, refused=refused)

    def close(self) -> None:
        """Kill the worker and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _receive(self, seconds: float) -> dict[str, Any]:
        line = self._read_line(time.monotonic() + seconds)
        if line is None:
            self.close()
            raise Failure(f"no answer in {seconds:g} s", hint="raise --time-limit, or try a smaller problem")
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        code, stderr = self._exit_status(), self._last_words()
        self.close()
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        raise Failure(f"died: {name}", hint=_HINTS.get(name, ""), stderr=stderr)

    def _exit_status(self) -> int:
        """Of a worker whose pipe is closed. One that lives on all the same is killed."""
        try:
            return self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _read_line(self, deadline: float) -> bytes | None:
        """One line; empty at the end of the stream; None when the deadline passes."""
        assert self._popen.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                data = os.read(self._popen.stdout.fileno(), 1 << 16)
                if not data:
                    return b""
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 8192))
        return "\n".join(self._stderr.read().decode(errors="replace").splitlines()[-_STDERR_LINES:])


class Pool:
    """Workers by name, started when first wanted and again after a death. A context manager: none outlives it."""

    def __init__(self) -> None:
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()

    def start(self, *names: str) -> None:
        """Start workers ahead of their first command, so that they import at the same time."""
        for name in names:
            process = self._processes.get(name)
            if process is None or not process.alive:
                self._processes[name] = Process()

    def ask(self, name: str, do: str, limit: float, /, **arguments: Any) -> Any:
        self.start(name)
        return self._processes[name].ask(do, limit, **arguments)
