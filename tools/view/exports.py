"""Recorded responses as files: rows of tools/view/rows.py, and the formats of other viewers, ATIF (Agent Trajectory Interchange
Format, RFC 1 of Harbor) and Inspect's evaluation log, which `inspect view` reads.
"""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

from rl.samples.group import Response
from tools.view.rows import Samples, parts_of

ATIF = "ATIF-v1.7"
INSPECT = 2  # version of the log


def atif(samples: Samples, row: dict, response: Response) -> dict:
    """Return a response's trajectory: the prompt, then a step for each turn of the policy, with its tokens and log-probs. What
    an environment added is the observation of the turn before."""
    turns = [{"source": "user", "message": row["prompt"]}]
    for (who, text), (_, tokens) in zip(row["parts"], parts_of(response), strict=True):
        if who == "policy":
            ids, log_probs = response.token_ids[tokens].tolist(), response.log_probs[tokens].tolist()
            metrics = {"completion_tokens": len(ids), "completion_token_ids": ids, "logprobs": log_probs}
            turns.append({"source": "agent", "message": text, "metrics": metrics})
        elif who == "environment" and turns[-1]["source"] == "agent":
            turns[-1]["observation"] = {"results": [{"content": text}]}
        else:
            turns.append({"source": "user", "message": text})
    names = ("step", "ticket", "where", "source", "ground_truth", "score", "extra", "error", "finish")
    return {
        "schema_version": ATIF,
        "session_id": samples.run_dir.name,
        "trajectory_id": f"{row['step']}/{row['ticket']}/{row['number']}",
        "agent": {"name": "policy", "version": str(row["versions"] and row["versions"][1])},
        "steps": [{"step_id": number} | turn for number, turn in enumerate(turns, 1)],
        "final_metrics": {"total_prompt_tokens": row["prompt_tokens"], "total_completion_tokens": response.sampled},
        "extra": {name: row[name] for name in names},
    }


def inspect(samples: Samples, row: dict, _: Response) -> dict:
    """Return a response as a sample of Inspect's log. Those of a group are its epochs."""
    roles = [("assistant" if who == "policy" else "user", text) for who, text in row["parts"]]
    messages = [{"role": role, "content": text} for role, text in [("user", row["prompt"]), *roles]]
    said = [message for message in messages if message["role"] == "assistant"]
    last = said[-1] if said else {"role": "assistant", "content": ""}
    choice = {"message": last, "stop_reason": "stop" if row["finish"] == "stop" else "max_tokens"}
    value = "not scored" if row["score"] is None else row["score"]
    return {
        "id": f"{samples.run_dir.name}, step {row['step']}, ticket {row['ticket']}",
        "epoch": row["number"] + 1,
        "input": row["prompt"],
        "target": str(row["ground_truth"]),
        "messages": messages,
        "output": {"model": samples.record.starts[-1]["flags"]["model"], "choices": [choice]},
        "scores": {"reward": {"value": value, "explanation": row["error"], "metadata": row["extra"]}},
        "metadata": {name: row[name] for name in ("where", "source", "tokens", "versions", "mean_log_prob")},
    }


def log(samples: list[dict]) -> dict:
    """Return Inspect's log of these samples."""
    model = samples[0]["output"]["model"] if samples else "none"
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    spec = {"created": created, "task": "training", "model": model, "config": {}, "dataset": {"samples": len(samples)}}
    return {"version": INSPECT, "status": "success", "eval": spec, "samples": samples}


FORMATS = {"jsonl": lambda samples, row, _: {"run": samples.run_dir.name} | row, "atif": atif, "inspect": inspect}


def write(file: Path, kind: str, runs: Iterable[Path], steps: range) -> int:
    """Write the recorded responses of these steps in one of FORMATS. Return their number."""
    found = (
        FORMATS[kind](samples, *its)
        for samples in map(Samples, runs)
        for its in samples.responses(step for step in samples.record.steps if step in steps)
    )
    if kind == "inspect":
        whole = [*found]
        file.write_text(json.dumps(log(whole)))
        return len(whole)
    with file.open("w") as out:
        return len([out.write(json.dumps(row) + "\n") for row in found])
