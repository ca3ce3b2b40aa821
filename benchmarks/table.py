"""The ten rows of docs/benchmarks.md and all rows of docs/generated/benchmarks.md, out of benchmarks/results/.

    python benchmarks/table.py            # writes them between the two marks in each
    python benchmarks/table.py --show     # prints all rows

A result that is not there has no rows. Ratios are medians of the interleaved rounds' ratios, with their range where the file
holds the rounds.
"""

import json
import statistics
from dataclasses import dataclass

import tyro
from common import RESULTS, ROOT, over, ratios, table
from scripts.images import BASES, UNITS
from scripts.trl import CASES, OURS, TRL, TRL_PLAIN, of_precision, seconds

BEGIN, END = "<!-- made by benchmarks/table.py -->", "<!-- end of what benchmarks/table.py makes -->"


MACHINES = {"A": "Intel Xeon with AMX", "B": "older Intel Xeon, 2.50 GHz", "C": "AMD EPYC"}
HEADLINES = [  # what was measured, how the cell begins that it is compared with, the benchmark, the machine
    ("SmolLM2-135M, 32 tokens each: sync", "TRL", "scripts/real_model", "A"),
    ("30M parameters, natural lengths up to 256: one step off, bf16", "TRL", "scripts/trl", "A"),
    ("1M parameters, 64 tokens each: sync", "TRL", "scripts/trl", "A"),
    ("async, long-tailed lengths", "sync", "scripts/overlap", "A"),
    ("async, 3 steps ahead, long-tailed lengths", "sync", "scripts/overlap", "A"),
    ("the embedded engine", "generate()", "generation/engine", "B"),
    ("the learner's update, 42M parameters, one prompt for 8 responses", "a bare", "learning/learner", "C"),
    ("the learner's update, 42M parameters, equal scores in half of the groups", "the same", "learning/learner", "C"),
    ("the ring, records of 4 KB, checksums included", "Ray's actor queue, by value", "samples/ring", "A"),
    ("a verified publish, 38M parameters, fp32", "one raw", "weights/publish", "A"),
]


@dataclass
class Args:
    show: bool = False
    """Print the table of all rows instead of writing the files."""


def against_trl(of: dict) -> list[list[str]]:
    rows = []
    for name, result in of.items():
        case, runs = CASES[name], result["runs"]
        times = {side: [seconds(case, one) for one in its] for side, its in runs.items()}
        unit = "s" if case.is_demo else "s a step"
        for side in OURS:
            trl, plain = (of_precision(base, side) for base in (TRL, TRL_PLAIN))
            if not times.get(side) or not times.get(trl):
                continue
            form = ".1f" if times[trl][0] > 10 else ".2f"
            mine, base = (f"{statistics.median(times[s]):{form}} {unit}" for s in (side, trl))
            more = f"; {over(ratios(times[side], times[plain]))} of TRL without it" if times.get(plain) else ""
            rows.append([f"{case.title}: {side}", mine, f"{trl}, {base}", over(ratios(times[side], times[trl])) + more])
    return rows


def real_model(of: dict) -> list[list[str]]:
    runs = of["runs"]
    steps = {side: [statistics.mean(one["seconds"]) for one in its] for side, its in runs.items()}
    base = f"TRL without gradient checkpointing, {statistics.median(steps['TRL']):.1f} s a step"
    return [
        [
            f"SmolLM2-135M, 32 tokens each: {side}",
            f"{statistics.median(its):.1f} s a step",
            base,
            over(ratios(its, steps["TRL"])).replace(", one round", " (one run)"),
        ]
        for side, its in steps.items()
        if side != "TRL" and len(its) == len(steps["TRL"])
    ]


def overlap(of: dict) -> list[list[str]]:
    step = {side: [run["step"] for run in runs] for side, runs in of["equal"].items()}
    rate = {side: [run["tokens_per_s"] for run in runs] for side, runs in of["tailed"].items()}
    busy = "training, other core busy"
    out = []
    for against, other in (("the longer of the two alone", "training"), ("the longer of the two with a busy core", busy)):
        base = [max(pair) for pair in zip(step["generation"], step[other], strict=True)]
        measured = f"{statistics.median(step['async']):.3f} s a step"
        told = f"{against}, {statistics.median(base):.3f} s"
        out.append(["async, generation and training about equally long", measured, told, over(ratios(step["async"], base))])
    sync = f"sync, {statistics.median(rate['sync']):,.0f} tokens/s"
    for side in (side for side in rate if side != "sync"):
        measured = f"{statistics.median(rate[side]):,.0f} tokens/s"
        out.append([f"{side}, long-tailed lengths", measured, sync, over(ratios(rate[side], rate["sync"]))])
    return out


def publish(of: dict) -> list[list[str]]:
    out = []
    for r in of.values():
        raw, whole = r["seconds"]["raw"], r["seconds"]["publish"]
        measured, base = (f"{1e3 * statistics.median(values):.1f} ms" for values in (whole, raw))
        ratio = statistics.median(whole) / statistics.median(raw)
        name = f"a verified publish, {r['parameters'] / 1e6:.0f}M parameters, fp32"
        out.append([name, measured, f"one raw gloo broadcast of as many bytes, {base}", f"{ratio:.2f}"])
    return out


def adapters(of: dict) -> list[list[str]]:
    out = []
    for r in of.values():
        sides, size = r["sides"], f"{r['parameters'] / 1e6:.0f}M parameters, fp32, rank 32"
        for side in (side for side in sides if side != "merged"):
            one, base = sides[side], sides["merged"]
            measured, merged = (
                f"{1e3 * statistics.median(s['seconds']):.1f} ms, {s['bytes'] / 1e6:.1f} MB" for s in (one, base)
            )
            name = f"a publish, {size}: {side}"
            out.append([name, measured, f"merged weights, {merged}", over(ratios(one["seconds"], base["seconds"]))])
    return out


def ring(of: dict) -> list[list[str]]:
    bases = {"memcpy": "one memcpy into a warm buffer", "queue_tensor": "`torch.multiprocessing.Queue`, tensors"}
    bases |= {"ray_value": "Ray's actor queue, by value", "ray_reference": "Ray's actor queue, by reference"}
    out = []
    for row in of["rows"]:
        for side, name in bases.items():
            if side not in row or row["bytes"] < 1 << 12:
                continue
            mine, base = (f"{row[s]['per_s']:,.0f}/s" for s in ("ring", side))
            ratio = row["ring"]["per_s"] / row[side]["per_s"]
            told = f"{ratio:.0f}" if ratio > 10 else f"{ratio:.2g}"
            out.append([f"the ring, records of {row['message']}, checksums included", mine, f"{name}, {base}", told])
    return out


def rates(name: str, ours: str, theirs: str):
    """Rows of files that hold tokens/s by side and round."""

    def rows(of: dict) -> list[list[str]]:
        mine, base = (f"{statistics.median(of[side]):,.0f} tokens/s" for side in (ours, theirs))
        return [[name, mine, f"{theirs}, {base}", over(ratios(of[ours], of[theirs]))]]

    return rows


def learner(of: dict) -> list[list[str]]:
    out, one, half = [], "one prompt for 8 responses", "update, half without advantage"
    compared = [("update", "bare", one, "a bare forward, backward and AdamW step")]
    compared += [("update", "update, prompts repeated", one, "the same, a prompt for each")]
    compared += [(half, "update", "equal scores in half of the groups", "the same, none of them equal")]
    for r in of["sizes"].values():
        for side, other, what, against in compared:
            rates = [r["tokens_per_s"][name] for name in (side, other)]
            mine, base = (f"{statistics.median(of_side):,.0f} tokens/s" for of_side in rates)
            name = f"the learner's update, {r['parameters'] / 1e6:.0f}M parameters, {what}"
            out.append([name, mine, f"{against}, {base}", over(ratios(*rates))])
    return out


def hybrid(of: dict) -> list[list[str]]:
    seconds, computed, out = of["seconds"], of["computed"], []
    size = f"{of['parameters']['hybrid'] / 1e6:.0f}M parameters"
    alone = f"transformers, a sequence at a time, {computed['one at a time']:,} tokens"
    compared = [("packed", "one at a time", f"a hybrid model's step, {size}, {computed['packed']:,} tokens computed", alone)]
    compared += [("update", "packed", f"the learner's update, hybrid, {size}", "a bare forward, backward and AdamW step")]
    dense = f"a dense model's, {of['parameters']['dense'] / 1e6:.0f}M parameters"
    compared += [("packed", "dense", f"a hybrid model's step, {size}", dense)]
    for side, other, name, against in compared:
        mine, base = (f"{statistics.median(seconds[of_side]):.2f} s" for of_side in (side, other))
        out.append([name, mine, f"{against}, {base}", over(ratios(seconds[side], seconds[other]))])
    return out


def real_size(of: dict) -> list[list[str]]:
    least = [of["flops"] / rate for rate in of["rates"]]
    name = f"a learner's step, {of['parameters'] / 1e6:.0f}M parameters of Qwen2.5-0.5B's shape, one core"
    told = f"its arithmetic at the rate of the core's products, {statistics.median(least):.1f} s"
    return [[name, f"{statistics.median(of['seconds']):.1f} s", told, over(ratios(of["seconds"], least))]]


def images(of: dict) -> list[list[str]]:
    out, named = [], {"learner": "the learner", "generator": "the generator", "memory": "the memory of a learner's step"}
    for part, result in of.items():
        unit, form = UNITS[part]
        for size in result["sizes"].values():
            base = size["sides"].get(BASES[part])
            for side, values in size["sides"].items():
                if not base or side == BASES[part]:
                    continue
                mine, theirs = (f"{statistics.median(rounds):{form}} {unit}" for rounds in (values, base))
                name = f"images, {size['about']}: {named[part]}, {side}"
                out.append([name, mine, f"{BASES[part]}, {theirs}", over(ratios(values, base))])
    return out


def logprobs(of: dict) -> list[list[str]]:
    runs, out = of["runs"], []
    for key, unit in (("peak_gb", "GB at the peak"), ("seconds", "s")):
        values = {side: [one[key] for one in its] for side, its in runs.items()}
        mine, base = (f"{statistics.median(values[side]):.2f} {unit}" for side in ("chunked", "held"))
        name = f"log-probs and entropy, {of['setting']['vocabulary']:,} words, forward and backward"
        out.append([name, mine, f"holding the logits, {base}", over(ratios(values["chunked"], values["held"]))])
    return out


def checkpoint(of: dict) -> list[list[str]]:
    out = []
    for mode, sides in of["runs"].items():
        stall = [run["stall"] for run in sides["every step"]]
        step = [run["step"] for run in sides["every step"]]
        name = f"{mode}, a checkpoint of 30M parameters after every step: what a step waits for it"
        out.append(
            [name, f"{statistics.median(stall):.2f} s", f"the step, {statistics.median(step):.2f} s", over(ratios(stall, step))]
        )
    return out


def startup(of: dict) -> list[list[str]]:
    makings = [seconds for its in of["makings"].values() for seconds in its]
    out = [
        [
            f"{mode}: from the command to the end of the demo's first step",
            over([one["done"] for one in runs], ".1f") + " s",
            "",
            "",
        ]
        for mode, runs in of["runs"].items()
    ]
    return [*out, ["making the demo's model, once, in any mode", over(makings, ".0f") + " s", "", ""]]


ROWS = {
    "real_model": real_model,
    "trl": against_trl,
    "overlap": overlap,
    "engine": rates("the embedded engine", "embedded engine", "generate()"),
    "engine_vllm": rates("our loop over vLLM", "our loop", "LLM.generate, the same requests"),
    "learner": learner,
    "hybrid": hybrid,
    "real_size": real_size,
    "images": images,
    "logprobs": logprobs,
    "publish": publish,
    "adapters": adapters,
    "ring": ring,
    "checkpoint": checkpoint,
    "startup": startup,
}


def headline(row: list[str], benchmark: str, machine: str) -> list[str]:
    """A row with how many times faster it is, its command and its machine."""
    name, measured, base, ratio = row
    ratio = float(ratio.partition(" ")[0])
    is_a_rate = measured.endswith("/s")
    faster = ratio if is_a_rate else 1 / ratio
    return [name, measured, base, f"{faster:.{0 if faster > 10 else 1}f}x", f"`benchmarks/{benchmark}.py`", MACHINES[machine]]


def make() -> dict[str, str]:
    """{page: its table}"""
    rows = []
    for name, rows_of in ROWS.items():
        if (file := RESULTS / f"{name}.json").exists():
            rows += rows_of(json.loads(file.read_text()))
    few = [
        headline(row, benchmark, machine)
        for what, base, benchmark, machine in HEADLINES
        for row in rows
        if row[0] == what and row[2].startswith(base)
    ]
    ten = table(["what", "measured", "compared with", "faster", "command", "machine"], few)
    return {"docs/benchmarks.md": ten, "docs/generated/benchmarks.md": table(["", "measured", "against", "ratio"], rows)}


def main(args: Args) -> None:
    tables = make()
    if args.show:
        print(tables["docs/generated/benchmarks.md"])
        return
    for name, rows in tables.items():
        page = ROOT / name
        before, begin, rest = page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"error: {name} has no two marks {BEGIN} and {END}. Put them where the table shall stand.")
        page.write_text(f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
