"""Two versions of the sources on the rows of a suite: how fast is each row now, against how fast it was?

    python benchmarks/versions.py --before ../before --suite forward --suite backward --save

`--before` is a checkout of the other version. Each version runs in a process of its own, which knows nothing of this
package but `tilewise.attention` and `attention_packed`, so that any two versions can be compared. Both have the same
inputs. Their results are compared before anything is timed. Rounds are interleaved, in a random order; the ratio of a
row (above 1: faster now) has the interval of tilewise.lab's statistic.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("now", "before")

# The process of a version: one JSON object per line in, one out.
WORKER = r"""
import json, math, sys, torch, tilewise
answers, sys.stdout = sys.stdout, sys.stderr
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

def prepare(p, what, backend):
    generator = torch.Generator("cuda").manual_seed(5)
    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=generator).to(DTYPES[p["dtype"]])
    if p["starts"]:
        return prepare_packed(p, what, backend, draw)
    heads, lengths = (p["heads_q"], p["heads_kv"], p["heads_kv"]), (p["seq_q"], p["seq_kv"], p["seq_kv"])
    dims = (p["head_dim"], p["head_dim"], p["head_dim_v"])
    shapes = [(p["batch"], *((s, h) if p["layout"] == "bshd" else (h, s)), d) for h, s, d in zip(heads, lengths, dims)]
    q, k, v = (draw(*shape).requires_grad_(what != "forward") for shape in shapes)
    options = {name: p[name] for name in ("mask", "scale", "softcap", "layout", "precision")}
    def forward():
        return tilewise.attention(q, k, v, **options, return_lse=p["needs_lse"], backend=backend)
    def out_of(result):
        return result[0] if p["needs_lse"] else result
    return calls(what, forward, out_of, (q, k, v), draw(*out_of(forward()).shape))

def prepare_packed(p, what, backend, draw):
    "Sequences behind one another, with their offsets on the device."
    total = p["starts"][-1]
    shapes = [(total, p[heads], p[dim]) for heads, dim in
              (("heads_q", "head_dim"), ("heads_kv", "head_dim"), ("heads_kv", "head_dim_v"))]
    q, k, v = (draw(*shape).requires_grad_(what != "forward") for shape in shapes)
    starts = torch.tensor(p["starts"], dtype=torch.int32, device="cuda")
    longest = max(end - begin for begin, end in zip(p["starts"], p["starts"][1:]))
    options = {name: p[name] for name in ("mask", "scale", "softcap", "precision")}
    def forward():
        return tilewise.attention_packed(q, k, v, starts, starts, longest, longest, **options, backend=backend)
    return calls(what, forward, lambda out: out, (q, k, v), draw(*forward().shape))

def calls(what, forward, out_of, inputs, dout):
    "What is timed, and what gives the results that are compared."
    if what == "forward":
        return forward, lambda: [out_of(forward())]
    recorded = out_of(forward())
    def backward():
        return torch.autograd.grad(recorded, inputs, dout, retain_graph=True)
    def step():
        return torch.autograd.grad(out_of(forward()), inputs, dout)
    return {"backward": backward, "step": step}[what], lambda: list(step())

def fingerprint(tensors):
    "A few random projections of each result, and its norm."
    found = []
    for tensor in tensors:
        flat = tensor.detach().double().flatten()
        signs = torch.randint(0, 2, (4, flat.numel()), device="cuda", dtype=torch.int8,
                              generator=torch.Generator("cuda").manual_seed(7))
        found.append([*((2 * sign.double() - 1).dot(flat).item() for sign in signs), flat.norm().item()])
    return found

def clock(call, seconds):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    def run(count):
        torch.cuda.synchronize(); start.record()
        for _ in range(count): call()
        end.record(); end.synchronize()
        return start.elapsed_time(end) / 1e3 / count
    run(2)
    return run(max(3, min(2000, math.ceil(seconds / max(run(2), 1e-6)))))

def graph_of(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        call(); call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        call()
    return graph.replay

print("ready", file=answers, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        if asked["do"] == "prepare":
            call, results = prepare(asked["problem"], asked["what"], asked["backend"])
            answer = fingerprint(results())
            if asked["what"] == "forward" and asked["method"] in ("graph", "events"):
                call = graph_of(call)
        else:
            answer = clock(call, asked["seconds"])
        reply = {"answer": answer}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(reply), file=answers, flush=True)
"""


class Version:
    def __init__(self, tree: Path) -> None:
        if not (tree / "src" / "tilewise").is_dir():
            raise SystemExit(f"{tree} has no src/tilewise: pass a checkout of the other version as --before")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str((tree / "src").resolve())},
        )

    def ask(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return {} if line == "ready\n" else json.loads(line) if line else {"error": "its process died"}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def plain(problem: Any) -> dict[str, Any]:
    """What both versions are asked, without a type of either. Documents are packed sequences, with offsets `starts`."""
    starts, mask = getattr(problem.mask, "cu_seqlens_q", ()), getattr(problem.mask, "inner", problem.mask)
    mask_text = None if str(mask) == "full" else str(mask)
    return problem.to_dict() | {"softcap": problem.softcap, "mask": mask_text, "starts": starts}


def difference(first: list[list[float]], second: list[list[float]]) -> float:
    """The largest difference of a projection, in units of the norm: what random rounding leaves is far below 1."""
    pairs = [
        (a, b, max(one[-1], 1e-30))
        for one, two in zip(first, second, strict=True)
        for a, b in zip(one, two, strict=True)
    ]
    return max(abs(a - b) / norm for a, b, norm in pairs)


def measure(row: Any, what: str, versions: dict[str, Version], rounds: int, seconds: float) -> dict[str, Any]:
    backend = row.candidates[0] if row.candidates[0] in ("sm80", "sm90") else "auto"
    asked = {"problem": plain(row.problem), "what": what, "backend": backend, "method": row.timing}
    found: dict[str, Any] = {"row": row.name, "what": what, "seconds": {name: [] for name in NAMES}}
    told = {name: version.ask(do="prepare", **asked) for name, version in versions.items()}
    errors = {name: answer["error"] for name, answer in told.items() if "error" in answer}
    if errors:
        return found | {"error": errors}
    found["difference"] = difference(told["now"]["answer"], told["before"]["answer"])
    for _ in range(rounds):
        for name in random.sample(NAMES, 2):
            found["seconds"][name].append(versions[name].ask(do="time", seconds=seconds)["answer"])
    return found


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    from tilewise.lab.measure import environment, statistics  # noqa: PLC0415  (after --help, which needs no torch)
    from tilewise.lab.studies import suites  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other version")
    parser.add_argument("--suite", action="append", required=True, help="of `tilewise bench`; may be repeated")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this part; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.02, help="per version, row and round")
    parser.add_argument("--save", action="store_true", help="keep a record in benchmarks/results")
    options = parser.parse_args()
    versions = {"now": Version(ROOT), "before": Version(options.before)}
    for version in versions.values():
        version.answer()
    done: list[dict[str, Any]] = []
    start = time.monotonic()
    try:
        for suite in options.suite:
            ratios = []
            rows = [
                row for row in suites.rows_of(suite) if not options.only or any(p in row.name for p in options.only)
            ]
            for row in rows:
                for what in row.timed:
                    found = measure(row, what, versions, options.rounds, options.seconds)
                    done.append({"suite": suite} | found)
                    speed = statistics.speed(found["seconds"]["now"], found["seconds"]["before"], among=1)
                    if speed is None:
                        print(f"{suite:9} {row.name} {what}: {found['error']}", flush=True)
                        continue
                    ratios.append(speed.ratio)
                    done[-1] |= {"ratio": speed.ratio, "interval": [speed.low, speed.high]}
                    times = "{:.1f} us, before {:.1f}".format(*(1e6 * _median(found["seconds"][n]) for n in NAMES))
                    note = f"  results differ by {found['difference']:.1e}" if found["difference"] > 0.02 else ""
                    interval = f"({speed.low:.3f}..{speed.high:.3f})"
                    print(f"{suite:9} {row.name} {what}: {speed.ratio:.3f} {interval}, {times}{note}", flush=True)
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
            worst = min(ratios, default=math.nan)
            print(f"{suite}: geomean {mean:.4f} of {len(ratios)} rows, worst {worst:.3f}", flush=True)
    finally:
        for version in versions.values():
            version.close()
    if options.save:
        command = ["benchmarks/versions.py", *(f"--suite {suite}" for suite in options.suite)]
        record = {"kind": "versions", "rounds": options.rounds, "wall_seconds": time.monotonic() - start}
        record |= {"provenance": environment.provenance(5, command), "rows": done}
        stamp = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
        path = ROOT / "benchmarks" / "results" / f"{stamp}-versions.json"
        path.write_text(json.dumps(record) + "\n")
        print(path)


if __name__ == "__main__":
    main()
