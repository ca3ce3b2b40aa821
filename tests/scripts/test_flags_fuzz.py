"""The whole table of flags: any command line quickly gives either a run of one step or one message.

Flags and values are drawn from the Args themselves: each number at, within and beyond its range, each choice, texts that mean
nothing. train_sync.py runs in this process, on the demo; the other scripts in forks.
"""

import math
import re
import signal
import types
from typing import Literal, Union, get_args, get_origin

import pytest
from helpers import run_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_flags import SCRIPTS

import train_sync
from rl import flags, parts
from rl.errors import UserError
from rl.ranges import Range, check, flag, marks

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
