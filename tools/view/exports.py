"""Recorded responses as files: rows of tools/view/rows.py, and the formats of other viewers, ATIF (Agent Trajectory Interchange
Format, RFC 1 of Harbor) and Inspect's evaluation log, which `inspect view` reads.
"""

import datetime
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rl.samples.recorder import Record
from tools.view.rows import Samples, read, responses

ATIF = "ATIF-v1.7"
INSPECT = 2  # version of the log


def atif(run: Path, steps: Iterable[int]) -> Iterator[dict]:
    """Yield a trajectory for each response: the prompt, then a step for each turn of the policy, with its tokens and log-probs.
    What an environment added is the observation of the turn before."""
    samples = Samples(run)
    for row, response in responses(samples, steps):
        number = 1
        turns = [{"step_id": number, "source": "user", "message": row["prompt"]}]
        for who, text, tokens in samples.parts(response):
            if who == "environment" and turns[-1]["source"] == "agent":
                turns[-1]["observation"] = {"results": [{"content": text}]}
                continue
            number += 1
            turn = {"step_id": number, "source": "agent" if who == "policy" else "user", "message": text}
            if who == "policy":
                ids, log_probs = response.token_ids[tokens].tolist(), response.log_probs[tokens].tolist()
                turn["metrics"] = {"completion_tokens": len(ids), "completion_token_ids": ids, "logprobs": log_probs}
            turns.append(turn)
        extra = {name: row[name] for name in ("step", "ticket", "where", "source", "ground_truth", "score", "extra", "error")}
        yield {
            "schema_version": ATIF,
            "session_id": run.name,
            "trajectory_id": f"{row['step']}/{row['ticket']}/{row['number']}",
            "agent": {"name": "policy", "version": str(row["versions"] and row["versions"][1])},
            "steps": turns,
            "final_metrics": {"total_prompt_tokens": row["prompt_tokens"], "total_completion_tokens": response.sampled},
            "extra": extra | {"finish": row["finish"]},
        }


def inspect(run: Path, steps: Iterable[int]) -> Iterator[dict]:
    """Yield a sample of Inspect's log for each response. Those of a group are its epochs."""
    samples = Samples(run)
    for row, response in responses(samples, steps):
        messages = [{"role": "user", "content": row["prompt"]}]
        for who, text, _ in samples.parts(response):
            messages.append({"role": "assistant" if who == "policy" else "user", "content": text})
        last = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        choice = {"message": {"role": "assistant", "content": last}}
        choice["stop_reason"] = "stop" if row["finish"] == "stop" else "max_tokens"
        score = {"value": "not scored" if row["score"] is None else row["score"], "explanation": row["error"]}
        yield {
            "id": f"{run.name}, step {row['step']}, ticket {row['ticket']}",
            "epoch": row["number"] + 1,
            "input": row["prompt"],
            "target": str(row["ground_truth"]),
            "messages": messages,
            "output": {"model": samples.record.starts[-1]["flags"]["model"], "choices": [choice]},
            "scores": {"reward": score | {"metadata": row["extra"]}},
            "metadata": {name: row[name] for name in ("where", "source", "tokens", "versions", "mean_log_prob")},
        }


def _log(samples: list[dict]) -> dict:
    """Return Inspect's log of these samples."""
    model = samples[0]["output"]["model"] if samples else "none"
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    spec = {"created": created, "task": "training", "model": model, "config": {}, "dataset": {"samples": len(samples)}}
    return {"version": INSPECT, "status": "success", "eval": spec, "samples": samples}


def _rows(run: Path, steps: Iterable[int]) -> Iterator[dict]:
    for row in read(run, steps):
        yield {"run": run.name} | row


FORMATS = {"jsonl": _rows, "atif": atif, "inspect": inspect}


def write(file: Path, kind: str, runs: Iterable[Path], steps: range) -> int:
    """Write the recorded responses of these steps in one of FORMATS. Return their number."""
    found = itertools.chain.from_iterable(
        FORMATS[kind](run, [step for step in Record(run).steps if step in steps]) for run in runs
    )
    if kind == "inspect":
        samples = [*found]
        file.write_text(json.dumps(_log(samples)))
        return len(samples)
    count = 0
    with file.open("w") as out:
        for row in found:
            out.write(json.dumps(row) + "\n")
            count += 1
    return count
