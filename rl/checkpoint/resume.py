"""Resumes a run: finds its newest checkpoint, compares the two runs, and reads it into the learner.

A flag belongs to the run unless its type says that it may change. A different value is refused, or listed if --resume-mode
names the checkpoint. The flags of MUST_STAY are refused in any case: the saved state has no meaning under another value.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch.distributed
from safetensors import SafetensorError

from rl import parts
from rl.checkpoint import files
from rl.checkpoint.files import STATE, STEPS, TRAINING, CheckpointArgs, Resumed
from rl.errors import UserError
from rl.learning.learner import Learner
from rl.masking import masked
from rl.ranges import DEFAULT_BATCH, flag, may_change, of_today
from rl.ranks import dist, launch
from rl.record.run import Origin
from rl.samples.group import Group, split_records

# The order of the prompts, the tensors of the optimizer's state, the count of versions and the width of the sampling masks'
# records depend on these.
MUST_STAY = {"seed", "shuffle", "optim", "freeze_vision_tower", "lora_rank", "lora_alpha", "lora_target"}
MUST_STAY |= {"top_k", "keep_sampling_mask"}
MUST_STAY_IN_A_STREAM = {"ppo_mini_batch_size", "train_batch_size", "publish_every"}


def resume(args, identity: dict | None, learner: Learner, total_steps: int) -> Resumed:
    """Bring the learner to the step at which the run stopped, if there is one to resume. args: the script's. identity: of
    this run, on the first learner. Raise UserError if it was another run, or if its checkpoint cannot be used. A collective of
    the learners."""
    origin = find(args.checkpoint, args.log.output_dir, args.log.experiment_name)
    if not origin or not origin.checkpoint:
        return Resumed(origin)
    path = origin.checkpoint
    record = _read_state(path)
    if origin.step > total_steps:
        raise UserError(
            f"{path}: the run has trained {origin.step} steps already, more than the {total_steps} asked for. Give more "
            "(--total-training-steps, --total-epochs), or start a new run with another --experiment-name."
        )
    if identity and (lines := check_same(args, identity, record["identity"], path)):
        print(f"warning: {path} resumes with other settings:", *lines, sep="\n  ", file=sys.stderr, flush=True)
    state = load(path, learner)
    groups, unfinished = (groups_of((path / TRAINING / name).read_bytes()) for name in (files.GROUPS, files.UNFINISHED))
    return Resumed(origin, state, groups, unfinished)


def check_same(args, identity: dict, was: dict, where: Path) -> list[str]:
    """Return a line for each difference from a saved identity. Raise UserError for any unless --resume-mode names `where`."""
    if identity["script"] != was["script"]:
        raise UserError(f"{where} was written by {was['script']}, not by {identity['script']}. Resume with {was['script']}.")
    now, old = (_settled(args, of["flags"]) for of in (identity, was))
    changed = {name for name in now if now[name] != old.get(name)} - may_change(type(args))
    kept = MUST_STAY | (MUST_STAY_IN_A_STREAM if "staleness_threshold" in now else set())
    lines = [f"{flag(name)}: was {old.get(name)}, is {now[name]}" for name in now if name in changed]
    for name in [name for name in now if name in changed & kept]:
        raise UserError(
            f"{where} was written with {flag(name)} {old.get(name)}, now it is {now[name]}; its state means nothing under "
            "another value. Give the old one, or start a new run with another --experiment-name."
        )
    if any(flags.get("teacher_prompt") is not None for flags in (now, old)):  # train_sft.py has no such flag
        check_number(was, _number(identity), where)
    lines += _other_contents(identity, was)
    if lines and args.checkpoint.resume_mode in ("auto", "disable"):
        raise UserError(
            f"{where} is of a run with other settings. Give the old ones, start a new run with another "
            f"--experiment-name, or resume with the new ones with --resume-mode {where}:\n  " + "\n  ".join(lines)
        )
    return lines


def _settled(args, flags: dict) -> dict:
    """Return the flags under today's names, with defaults for those that are newer, and the batch sizes as numbers."""
    defaults = json.loads(json.dumps(parts.flat(type(args)())))
    flags = masked(defaults | of_today(flags))
    update = flags.get("ppo_mini_batch_size")
    step = flags.get("train_batch_size") or update or DEFAULT_BATCH
    return flags | {"train_batch_size": step, "ppo_mini_batch_size": update or step}


def _other_contents(now: dict, was: dict) -> Iterable[str]:
    for name, old in masked(was["contents"]).items():
        if (new := now["contents"].get(name)) not in (None, old):
            named = [str(of.get(name, "the model's")) for of in (masked(was["flags"]), now["flags"])]
            what = "the tokenizer" if name == "tokenizer" else f"the content of {flag(name)}"
            yield f"{what}: was {named[0]} ({old}), is {named[1]} ({new})"


def _number(identity: dict) -> int:
    """Return the number of training prompts."""
    return int(identity["contents"]["train_files"].split()[0])


def check_number(was: dict, prompts: int, where: Path) -> None:
    """Raise UserError unless the run of the samples at `where`, of this identity, had this many training prompts."""
    if prompts != _number(was):
        raise UserError(
            f"{where} is of a run with {_number(was):,} training prompts, and now there are {prompts:,}, so its samples would "
            "belong to other rows. Give the same data and limits. --filter-overlong-prompts also leaves out rows whose "
            "--teacher-prompt is too long: raise --max-prompt-length."
        )


def load(path: Path, learner: Learner) -> dict:
    """Read the checkpoint into the learner. Return the state of the run's other parts. Raise UserError if it cannot be used."""
    record = _read_state(path)
    load_tensors(path, learner.state_tensors())
    ranks = record["ranks"]
    learner.restore(record["learner"], ranks[learner.ranks.rank] if learner.ranks.rank < len(ranks) else None)
    return record["state"]


def _read_state(path: Path) -> dict:
    try:
        record = json.loads((path / TRAINING / STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Take another checkpoint with --resume-mode PATH.") from None
    if record.get("layout") != files.LAYOUT:
        raise UserError(
            f"{path} was written by an older version, in files that this one does not read. Start a new run from its weights: "
            f"--model {path}, with another --experiment-name."
        )
    return record


def load_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read weights and moments into this learner's parts of them, in place. Raise UserError if the checkpoint has others."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    try:
        saved = {name: list(of.size) for name, of in files.reader(path).read_metadata().state_dict_metadata.items()}
        wanted = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if name := next((name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)), None):
            there, here = (of.get(name, "no such tensor") for of in (saved, wanted))
            raise UserError(
                f"{path} does not fit: {name} is {there} there and {here} here. Give the flags of its run (--model, --optim, "
                "LoRA's, the critic's, --freeze-vision-tower)."
            )
        files.read_tensors(path, tensors)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path / TRAINING} cannot be read ({error}). Take another checkpoint with --resume-mode PATH."
        ) from None


def find(args: CheckpointArgs, output_dir: str, experiment_name: str | None) -> Origin | None:
    """Return the run and the checkpoint to resume from, the same on every rank; None to start over. Raise UserError if the
    checkpoint that was asked for is none. A collective."""
    found = _find(args, Path(output_dir), experiment_name) if torch.distributed.get_rank() == 0 else None
    run_dir, path = dist.from_main(found and [str(found.run_dir), found.checkpoint and str(found.checkpoint)]) or (None, None)
    return Origin(Path(run_dir), path and Path(path)) if run_dir else None


def _find(args: CheckpointArgs, output_dir: Path, experiment_name: str | None) -> Origin | None:
    runs = []
    if launch.restarts():  # this job's own run, wherever it began
        parents = {output_dir, (output_dir / (experiment_name or "run")).parent}  # names may be nested
        if args.resume_mode not in ("auto", "disable"):
            parents.add(Path(args.resume_mode).resolve().parent.parent)
        configs = [config for parent in parents for config in parent.glob("*/config*.json")]
        configs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        runs = [path.parent for path in configs if (_read_config(path) or {}).get("job") == launch.job()][:1]
    if not runs and args.resume_mode == "disable":
        return None
    if not runs and args.resume_mode != "auto":
        return check_path(Path(args.resume_mode))
    if not runs and experiment_name:
        runs = [output_dir / experiment_name]
    for run_dir in runs:
        if any(next(run_dir.glob(trace), None) for trace in ("config*.json", "metrics.jsonl", STEPS)):
            if _read_config(run_dir / "config.json") is None:
                print(f"warning: {run_dir}/config.json is missing or damaged; the run continues", file=sys.stderr, flush=True)
            newest = max(files.checkpoints(run_dir), default=None)
            if not newest and next(run_dir.glob(STEPS), None):
                raise UserError(f"{run_dir}: no checkpoint has its {TRAINING}/{STATE}. Start a new run, under another name.")
            return Origin(run_dir, newest)
    return None


def check_path(path: Path) -> Origin:
    """Return the checkpoint that was asked for. Raise UserError if it is none."""
    path = path.resolve()
    if not (path / TRAINING / STATE).is_file():
        raise UserError(f"--resume-mode {path}: no checkpoint is there. Take another, or --resume-mode auto.")
    if not path.match(STEPS):
        raise UserError(
            f"--resume-mode {path}: a checkpoint's name is step_ and six digits, such as step_000020. Rename it so; move away "
            "what has that name already."
        )
    return Origin(path.parent, path)


def _read_config(path: Path) -> dict | None:
    """Return None if it is missing or damaged."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def groups_of(data: bytes) -> list[Group]:
    """Return the groups in the bytes of GROUPS or UNFINISHED."""
    return [Group.from_bytes(record) for record in split_records(data)]
