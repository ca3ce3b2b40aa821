"""What a run records: valid JSON for any number, its own directory, every logger, console output for people and log files."""

import json
import math
import os
import pty
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import CONFIGS, ROOT, command, documented_metrics, environment, job_of, run_script
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, MixtralConfig, Qwen2_5_VLConfig

import train_sync
from rl import parts
from rl.algorithm.metrics import summarize
from rl.errors import UserError
from rl.learning.flops import train_flops_per_token
from rl.record.run import Origin, Run, new_directory


@dataclass
class Args(train_sync.Args):
    limit: float = math.inf


def make(tmp_path, origin=None, **flags):
    args = parts.make(Args, output_dir=str(tmp_path), lr=0.5, **flags)
    return Run(args, job_of(3), {"device": "cpu"}, enabled=True, origin=origin)


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def read(run):
    return [json.loads(line, parse_constant=refuse) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]


def test_lines_are_strict_json_and_there_at_once(tmp_path):
    run = make(tmp_path, logger=())
    with run.timer("gen"):
        time.sleep(0.02)
        with run.timer("inner"):
            pass
    run.log(1, {"a": 1.5, "b": math.nan, "c": math.inf, "d": 3})
    (line,) = read(run)  # before anything is closed: a crash loses nothing
    assert (line["step"], line["a"], line["b"], line["c"], line["d"]) == (1, 1.5, None, None, 3)
    assert line["timing_s/gen"] >= line["timing_s/inner"] >= 0
    run.log(2, {})
    assert "timing_s/gen" not in read(run)[1], "timings are of one step"
    assert line["timing_s/step"] >= line["timing_s/gen"]


def test_two_runs_never_share_a_directory(tmp_path):
    names = [new_directory(tmp_path, "same").name for _ in range(3)]
    assert names == ["same", "same-2", "same-3"]
    assert new_directory(tmp_path, "group/name") == tmp_path / "group" / "name"


@pytest.mark.parametrize("name", [None, "", "run", "group/run", "./run", "../elsewhere/run"])
def test_an_unnamed_run_prints_the_name_to_resume_with(tmp_path, capsys, name):
    """If a name is taken, the next run with it gets a directory with another name."""
    for number in (1, 2):
        run = Run(parts.make(train_sync.Args, output_dir=str(tmp_path / "runs"), experiment_name=name), job_of(1), {}, True)
        printed = capsys.readouterr().out
        assert bool(printed) == (number > 1 or not name)
        if printed:
            known_as = printed.partition("--experiment-name ")[2].strip(")\n")
            assert (tmp_path / "runs" / known_as).resolve() == run.dir.resolve(), printed


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--output-dir .*file: .* is a file"):
        new_directory(tmp_path / "file", "run")
    with pytest.raises(UserError, match=r"--output-dir .*cannot be made"):
        new_directory(tmp_path, "x" * 300)


def test_config_says_what_ran(tmp_path):
    text = (make(tmp_path, experiment_name="mine", logger=()).dir / "config.json").read_text()
    config = json.loads(text, parse_constant=refuse)
    assert config["flags"]["lr"] == 0.5 and config["hardware"]["device"] == "cpu" and config["hardware"]["cores"] >= 1
    assert config["flags"]["limit"] is None and config["hardware"]["memory_gb"] > 0
    assert config["packages"]["torch"].startswith("2.") and config["python"].startswith("3.")


def test_other_ranks_write_nothing(tmp_path):
    run = Run(parts.make(Args, output_dir=str(tmp_path / "runs")), job_of(3), {}, enabled=False)
    with run.timer("gen"):
        pass
    assert run.timer.seconds["gen"] >= 0
    run.log(1, {"a": 1.0})
    run.log_generations(1, [{"prompt": "p"}], 1)
    run.log_groups(1, [{"ticket": 1}])
    run.finish(tmp_path)
    assert not (tmp_path / "runs").exists() and not run.timer.seconds


def resume(run, tmp_path, step, **flags):
    """The run that resumes from its checkpoint of that step; its process is dead."""
    run._lock.close()
    return make(tmp_path, origin=Origin(run.dir, run.dir / f"step_{step:06d}"), **flags)


def test_a_resumed_run_has_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make(tmp_path, logger=("tensorboard",))
    for step in (1, 2, 3):
        run.log_tickets(step, [step])
        run.log(step, {"critic/score/mean": step / 4})
    with open(run.dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "cut o')
    run = resume(run, tmp_path, 1, logger=("tensorboard",))
    for step in (2, 3):
        run.log_tickets(step, [10 + step])
        run.log(step, {"critic/score/mean": step / 8})
    run.finish(tmp_path)
    assert [(row["step"], row["critic/score/mean"]) for row in read(run)] == [(1, 0.25), (2, 0.25), (3, 0.375)]
    assert [json.loads(line)["trained"] for line in (run.dir / "tickets.jsonl").read_text().splitlines()] == [[1], [12], [13]]
    events = EventAccumulator(str(run.dir / "tensorboard")).Reload().Scalars("critic/score/mean")
    assert [(e.step, e.value) for e in events] == [(1, 0.25), (2, 0.25), (3, 0.375)]
    assert (run.dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    superseded = (run.dir / "metrics_superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["critic/score/mean"] for line in superseded] == [0.5, 0.75]
    assert {path.name for path in run.dir.glob("config*.json")} == {"config.json", "config_from_000002.json"}


def test_two_processes_never_write_one_run(tmp_path):
    run = make(tmp_path, logger=())
    with pytest.raises(UserError, match="belongs to a run that is still running"):
        make(tmp_path, origin=Origin(run.dir, None), logger=())


@pytest.mark.parametrize("logger", [(), ("tensorboard",)])
def test_loggers_are_added_to_the_console(logger, tmp_path, capsys):
    """With any --logger the console shows the run's name, the steps, the warnings and the messages."""
    run = make(tmp_path, logger=logger)
    run.say("a line for the user")
    run.warn_unscored(["error: no score"])
    for step in (1, 2, 3):
        run.log(step, {"critic/score/mean": 0.1 * step})
    run.finish("here")
    shown = capsys.readouterr().out
    said = ("a line for the user", "warning: responses that could not be scored", "step 3/3  reward 0.250")  # since step 1
    assert all(shown.count(words) == 1 for words in (f"run {run.dir} (", *said)), shown
    assert bool([*run.dir.rglob("events.out*")]) == ("tensorboard" in logger)


def test_summarize():
    assert summarize("x", torch.tensor([1, 2, 6])) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}
    assert all(math.isnan(v) for v in summarize("x", torch.zeros(0)).values())


def matrices(model) -> int:
    return sum(p.numel() for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n)


@pytest.mark.parametrize("kind", ["qwen2-untied", "qwen3", "qwen3_5", "moe"])
def test_flops_count_the_matrices(kind):
    """6 per parameter that takes part in a matrix product; norms, biases and the embedding look-up are not counted. Of a delta
    net 6 per weight of its convolution, too, and 15 per element of its states; of a mixture only the active experts."""
    config = CONFIGS[kind]()
    weights, attention = matrices(AutoModelForCausalLM.from_config(config)), 2 * 6 * 4 * 16 * 100
    if kind == "qwen3_5":  # one of the two layers attends
        attention = attention // 2 + 15 * 4 * 16 * 16
    if kind == "moe":  # two of eight experts, each 3 * 64 * 32, in both layers
        weights -= 2 * 6 * 3 * 64 * 32
    assert train_flops_per_token(config, 100) == 6 * weights + attention


def test_a_warning_is_one_line_until_its_count_has_grown_tenfold(tmp_path, capsys):
    run = make(tmp_path, logger=("console",))
    for step in range(25):
        run.warn_unscored([f"error: number {step}"])
    run.warn_unscored([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(lines) == 2 and all("could not be scored" in line for line in lines)
    assert ": 1 so far" in lines[0] and "number 0" in lines[0] and ": 10 so far" in lines[1] and "number 9" in lines[1]


def test_the_docs_have_no_metric_that_is_gone():
    """Every part of a documented name is in the code; the scripts' tests check that every metric of a run is documented."""
    documented = documented_metrics()
    assert len(documented) == len({*documented}) > 100
    patterns = ("rl/**/*.py", "*.py", "*_grader/*.py")
    code = "\n".join(file.read_text() for pattern in patterns for file in ROOT.glob(pattern))
    words = {*re.findall(r"\w+", code)}
    begun = tuple(word for word in words if word.endswith("_") and len(word) > 5)  # f"..._{name}"
    for name in documented:
        for part in filter(None, re.split(r"\W+", re.sub(r"<[^>]*>", "", name))):
            assert part in words or part.startswith(begun), name


DISPLAY = """
import sys
from types import SimpleNamespace
import train_sync
from rl import parts
from rl.record.run import Run
job = SimpleNamespace(script="script", total_steps=3, notes={})
run = Run(parts.make(train_sync.Args, output_dir=sys.argv[1]), job, {}, True)
run.log(0, {"val-core/demo/acc/mean@1": 0.34})
for step in (1, 2, 3):
    run.log(step, {"critic/score/mean": 0.1 * step, "perf/total_num_tokens": 617.0, "perf/time_per_step": 0.5})
run.finish("here")
"""


@pytest.mark.slow
def test_plain_lines_where_there_is_no_terminal(tmp_path):
    (tmp_path / "display.py").write_text(DISPLAY)
    done = run_script(tmp_path / "display.py", tmp_path / "runs", env={"FORCE_COLOR": "1"})  # as many CI systems set it
    began, *lines = done.stdout.splitlines()
    (run,) = (tmp_path / "runs").iterdir()
    assert began == f"run {run} (resume with --experiment-name {run.name})"
    assert "\x1b" not in done.stdout and lines[0] == "step 0/3  validation accuracy 0.340"
    assert lines[-4] == "step 3/3  reward 0.200  1,234 tokens/s"  # the mean since step 0
    assert lines[-3] == "checkpoint  here"


def on_a_terminal(script: Path, out: Path, columns: int) -> tuple[int, str]:
    """Run the script on a pseudo-terminal of this width. Return (exit code, everything shown)."""
    master, slave = pty.openpty()
    env = environment(TERM="xterm", COLUMNS=str(columns))
    process = subprocess.Popen(command(script, out), cwd=ROOT, env=env, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:  # the terminal closes with the process
            break
    os.close(master)
    return process.wait(60), shown.decode()


@pytest.mark.slow
def test_a_live_bar_on_a_terminal(tmp_path):
    (tmp_path / "display.py").write_text(DISPLAY)
    code, text = on_a_terminal(tmp_path / "display.py", tmp_path / "runs", columns=80)
    assert code == 0 and "\x1b" in text and "\u2026" not in text, "nothing may be cut off"
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "3/3" in text and "reward 0.200" in text and "1,234 tokens/s" in text and "left" in text
    assert "step 0: validation accuracy 0.340" in text


@pytest.mark.parametrize("make_config", [GPT2Config, GptOssConfig, MixtralConfig, Qwen2_5_VLConfig])
def test_flops_of_other_architectures(make_config):
    """Configs that lack a field, or keep the language model's in a part of their own: an estimate, never an exception."""
    config = make_config()
    text = config.get_text_config()
    flops = train_flops_per_token(config, 100)
    assert math.isfinite(flops) and flops > 6 * text.hidden_size * text.vocab_size
    assert flops == train_flops_per_token(text, 100)
