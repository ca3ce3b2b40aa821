"""A copy of a script whose Args would mean another algorithm than they say is refused in a sentence."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from helpers import ROOT, run_script

from rl import flags, generator_loop, parts, split
from rl.errors import UserError
from rl.ranges import may_change
from rl.ranks import dist
from rl.samples import stream

MIXIN = "@dataclass\nclass Mine(RunArgs):\n    {}\n\n\n"
OTHER = "@dataclass\nclass Mine:\n    {}\n\n\n"
PLAIN = "class Mine:\n    {}\n\n\n"
PROPERTY = "@property\n    def {}(self):\n        return True"
BASE, MINE, LAST = "CommonArgs", "Mine, CommonArgs", "CommonArgs, Mine"
OLD = PROPERTY.format("old_is_rollout")
SCHEDULE = r"`schedule: AsyncSchedule = AsyncSchedule\(\)`"
SAMPLING = r"both define --rollout-n.*write `sampling: SamplingArgs = SamplingArgs\(rollout_n=...\)`"
# script; text above Args; bases of Args; text in Args in place of the schedule (with a + after it, None: nothing); the message
REFUSED = [
    ("async", "", "CommonArgs, AsyncSchedule", "", "Args has AsyncSchedule as a base next to CommonArgs"),
    ("async", "", "AsyncSchedule, CommonArgs", "", SCHEDULE),
    ("async", "", BASE, "", "Args lacks `schedule`: write `schedule: .*AsyncSchedule"),
    ("sync", "", BASE, "", "Args lacks `schedule`: write `schedule: .*SyncSchedule"),
    ("sync", "", BASE, "schedule = SyncSchedule()", "Args.schedule = .* has no type"),
    ("async", "", BASE, "schedule: AsyncSchedule = Like()", "Args has Like as `schedule`: write"),
    ("sync", "", "no dataclass", "+seed: int = 5", "Args has the field `.*` and is no dataclass"),
    ("sync", PLAIN.format("seed: int = 5"), MINE, None, "Mine has the field `seed` and is no"),
    ("sync", MIXIN.format("seed: int = 5"), LAST, None, "two bases, and the default of Mine would be lost"),
    ("sync", OTHER.format("seed: int = 5"), MINE, None, "Args gets `seed` from two bases, .*order"),
    ("async", PLAIN.format(OLD), MINE, None, "`old_is_rollout` from two bases, Mine and CommonArgs"),
    ("async", PLAIN.format(OLD), LAST, None, "`old_is_rollout` from two bases"),
]
WITHIN = {  # what Args has after its schedule -> the script, the message
    "val_only = True": ("sync", "has no type, .* write `val_only: bool = True`"),
    "publish_every: int = 4": ("async", "both define --publish-every.*AsyncSchedule.publish_e"),
    "generators: int = 3": ("async", "both define --generators.*AsyncSchedule.generators"),
    "rollout_n: int = 4": ("sync", SAMPLING),
}
REFUSED += [(script, "", BASE, f"+{within}", message) for within, (script, message) in WITHIN.items()]
KINDS = {"sync": "SyncSchedule", "one_step_off": "OneStepOffSchedule", "async": "AsyncSchedule", "sft": "SupervisedSchedule"}
IMPORTS = """from dataclasses import KW_ONLY, field
from typing import Annotated

from rl.data.args import DataArgs
from rl.learning.args import LearnerArgs
from rl.ranges import Range
from rl.samples.schedule import SyncSchedule
from rl.samples.schedule import BatchSchedule
from rl.samples.split_schedule import AsyncSchedule, OneStepOffSchedule
from rl.setup import RunArgs
from rl.supervised import SupervisedSchedule


@dataclass(frozen=True)
class MyArgs(LearnerArgs):
    lr: float = 1e-5


@dataclass(frozen=True)
class Like(BatchSchedule):
    trains_stale = False


"""


def fork(directory: Path, script: str, above: str = "", bases: str = "CommonArgs", within: str | None = None) -> Path:
    """Write a copy of train_<script>.py with other Args."""
    text = (ROOT / f"train_{script}.py").read_text()
    schedule = f"    schedule: {KINDS[script]} = {KINDS[script]}()\n"
    assert schedule in text and text.count("@dataclass\nclass Args(") == 1
    within = schedule if within is None else f"{schedule}    {within[1:]}\n" if within[:1] == "+" else f"    {within}\n"
    text = text.replace(schedule, within)
    if bases == "no dataclass":
        text = text.replace("@dataclass\nclass Args(", f"{IMPORTS}{above}class Args(")
    else:
        head = f"{IMPORTS}{above}@dataclass\nclass Args({bases if script != 'sft' else 'SupervisedArgs'}):"
        text = re.sub(r"@dataclass\nclass Args\(.*\):", lambda _: head, text)
    file = directory / "my_fork.py"
    file.write_text(text)
    return file


@pytest.fixture
def load(tmp_path, monkeypatch):
    def load(*what) -> ModuleType:
        spec = importlib.util.spec_from_file_location("my_fork", fork(tmp_path, *what))
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "my_fork", module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[-1])
def test_args_that_mean_something_else_are_refused_in_a_sentence(case, load):
    *what, message = case
    with pytest.raises(UserError, match=message) as raised:
        flags.read(load(*what).Args, args=[])
    assert "\n" not in str(raised.value) and str(raised.value).endswith(".")


def read(module: ModuleType, *words: str):
    return flags.read(module.Args, args=[*words])


def test_flags_and_defaults_of_a_fork_hold(load):
    within = "+extra: int = 3\n    data: DataArgs = DataArgs(shuffle=False)\n    test_freq: int = 4"
    args = read(load("sync", "", "CommonArgs", within), "--extra", "5")
    assert (args.extra, args.data.shuffle, args.test_freq) == (5, False, 4)
    args = read(load("sync", PLAIN.format(PROPERTY.format("extra")), "Mine, CommonArgs"))
    assert args.extra, "a mixin's own property"
    args = read(load("sync", MIXIN.format("seed: int = 5"), "Mine, CommonArgs"))
    assert args.seed == 5, "derived from the class of the field, and first"


def test_a_flag_with_another_default_keeps_its_range(load):
    """Else --lr -1 would be gradient ascent."""
    module = load("sync", "", "CommonArgs", '+learner: MyArgs = MyArgs()\n    model: str = "demo-moe"')
    with pytest.raises(UserError, match="--lr must be above 0"):
        read(module, "--lr", "-1")
    assert "model" in may_change(module.Args), "a run may resume with another path"
    own = load("sync", "", "CommonArgs", "+seed: Annotated[int, Range(at_least=-1)] = -1")
    assert read(own).seed == -1, "a range of its own counts"


def test_a_fork_s_default_within_the_schedule_holds(load):
    within = "schedule: AsyncSchedule = AsyncSchedule(publish_every=4, generators=3)"
    module = load("async", "", "CommonArgs", within)
    assert parts.flat(read(module)).items() >= {"publish_every": 4, "generators": 3, "staleness_threshold": 1.0}.items()
    given = read(module, "--generators", "5", "--staleness-threshold", "0")
    assert (given.schedule.publish_every, given.schedule.generators, given.schedule.trains_stale) == (4, 5, True)
    assert read(module, "--publish-every=1", "--staleness-threshold", "0").schedule.trains_stale is False
    assert module.Args().schedule.generators == 3, "defaults are not changed by what was given"


CALLS = {
    "sync": lambda args: dist.join(args),
    "one_step_off": lambda args: generator_loop.BatchLoop(args, None, None),
    "one_step_off, learner": lambda args: stream.Batches(args, None),
    "async": lambda args: generator_loop.GeneratorLoop(args, None, None),
    "async, learner": lambda args: stream.Stream(args, None),
    "split": lambda args: split.join(args),
}
WRONG = [(caller, kind) for caller in CALLS for kind in ("sync", "one_step_off", "async") if kind != caller.partition(",")[0]]
WRONG = [of for of in WRONG if of not in [("split", "one_step_off"), ("split", "async")]]


@pytest.mark.parametrize(("caller", "kind"), WRONG)
def test_a_schedule_of_another_kind_than_what_the_script_calls_is_refused(caller, kind, load):
    args = SimpleNamespace(schedule=read(load(kind)).schedule, hang_timeout=0)
    with pytest.raises(UserError, match=f"Args have {KINDS[kind]}") as raised:
        CALLS[caller](args)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize(
    ("script", "kind"), [("sft", "SyncSchedule"), ("sft", "AsyncSchedule"), ("sync", "SupervisedSchedule")]
)
def test_a_supervised_run_and_one_by_reward_have_no_common_schedule(script, kind, load):
    with pytest.raises(UserError, match=f"Args have {kind}"):
        read(load(script, "", "CommonArgs", f"schedule: {kind} = {kind}()"))


@pytest.mark.runs
@pytest.mark.parametrize("within", ["", "schedule: OneStepOffSchedule = OneStepOffSchedule()"])
def test_a_fork_ends_at_its_start_with_one_message(within, demo_model, tmp_path):
    file = fork(tmp_path, "async", "", "CommonArgs", within)
    out = ["--output-dir", tmp_path / "runs", "--total-training-steps", 2, "--test-freq", 0, "--model", demo_model]
    done = run_script(file, *out, ranks=2, check=False, env={"PYTHONPATH": str(ROOT)})
    said = "works by AsyncSchedule" if within else "Args lacks `schedule`"
    assert done.returncode == 1 and done.stderr.count("error: ") == 1 and said in done.stderr, done.stderr
    assert "UserError" not in done.stderr


@pytest.mark.runs
def test_stale_samples_of_a_fork_are_trained_with_their_own_log_probs(demo_model, tmp_path):
    """A copy of train_async.py, one step off: the ratio is over the log-probs of the weights that sampled."""
    file = fork(tmp_path, "async", "", "CommonArgs", "+extra: int = 3")
    small = ["--train-batch-size", 2, "--rollout-n", 2, "--lr", 1e-2, "--lr-warmup-steps", 0, "--model", demo_model]
    run_script(file, *small, "--total-training-steps", 4, "--test-freq", 0, "--output-dir", tmp_path / "runs",
               "--experiment-name", "run", ranks=2, env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("actor/ppo_kl", 0) for row in rows), "0 throughout would mean a ratio of 1"
