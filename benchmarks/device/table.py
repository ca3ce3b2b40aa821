"""Results of drive.py as one markdown table.

python benchmarks/device/table.py out [another folder, or results.jsonl ...]
"""

import json
import sys
from pathlib import Path

LEFT_OUT = (", waits", ", copies")  # of a profile: counts of operations, which results.jsonl has
MOST = 400  # characters of one value


def shown(value) -> str:
    match value:
        case bool() | str():
            return str(value)
        case int() | float():
            return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
        case dict():
            return ", ".join(f"{name(key)} {shown(of)}" for key, of in value.items() if of is not None)
    return ", ".join(map(shown, value))


def name(key: str) -> str:
    return key.removeprefix("perf/").removeprefix("fully_async/").replace("_", " ")


def cell(found: dict) -> str:
    kept = {key: value for key, value in found.items() if value not in (None, "", [], {}) and not key.endswith(LEFT_OUT)}
    return "; ".join(f"{name(key)}: {shown(value)[:MOST]}" for key, value in kept.items())


def result(record: dict) -> str:
    """Return what became of a step, in a line."""
    if record["code"] is None:
        return f"not run: {record['why']}"
    lines = record.get("end", "").splitlines()
    telling = [line for line in lines if line.lower().startswith("error") or "Error:" in line or line.startswith("E  ")]
    why = record["why"] or (telling or lines or [f"code {record['code']}"])[-1].strip()[:250]
    return f"FAILED: {why}" if record["code"] else "ok"


def markdown(records: list[dict]) -> str:
    rows = ["| step | result | s | found |", "| --- | --- | --- | --- |"]
    for record in records:
        cells = (record["step"], result(record), f"{record['seconds']:.0f}", cell(record["found"]))
        rows.append("| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    records = []
    for path in map(Path, sys.argv[1:]):
        file = path / "results.jsonl" if path.is_dir() else path
        records += [json.loads(line) for line in file.read_text().splitlines()]
    print(markdown(records))
