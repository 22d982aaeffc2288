"""The record of `make nightly`."""

from __future__ import annotations

import json
from typing import Any

import nightly


def test_parts_that_did_not_run_keep_their_record(monkeypatch: Any, tmp_path: Any) -> None:
    record = tmp_path / "record.json"
    parts = {"generated": lambda options: {"failed": 0}, "soak": lambda options: {"failed": 2}}
    monkeypatch.setattr(nightly, "PARTS", parts)
    assert nightly.main(["--parts", "soak", "--record", str(record)]) == 1
    of_soak = json.loads(record.read_text())["soak"]
    assert of_soak["failed"] == 2
    assert {"date", "versions"} < set(of_soak)
    assert nightly.main(["--parts", "generated", "--record", str(record)]) == 0
    assert list(json.loads(record.read_text()).items())[1] == ("soak", of_soak)
