"""The command line: each number has a range, booleans can be written in every way, and impossible values give one message. Any
line quickly gives either a run of one step or one message.

For these, flags and values are drawn from the Args themselves: each number at, within and beyond its range, each choice, texts
that mean nothing. train_sync.py runs in this process, on the demo; the other scripts in forks.
"""

import dataclasses
import json
import math
import re
import signal
import sys
import types
from dataclasses import dataclass
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import yaml
from helpers import ROOT, run_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_async
import train_one_step_off
import train_sft
import train_sync
from rl import flags, flags_help, parts
from rl.errors import UserError
from rl.ranges import Range, check, flag, marks
from rl.ranks import launch
from rl.setup import values_of_the_demo

SCRIPTS = {"sync": train_sync, "one_step_off": train_one_step_off, "async": train_async}


@dataclass
class EngineArgs:
    """What generates."""

    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Nucleus
    sampling."""
    top_k: Annotated[int | None, Range(at_least=1, also=-1)] = None
    eager: bool = False
    names: tuple[str, ...] = ("demo",)

    def check(self):
        if self.eager and self.top_k == 7:
            raise UserError("--eager and --top-k 7 do not go together.")


@dataclass
class MoreEngineArgs(EngineArgs):
    rate: Annotated[float, Range()] = 0.0
    recompute: bool | None = None
    mode: Literal["slow", "steady"] | None = None
    sizes: tuple[int, ...] = ()

    def check(self):
        if self.rate == 3:
            raise UserError("--rate 3 is taken.")


def read(*args):
    return flags.read(MoreEngineArgs, args=args)


@given(st.floats(allow_nan=True, allow_infinity=True) | st.integers())
def test_a_range_is_what_it_says(value):
    inside = {
        "finite": abs(value) <= (2**63 - 1 if isinstance(value, int) else 3e38),
        "above 0 and at most 1": 0 < value <= 1,
        "at least 0 and below 1,000": 0 <= value < 1000,
        "-1, or from 1 to 5": value == -1 or 1 <= value <= 5,
    }
    some = [Range(), Range(above=0, at_most=1), Range(at_least=0, below=1000), Range(at_least=1, at_most=5, also=-1)]
    assert {str(limits): value in limits for limits in some} == inside


REFUSED = {
    "--top-p 0": "--top-p must be above 0 and at most 1; it is 0.0.",
    "--top-p nan": "--top-p must be above 0 and at most 1; it is nan.",
    "--top_p 1.5": "--top-p must be above 0 and at most 1; it is 1.5.",
    "--top-k 0": "--top-k must be -1, or at least 1; it is 0.",
    f"--top-k {2**70}": f"--top-k must be at most {2**63 - 1}; it is {2**70}.",
    "--rate inf": "--rate must be finite; it is inf.",
    "--ratee 1": "Unrecognized options: --ratee, 1. Similar: --rate. --help-all lists all flags.",
    "stray": "Unrecognized options: stray. --help-all lists all flags.",
    "--no-eager=True": "Unrecognized options: --no-eager=True. Similar: --eager. --help-all lists all flags.",
    "--eager --top-k 7": "--eager and --top-k 7 do not go together.",
    "--rate 3": "--rate 3 is taken.",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_work_is_one_line(line, capfd):
    with pytest.raises(UserError) as raised:
        read(*line.split())
    assert str(raised.value) == REFUSED[line] and capfd.readouterr() == ("", "")


UNREADABLE = {  # -> what tyro's message has
    "--rate x": ["--rate", "could not convert string to float: 'x'"],
    "--top-k 1.5": ["--top-k", "INT", "'1.5'"],
    "--rate": ["--rate", "Missing value"],
    "--rate --eager": ["--rate", "Missing value"],
    "--eager perhaps": ["--eager", "'Perhaps'", "True", "False"],
    "--mode fast": ["--mode", "'fast'", "slow", "steady"],
    "--sizes 1 x": ["--sizes", "'x'"],
}


@pytest.mark.parametrize("line", UNREADABLE)
def test_a_value_of_another_kind_is_one_message_that_names_the_flag(line, capfd):
    with pytest.raises(UserError) as raised:
        read(*line.split())
    first, _, said = str(raised.value).partition("\n")
    assert first == "the flags cannot be read. --help-all lists all flags."
    assert all(word in said for word in UNREADABLE[line]), said
    assert said.isascii() and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["eager", "recompute"])
def test_a_boolean_can_be_written_in_every_way(name):
    for yes in ([f"--{name}"], [f"--{name}", "True"], [f"--{name}", "true"], [f"--{name}=TRUE"]):
        assert getattr(read(*yes), name) is True and getattr(read(*yes, "--rate", "1"), name) is True
    for no in ([f"--no-{name}"], [f"--{name}", "False"], [f"--{name}=false"], [f"--{name}", f"--no-{name}"]):
        assert getattr(read(*no), name) is False
    assert getattr(read("--rate", "-1", "--names", "a", "b", f"--{name}"), name) is True
    assert read("--recompute", "none").recompute is None and read().recompute is None


FLAGS = re.compile(r"^  (--[\w-]+)", re.MULTILINE)


def help_of(args: type, word: str, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        flags.read(args, args=[word])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_common_flags_and_help_all_every_flag(script, capsys):
    """And in front of them those that a copy of a script adds."""
    args = SCRIPTS[script].Args
    short, whole = (help_of(args, word, capsys) for word in ("-h", "--help-all"))
    common = FLAGS.findall(short)
    assert 22 <= len(common) <= 30
    assert {"--model", "--train-files", "--reward", "--train-batch-size", "--lr", "--output-dir"} <= {*common}
    assert {*FLAGS.findall(whole)} == fields(script) and "All flags: --help-all." in short
    for text in (short, whole):
        titles = re.findall(r"^([a-z-]+):$", text, re.MULTILINE)
        assert titles[:4] == ["run", "data", "reward", "algorithm"] and len(titles) == len(set(titles))
    own = dataclasses.make_dataclass("Args", [("bonus", float, 0.0), ("seed", int, 5)], bases=(args,))
    own.__module__ = "my_fork"
    assert FLAGS.findall(help_of(own, "--help", capsys)) == ["--bonus", "--seed", *common]


def test_help_has_groups_ranges_and_texts(capsys):
    assert {name for script in SCRIPTS.values() for name in parts.leaves(script.Args)} >= flags_help.COMMON
    text = " ".join(help_of(MoreEngineArgs, "--help", capsys).split())
    assert "engine: What generates." in text
    assert "--top-p FLOAT (above 0 and at most 1) Nucleus sampling. (default: 1.0)" in text
    assert "--top-k INT (-1, or at least 1)" in text


# ------------------------------------------------------------------------------------------------ verl's meanings


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 200),
        ({"total_training_steps": 7}, 7),
        ({"total_epochs": 3}, 37),  # 300 prompts, 8 a step
        ({"total_epochs": 3, "total_training_steps": 500}, 500),
        ({"total_rollout_steps": 85}, 10),
        ({"total_rollout_steps": 10_000}, 1250),
        ({"total_rollout_steps": 10_000, "total_epochs": 1}, 12),
        ({"total_rollout_steps": 50, "total_epochs": 1}, 6),
        ({"total_rollout_steps": 3}, 1),
        ({"total_rollout_steps": 50, "total_epochs": 1, "total_training_steps": 99}, 99),
    ],
)
def test_the_length_of_a_run(given, steps):
    for script, more in ((train_sync, {}), (train_async, {"ppo_mini_batch_size": 4})):
        assert parts.make(script.Args, train_batch_size=8, **more, **given).total_steps(100) == steps


OWN = "--train-files a.parquet"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", []),  # the demo
        (OWN, ["--max-response-length 8", "--lr 0.0001", "--val-files demo"]),
        (f"{OWN} --lr 1e-4 --max_response_length=8 --val-files b.parquet", []),
        (f"{OWN} --lora-rank 8 --test-freq 0", ["--max-response-length 8"]),
        (f"{OWN} --max-response-length 64 --val-files b.parquet", ["--lr 0.0001"]),
        (f"{OWN} --val-only", []),
    ],
)
def test_data_of_ones_own_with_the_values_of_the_demo_is_said(words, named):
    said = values_of_the_demo(flags.read(train_sync.Args, args=words.split()), words.split())
    assert [sentence.partition(":")[0].split(", ") for sentence in said] == ([named] if named else [])


def test_a_replay_has_the_values_of_its_run():
    recorded = {"train_files": ("a.parquet",), "lr": 1e-6, "max_response_length": 512, "val_files": ("b.parquet",)}
    assert not values_of_the_demo(flags.read(train_sync.Args, args=[], defaults=recorded), [])


def test_the_batch_means_the_same_in_all_scripts():
    """A mini-batch alone is the batch of the asynchronous script, as before it had --train-batch-size."""
    both = {"train_batch_size": 12, "ppo_mini_batch_size": 4}
    cases = [(script, more, sizes) for script in SCRIPTS.values() for more, sizes in (({}, (8, 8)), (both, (12, 4)))]
    for script, more, sizes in [*cases, (train_async, {"ppo_mini_batch_size": 32}, (32, 32))]:
        args = parts.make(script.Args, **more)
        check(args)
        assert (args.schedule.prompts_per_step, args.schedule.prompts_per_update) == sizes
    with pytest.raises(UserError, match="--train-batch-size 8 is not divisible by --ppo-mini-batch-size 3"):
        check(parts.make(train_async.Args, train_batch_size=8, ppo_mini_batch_size=3))


def test_a_penalty_longer_than_the_response_is_refused():
    check(parts.make(train_sync.Args, overlong_buffer_len=8, max_response_length=8))
    with pytest.raises(UserError, match="--overlong-buffer-len 9 is more than --max-response-length 8"):
        check(parts.make(train_async.Args, overlong_buffer_len=9, max_response_length=8))


HALF = {  # of what torchrun tells its ranks -> what the message says
    "RANK=0": "lacks WORLD_SIZE",
    "WORLD_SIZE=2": "has WORLD_SIZE and lacks RANK",
    "RANK=0 WORLD_SIZE=1": "lacks MASTER_ADDR, MASTER_PORT",
}
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def set_environment(variables: str, monkeypatch) -> None:
    """Set these variables, and remove all other variables that torchrun sets."""
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (pair.split("=") for pair in variables.split()):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", HALF)
def test_half_of_what_torchrun_says_is_named_and_waits_for_nobody(variables, monkeypatch):
    set_environment("", monkeypatch)
    launch.check()
    set_environment(variables, monkeypatch)
    with pytest.raises(UserError, match=HALF[variables]):
        launch.check()


def fields(name: str) -> set[str]:
    return {*map(flag, parts.leaves(SCRIPTS[name].Args))}


TRL_WORDS = yaml.safe_load((ROOT / "docs" / "trl_words.yaml").read_text())


@pytest.mark.parametrize("word", TRL_WORDS)
def test_a_word_of_trls_is_no_flag_and_what_it_is_here_is_one(word):
    named = re.findall(r"--[\w-]+", TRL_WORDS[word])
    assert {*named} <= {*fields("sync"), *fields("async")}
    assert all(f"--{word}" not in fields(script) for script in SCRIPTS)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--loss-mode sapo --tau-pos 2", "--tau-pos is a number of --loss-mode sapo: --loss-args tau_pos=NUMBER."),
        ("--tau_neg=1.2", "--tau-neg is a number of --loss-mode sapo: --loss-args tau_neg=NUMBER."),
        ("--clip-low 0.1", "--clip-low: here --clip-ratio-low."),
        ("--use-kl-loss", "Leave --use-kl-loss out: --kl-loss-coef above 0 is on, such as 0.001, and 0, the default, is off."),
        ("--no-use-kl-loss", "Leave --use-kl-loss out: --kl-loss-coef above 0"),
        ("--use_kl_in_reward True --kl-reward-coef 0.1", "Leave --use-kl-in-reward out: --kl-reward-coef above 0"),
        ("--norm-by-std 0", "--norm-by-std is a number of --adv-estimator grpo_passk, whose default in losses.py holds."),
    ],
)
def test_a_word_that_is_no_flag_is_answered_with_ours(words, answer):
    with pytest.raises(UserError, match=re.escape(answer)):
        flags.read(train_sync.Args, args=words.split())


@pytest.mark.parametrize("script", [train_sync, train_async, train_sft])
def test_a_flag_with_an_empty_text_is_named(script):
    """Every flag that takes text, alone or in a list, also next to others."""
    for name, leaf in parts.leaves(script.Args).items():
        hint = str(leaf.type)
        if "str" not in hint or "Literal" in hint:
            continue
        for value in ("", " ") if "tuple" not in hint else (("",), ("demo", " ")):
            with pytest.raises(UserError, match=f"^{flag(name)}: its value is empty. Give one, or leave the flag out"):
                check(parts.make(script.Args, **{name: value}))


@pytest.fixture
def earlier(tmp_path):
    """A run of train_async.py."""
    args = parts.make(train_async.Args, lr=3e-5, train_files=("a.jsonl", "b.jsonl"), shuffle=False, publish_every=4)
    args = parts.replace(args, experiment_name="old", total_training_steps=7)
    recorded = json.loads(json.dumps({"flags": parts.flat(args)}, default=str))
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    return tmp_path


@pytest.mark.parametrize(
    "words", [["--from-run", "RUN"], ["--from-run=RUN"], ["--seed", "5", "--from-run", "RUN", "--no-shuffle"]]
)
def test_the_flags_of_an_earlier_run_are_taken_over(earlier, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["train_async.py", *(word.replace("RUN", str(earlier)) for word in words)])
    args = flags.parse(train_async.Args)
    assert (args.learner.lr, args.data.train_files, args.data.shuffle) == (3e-5, ("a.jsonl", "b.jsonl"), False)
    assert (args.schedule.publish_every, args.total_training_steps) == (4, 7)
    assert args.log.experiment_name is None, "it is a run of its own"
    assert args.seed == (5 if "--seed" in words else 0)


def test_those_on_the_command_line_go_first(earlier, monkeypatch, capsys):
    """Also in another script, which says what it does not have."""
    words = ["--from-run", str(earlier), "--lr", "1e-6", "--shuffle", "--experiment-name", "new"]
    monkeypatch.setattr(sys, "argv", ["train_sync.py", *words])
    args = flags.parse(train_sync.Args)
    assert (args.learner.lr, args.data.shuffle, args.log.experiment_name, args.total_training_steps) == (1e-6, True, "new", 7)
    said = capsys.readouterr().err
    assert "--publish-every" in said and "this script has no such flags" in said and "--over-sample" not in said


@pytest.mark.parametrize("switch", [True, False])
def test_a_kl_that_was_off_in_an_earlier_version_stays_off(tmp_path, monkeypatch, switch):
    """Its coefficient was recorded all the same."""
    was = {"use_kl_loss": switch, "kl_loss_coef": 0.1, "use_kl_in_reward": not switch, "kl_reward_coef": 0.2}
    (tmp_path / "config.json").write_text(json.dumps({"flags": was}))
    monkeypatch.setattr(sys, "argv", ["train_sync.py", "--from-run", str(tmp_path)])
    loss = flags.parse(train_sync.Args).loss
    assert (loss.kl_loss_coef, loss.kl_reward_coef) == ((0.1, 0.0) if switch else (0.0, 0.2))


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_run_without_flags_is_one_message(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=f"--from-run: {tmp_path}/config.json cannot be read"):
        flags._from_run(train_sync.Args, ["--lr", "1", "--from-run", str(tmp_path)])


# ------------------------------------------------------------------------------------------------------------- any command line

SECONDS = 60  # without an end are a hang; a step or a message takes one or two on a quiet machine
BASE = {"total_training_steps": 1, "train_batch_size": 2, "rollout_n": 2, "max_response_length": 4, "test_freq": 1}
BASE |= {"train_max_samples": 3, "val_max_samples": 2}
# What a large number of makes a run long, and nothing else: these stay small.
WORK = {"rollout_n", "val_n", "train_batch_size", "ppo_mini_batch_size", "ppo_epochs", "total_training_steps", "total_epochs"}
WORK |= {"max_num_gen_batches", "reward_workers", "total_rollout_steps"}
# Not drawn: where things are read and written, vLLM (an engine of its own) and a service on the network.
APART = {"model", "teacher", "train_files", "val_files", "output_dir", "engine", "logger", "train_max_samples"}
JUNK = ["", "x", "None", "nan", "-1", "0", "0.5_2", "2_0.5", "1,2", "1e999", "\u2603", "a/../b"]
JUNK += ["token_k1", "seq_mean_k3,token_k1"]


def edges(limits: Range, kind: type) -> list[float]:
    """Numbers at the ends of a range, inside it."""
    low = limits.at_least if limits.at_least is not None else limits.above
    high = limits.at_most if limits.at_most is not None else limits.below
    step = 1 if kind is int else 1e-3
    found = [low + (step if limits.above is not None else 0)] if low is not None else [-1.0]
    if high is not None:
        found.append(high - (step if limits.below is not None else 0))
    else:
        found += [found[0] + step, 2**63 - 1 if kind is int else 1e38]
    return [kind(value) for value in found] + ([limits.also] if limits.also is not None else [])


def beyond(limits: Range, kind: type) -> list[float]:
    """Numbers just outside a range and far from it."""
    step = 1 if kind is int else 1e-3
    found = [2**63, -(2**70)] if kind is int else [math.nan, math.inf, -math.inf, 1e300]
    for bound, sign in [(limits.at_least, -step), (limits.above, 0), (limits.at_most, step), (limits.below, 0)]:
        if bound is not None:
            found += [kind(bound + sign), kind(bound + (1000 * sign or 0))]
    return [value for value in found if value != limits.also]


def kind_of(hint) -> type | None:
    """int or float, if the annotation is of a number."""
    options = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    return next((kind for kind in (int, float) if kind in options), None)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_a_range_and_beyond_it_is_refused_by_name(script):
    args = SCRIPTS[script].Args
    numbers = {name for name, leaf in parts.leaves(args).items() if kind_of(leaf.type)}
    assert len(numbers) > 40 and numbers == set(marks(args, Range))
    check(args())
    for name, limits in marks(args, Range).items():
        for value in beyond(limits, kind_of(parts.leaves(args)[name].type)):
            with pytest.raises(UserError, match=f"^{flag(name)} must be .*it is ") as raised:
                check(parts.make(args, **{name: value}))
            assert "\n" not in str(raised.value)


def choices(hint) -> list[str]:
    """Every literal that the annotation allows."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in choices(part)] if isinstance(hint, types.UnionType) else []


def drawn(args: type) -> st.SearchStrategy[dict[str, str]]:
    """Draw some flags with values: numbers are mostly inside their ranges, so that a run begins."""
    values, limits = {}, marks(args, Range)
    for name, leaf in parts.leaves(args).items():
        hint = leaf.type
        if name in APART:
            continue
        kind = kind_of(hint)
        if name in WORK:
            values[name] = st.sampled_from(["1", "2", "3"])
        elif kind:
            inside, outside = edges(limits[name], kind), beyond(limits[name], kind)
            values[name] = st.one_of(*[st.sampled_from(inside)] * 5, st.sampled_from(outside)).map(str)
        elif hint in (bool, bool | None):
            values[name] = st.sampled_from(["True", "False"])
        elif options := choices(hint):
            values[name] = st.sampled_from(options)
        else:
            values[name] = st.sampled_from(JUNK)
    return st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    )


def line(script: str, given: dict, directory) -> list[str]:
    """Return the script's command line. The run writes only below the directory."""
    values = BASE | given | {"output_dir": directory}
    return [f"{flag(name)}={value}" for name, value in values.items() if name in parts.leaves(SCRIPTS[script].Args)]


def run(given: dict[str, str], ranks, directory) -> str:
    """Runs train_sync.py; returns "ran", or the message."""

    def late(*_):
        raise TimeoutError(f"nothing after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        train_sync.main(flags.read(train_sync.Args, args=line("sync", given, directory)), ranks)
        return "ran"
    except UserError as error:
        first, _, of_tyro = str(error).partition("\n")
        assert first.strip() and (not of_tyro or first.startswith("the flags cannot be read"))
        return str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


QUIET = dict(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(given=drawn(train_sync.Args))
@settings(max_examples=30, **QUIET)
def test_a_step_or_a_message(given, ranks, demo_model, tmp_path_factory):
    run(given, ranks, tmp_path_factory.mktemp("runs"))


def run_split(script: str, given: dict, directory) -> None:
    """Runs one of the other scripts on two ranks, in forks: it trains a step or ends with one message."""
    done = run_script(f"train_{script}.py", *line(script, given, directory), ranks=2, timeout=SECONDS, check=False)
    if done.returncode:
        ours = re.search(r'File ".*/(rl/|train_)', done.stderr)  # in a traceback
        assert done.stderr.count("error: ") == 1 and not ours, (given, done.stdout, done.stderr)
    else:
        last = r"^metrics " if given.get("val_only") == "True" else r"^step 1/\d"
        assert re.search(last, done.stdout, re.M), (given, done.stdout, done.stderr)


SCHEDULES = {
    "all at once": {"staleness_threshold": "999999", "publish_every": 7, "max_staleness": 0},
    "none ahead": {"staleness_threshold": "0", "train_batch_size": 6, "max_staleness": 0},
    "fractions": {"staleness_threshold": "0.1", "partial_rollout": "off", "use_rollout_log_probs": False},
}


@pytest.mark.runs
@pytest.mark.parametrize("case", SCHEDULES)
def test_the_schedules_ends(case, demo_model, tmp_path):
    run_split("async", {"ppo_mini_batch_size": 2} | SCHEDULES[case], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", ["one_step_off", "async"])
def test_a_step_or_a_message_of_two_ranks(script, demo_model, tmp_path_factory):
    @given(given=drawn(SCRIPTS[script].Args))
    @settings(max_examples=8, **QUIET)
    def runs(given):
        run_split(script, given, tmp_path_factory.mktemp("runs"))

    runs()
