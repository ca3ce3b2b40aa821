"""Translates one verl command: returns our command, and a verdict on every key that was given."""

import itertools
import os
import re
import shlex
from dataclasses import MISSING, dataclass, replace
from unittest.mock import patch

import train_async
import train_one_step_off
import train_sft
import train_sync
from rl import flags as command_line
from rl import parts
from rl.errors import UserError
from rl.ranges import flag
from tools.from_verl import programs, table
from tools.from_verl.command import Command
from tools.from_verl.table import NOT_HERE, NOT_NEEDED, OTHER_DEFAULTS, ROWS, ROWS_OF_SFT, TRANSLATED, Row
from tools.from_verl.verl_run import ASYNC, ONE_STEP_OFF, SFT, SYNC, V1, Run

MODULES = {SYNC: train_sync, ONE_STEP_OFF: train_one_step_off, ASYNC: train_async, SFT: train_sft}
PROGRAMS = ("ppo", "fully_async_ppo", "one_step_off_ppo")
CONFIGS = {"sft_trainer", "sft_trainer_engine", *(f"{of}{engine}_trainer" for of in PROGRAMS for engine in ("", "_megatron"))}
PROGRAM_OF = {SYNC: "main_ppo", ONE_STEP_OFF: "one_step_off_policy", ASYNC: "fully_async_policy"}
LENGTH = "rollout.total_rollout_steps"
OF_ASYNC = ("async_training.", "async.", LENGTH, V1 + "separate_async.")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # Hydra's ${trainer.total_epochs}
NUMBERS = {  # keys that take a whole number or verl's default, null
    "trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep", "rollout.total_rollout_steps", "data.seed",
    "reward.reward_kwargs.max_resp_len", "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.n_gpus",
    V1 + "sampler.max_off_policy_threshold",
}  # fmt: skip


@dataclass
class Translation:
    launcher: list[str]  # torchrun and its flags
    script: str
    flags: dict[str, object]
    verdicts: dict[str, tuple[str, str]]  # key as given -> (translated, not needed, not here or unknown; why)
    notes: list[str]
    gaps: list[str]  # what has to be added to the command before it trains what was meant
    forks: dict[str, tuple[str, ...]]  # diffs of examples/forks to be applied first -> the flags that they add
    refusal: str = ""  # why the script would refuse the command, if it would

    def words(self) -> list[str]:
        """The command line without the launcher."""
        return [self.script, *(word for flag, value in self.flags.items() for word in _words(flag, value))]

    def command(self, width: int = 120) -> str:
        """The command for a shell, over several lines."""
        parts = [shlex.join([*self.launcher, self.script])]
        parts += [shlex.join(_words(flag, value)) for flag, value in self.flags.items()]
        lines = [""]
        for part in parts:
            if len(lines[-1]) + len(part) > width:
                lines.append("  ")
            lines[-1] += part + " "
        return " \\\n".join(line.rstrip() for line in lines if line.strip())


def translate(command: Command) -> Translation:
    """Raise UserError for a program that is no trainer, and for a run that no script here can do."""
    programs.check(command.module)
    is_sft = is_supervised(command)
    rows = ROWS_OF_SFT if is_sft else ROWS
    engine = command.values.get("engine", "fsdp")
    names = {key: table.name_by_reward(key, engine) if is_sft else key for key in command.values}
    every = {key: table.find(name, rows) for key, name in names.items()}
    found = {key: its for key, its in every.items() if its}  # key as given -> (row, the table's name)
    values = {name: _resolved(command, key) for key, (_, name) in found.items()}
    notes: list[str] = []
    script = SFT if is_sft else script_of(command, values, notes)
    defaults = {name: value for row in rows for name, value in row.defaults.items()}
    newer = script == ASYNC and "fully_async" not in command.program and any(name.startswith(V1) for name in values)
    if is_sft:
        defaults |= OTHER_DEFAULTS["fsdp_sft_trainer" if "fsdp_sft_trainer" in command.program else "sft_trainer"]
    else:
        defaults |= OTHER_DEFAULTS.get("separate_async" if newer else script, {})
    wrong = {name: _wrong(row, name, values[name], defaults.get(name)) for row, name in found.values()}
    run = Run(script, {name: value for name, value in values.items() if not wrong[name]}, defaults, newer)
    if is_sft:
        run.given |= ranks_of(command)
        notes += unclear_ranks(command)
    run.missing |= {name: why for name, why in wrong.items() if why}
    run.notes += [*notes, *command.notes, *_clashes(command, found)]
    flags = _flags(run, rows)
    verdicts = {key: _verdict(run, *its, _resolved(command, key)) if its else ("unknown", "") for key, its in every.items()}
    verdicts |= {key: _deleted(key) for key in command.deleted} | {word: ("unknown", "") for word in command.unread}
    translation = Translation(_launcher(run), script, flags, verdicts, run.notes, [*_gaps(run, flags), *run.gaps], run.forks)
    try:
        parse(translation)
    except UserError as error:
        translation.refusal = str(error)
    return translation


def is_supervised(command: Command) -> bool:
    """Return whether the command is one of verl's supervised trainers; its keys decide if it names no program."""
    if command.module or command.config_name:
        return "sft_trainer" in command.program
    own = ("model.", "optim.", "engine.", "data.max_length", "data.messages_key", "data.multiturn.")
    return any(key.startswith(own) for key in command.values)


def ranks_of(command: Command) -> dict[str, object]:
    """Return the numbers that torchrun is given, under the names of verl's keys."""
    names = {"nnodes": "trainer.nnodes", "nproc-per-node": "trainer.n_gpus_per_node"}
    return {names[word]: int(value) for word, value in command.ranks.items() if value.isdigit() and int(value)}


def unclear_ranks(command: Command) -> list[str]:
    found = [f"torchrun's --{word} is {value!r}" for word, value in command.ranks.items() if not value.isdigit()]
    return [f"{text}: 1 is taken. Is it an argument of the script, which follows its name here?" for text in found]


def _gaps(run: Run, flags: dict[str, object]) -> list[str]:
    """Return why the command would train another model, other data, or all weights instead of adapters."""
    of = "actor_rollout_ref.model."
    gaps = []
    if "--model" not in flags:
        gaps.append(f"{'model.path' if run.script == SFT else of + 'path'} names no model: add --model, or it is the demo's.")
    if "--train-files" not in flags:
        gaps.append("data.train_files names no data: add --train-files, or the demo's sums are trained.")
    unread = [key for key in (of + "lora_rank", of + "lora.rank") if key in run.missing]
    gaps += [f"{key} cannot be read: add --lora-rank, or all weights are trained." for key in unread]
    if run["reward.reward_model.enable"]:
        gaps.append(
            "a model scores in verl: serve it, and add --reward examples/judge.py:judge, or data_source chooses the grader."
        )
    return gaps


def _launcher(run: Run) -> list[str]:
    nodes, ranks = run.launch["--nnodes"], ["--nproc-per-node", str(run.launch["--nproc-per-node"])]
    if nodes == 1:
        return ["torchrun", "--standalone", *ranks]
    run.note("Start it on every node with its own --node-rank and the first node's address as --master-addr.")
    return ["torchrun", "--nnodes", str(nodes), *ranks, "--node-rank", "0", "--master-addr", "localhost"]


def script_of(command: Command, given: dict[str, object], notes: list[str]) -> str:
    """Return the script for verl's program: its name decides, unless keys give the generators their own devices. A note says
    which was chosen and why, if the name does not."""
    for word, script in {"fully_async": ASYNC, "one_step_off": ONE_STEP_OFF}.items():
        if word in command.program:
            return script
    script, why = _script_of_keys(command, given)
    if "main_ppo" in command.module and "async" not in command.program and (script == SYNC or LENGTH in why):
        return SYNC
    if script == SYNC and "async" in command.program:
        script = ONE_STEP_OFF
        why = "of its name"
    if command.module or script != SYNC:
        name = command.module or "The command"
        notes.append(f"{name} counts as verl's {PROGRAM_OF[script]}, which is {script} here, because {why}.")
    return script


def _script_of_keys(command: Command, given: dict[str, object]) -> tuple[str, str]:
    """Return (the script that the keys ask for, why)."""
    mode = given.get(V1 + "trainer_mode") if given.get("trainer.use_v1") is not False else None
    if mode in ("sync", "colocate_async", "separate_async"):
        return ASYNC if mode == "separate_async" else SYNC, f"of trainer_mode={mode}"
    if key := next((key for key in command.values if key.startswith(OF_ASYNC)), None):
        return ASYNC, f"of {key}"
    if given.get("actor_rollout_ref.hybrid_engine") is False:
        return ONE_STEP_OFF, "of hybrid_engine=False"
    # rollout.yaml of main_ppo itself has actor_rollout_ref.rollout.n_gpus_per_node: without nodes it means nothing there
    pools = ("rollout.nnodes", "rollout.n_gpus_per_node", "rollout.n_gpus", "actor_rollout_ref.rollout.n_gpus")
    if key := next((key for key in pools if command.values.get(key)), None):
        return ONE_STEP_OFF, f"of {key}: generators have devices of their own"
    return SYNC, "nothing says otherwise"


def _resolved(command: Command, key: str) -> object:
    """Return the value with Hydra's references to other given keys replaced."""
    value = command.values[key]
    for _ in range(5):
        match = isinstance(value, str) and REFERENCE.search(value)
        if not match or match[1] not in command.values:
            return value
        other = command.values[match[1]]
        value = other if match[0] == value else value.replace(match[0], str(other))
    return value


def _clashes(command: Command, found: dict) -> list[str]:
    """Notes on two names of one setting with two values, and on a configuration that is not verl's."""
    seen = {}
    notes = []
    for key, (_, name) in found.items():
        if name in seen and command.values[seen[name]] != command.values[key]:
            notes.append(f"{seen[name]} and {key} are two names of one setting: the latter counts.")
        seen[name] = key
    config = command.config_name.removesuffix(".yaml")
    if config and config not in CONFIGS:
        notes.append(f"--config-name {config} is a configuration of your own: what it sets is not seen here.")
    return notes


def _flags(run: Run, rows: list[Row]) -> dict[str, object]:
    """Return our flags: those of the given keys, and those for which verl's default differs from ours."""
    ours = own_defaults(run.script)
    flags = {}
    for row in (row for row in rows if row.kind == TRANSLATED):
        made = row.made(run)
        of_forks = {*itertools.chain(*run.forks.values())}
        if made and not made.keys() & {*ours, *of_forks}:
            run.skips(" ".join(names[0] for names in row.names), f"{run.script} has no {' or '.join(made)}")
        is_given = any(names[0] in run.given for names in row.names)
        for name, value in made.items():
            counts = name in of_forks or (name in ours and (is_given or value != ours[name]))
            if counts and value not in (None, []) and not (value is False and ours[name] is False):
                flags[name] = value
    return flags


def own_defaults(script: str) -> dict[str, object]:
    """Flag -> default of one of our scripts."""
    defaults = {flag(name): leaf.default for name, leaf in parts.leaves(MODULES[script].Args).items()}
    return {name: [*its] if isinstance(its, tuple) else None if its is MISSING else its for name, its in defaults.items()}


def _words(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag, str(value)] if flag == "--use-rollout-log-probs" else [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, *(str(word) for word in (value if isinstance(value, list) else [value]))]


def _verdict(run: Run, row: Row, name: str, value: object) -> tuple[str, str]:
    if name in run.missing:
        return NOT_HERE, run.missing[name]
    if why := row.why_off(run, name) or run.idle.get(name):
        return NOT_NEEDED, why
    if row.kind == NOT_HERE and table.neutral(row, name, value):
        return NOT_NEEDED, "its value asks for nothing that is missing here"
    return row.kind, row.note


LISTS = ("_files", "_dict_keys", "target_modules", "gdpo_reward_keys", "gdpo_reward_weights")  # ends of keys whose value is one


def _wrong(row: Row, name: str, value: object, default: object) -> str:
    """Return why a value cannot be used; empty if it can."""
    if value == "":
        return "it is empty: is a shell variable not set?"
    if isinstance(value, str) and "${" in value:
        return "it refers to a setting that the command does not give"
    number = name in NUMBERS or isinstance(default, int | float)
    may_be_null = name == V1 + "sampler.max_off_policy_threshold" or not isinstance(default, int | float | str)
    if row.kind != TRANSLATED or (value is None and may_be_null):
        return ""
    if isinstance(default, bool):
        fits = isinstance(value, bool)
    elif number:
        whole = name in NUMBERS or isinstance(default, int)
        fits = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    else:
        fits = isinstance(default, list) or name.endswith(LISTS) or not isinstance(value, list | None)
    expected = "a whole number" if name in NUMBERS else f"a value such as {default}"
    return "" if fits else f"verl's default counts instead: expected {expected}"


def _deleted(key: str) -> tuple[str, str]:
    found = table.find(key, ROWS)
    if found and found[0].kind == TRANSLATED:
        return NOT_HERE, "~ removes the key: our default counts"
    return NOT_NEEDED, "it is taken away"


def parse(translation: Translation):
    """Return the script's Args of the command, checked for the number of ranks that its launcher starts, without what forks
    add. Raise UserError if the script would."""
    added = {*itertools.chain(*translation.forks.values())}
    flags = {name: value for name, value in translation.flags.items() if name not in added}
    if flags.get("--adv-estimator") in ("gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"):
        del flags["--adv-estimator"]
    translation = replace(translation, flags=flags)
    launch = dict(zip(translation.launcher, translation.launcher[1:], strict=False))
    ranks = int(launch.get("--nnodes", 1)) * int(launch["--nproc-per-node"])
    with patch.dict(os.environ, WORLD_SIZE=str(ranks)):  # as torchrun sets it
        return command_line.read(MODULES[translation.script].Args, args=translation.words()[1:])
