"""The GPU's clocks, power and temperature while something is measured, by one `nvidia-smi` that runs beside it."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import threading
import time
from statistics import median

_FIELDS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}
_EVERY_MILLISECONDS = 200


class Watch:
    """A context manager that samples GPU 0 all along; `since` sums up what was seen. Sees nothing without the tool."""

    def __init__(self, wanted: bool = True) -> None:
        self._seen: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        self._wanted = wanted

    def __enter__(self) -> Watch:
        if self._wanted and shutil.which("nvidia-smi"):
            query = f"--query-gpu={','.join(_FIELDS.values())}"
            command = [
                "nvidia-smi",
                "--id=0",
                query,
                "--format=csv,noheader,nounits",
                f"--loop-ms={_EVERY_MILLISECONDS}",
            ]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
                )
                threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                values = [_number(cell) for cell in line.split(",")]
                if len(values) == len(_FIELDS):
                    self._seen.append((time.monotonic(), values))

    def since(self, start: float) -> dict[str, dict[str, float]] | None:
        """Lowest, median and highest of each figure since `start` (of time.monotonic); None if nothing was seen."""
        columns = zip(*(values for when, values in list(self._seen) if when >= start), strict=True)
        known = [[value for value in column if not math.isnan(value)] for column in columns]
        return {name: _spread(column) for name, column in zip(_FIELDS, known, strict=False) if column} or None


def _number(cell: str) -> float:
    """nan for a figure that this GPU does not give."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _spread(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": median(values), "most": max(values)}
