"""`--push-to`: the last checkpoint on the Hugging Face hub, with a model card that has the run's numbers.

The repository is made or found before the first step: a run that may not write there fails at once. The card is made of
metrics.jsonl and validations.jsonl. Left out: `best/` and the optimizer; docs/serving.md has the command for any checkpoint.
"""

from concurrent.futures import wait
from pathlib import Path

from rl import __version__
from rl.background import in_background
from rl.checkpoint.manifest import MANIFEST, TRAINING
from rl.errors import UserError
from rl.masking import masked
from rl.ranks import watchdog
from rl.record import validations
from rl.record.run import METRICS

CURVES = {"critic/score/mean": "reward", "response_length/mean": "tokens of a response", "actor/entropy": "entropy"}
CURVES_SUPERVISED = {"actor/nll": "-log p of an answer's token", "val/nll": "the same, of the validation"}


def open_repository(repo: str) -> None:
    """Makes the repository if it does not exist. Raises UserError if that fails, before anything is trained."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # of the name, the token, the network or the hub
        raise UserError(
            f"--push-to {repo}: {_in_a_line(error)}. Correct the name or `hf auth login`, or leave it out."
        ) from None


def push(args, script: str, run_dir: Path, checkpoint: Path) -> str:
    """Pushes the checkpoint's Hugging Face files and the card as one commit. Returns its address. args: the script's flags.
    Raises UserError if that fails; the run and its checkpoint are complete anyway."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    def commit() -> None:
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
        files = [path for path in files if path.name != MANIFEST and TRAINING not in path.relative_to(checkpoint).parts]
        parts = [CommitOperationAdd(str(path.relative_to(checkpoint)), str(path)) for path in files]
        parts.append(CommitOperationAdd("README.md", masked(model_card(args, script, run_dir)).encode()))
        message = f"Step {int(checkpoint.name.removeprefix('step_'))} of {run_dir.name}"
        HfApi().create_commit(args.push_to, parts, commit_message=message)

    pushed = in_background(commit, "push")
    while not wait([pushed], timeout=1.0).done:
        watchdog.progress()  # an upload may take longer than --hang-timeout
    if error := pushed.exception():
        raise UserError(
            f"--push-to {args.push_to}: {_in_a_line(error)}. The run is complete, and its checkpoint is {checkpoint}. Push it "
            f'with: hf upload {args.push_to} {checkpoint} . --exclude "{TRAINING}/*" --exclude {MANIFEST}'
        )
    return f"{constants.ENDPOINT}/{args.push_to}"


def model_card(args, script: str, run_dir: Path) -> str:
    """The text of README.md: the model, its training, the first, best and last validation, and the change of the curves."""
    lines = (run_dir / METRICS).read_bytes().split(b"\n")
    rows = [row for row in map(validations.row_of, lines) if row and row["step"]]
    is_on_hub = "/" in args.model and not Path(args.model).exists()
    head = ["---", "library_name: transformers", *([f"base_model: {args.model}"] if is_on_hub else []), "tags:"]
    is_supervised = not hasattr(args, "adv_estimator")  # train_sft.py
    what = "supervised training" if is_supervised else "reinforcement learning"
    head += [f"- {what.replace(' ', '-')}", "---", "", f"# {args.push_to.rpartition('/')[2]}", ""]
    base = args.model if is_on_hub else Path(args.model).name
    steps = f"{rows[-1]['step'] if rows else 0:,} steps of {args.schedule.prompts_per_step:,} "
    if is_supervised:
        steps += "conversations"
    else:
        steps += f"prompts, {args.rollout_n} responses each, `--adv-estimator {args.adv_estimator}`, "
        steps += f"`--loss-mode {args.loss_mode}`"
    head += [f"`{base}` after {what} with `{script}.py`: {steps}, learning rate {args.lr:g},"]
    head += [f"seed {args.seed} (rl {__version__}).", ""]
    if args.adapted:
        head += ["Adapters (LoRA) were trained: the weights here have them added, `adapter/` has them alone.", ""]
    curves = CURVES_SUPERVISED if is_supervised else CURVES
    return "\n".join([*head, *_validations(validations.read(run_dir)), *_training(rows, curves)])


def _validations(rows: list[dict]) -> list[str]:
    """A table of the first, the best and the last validation; empty without validations."""
    names = sorted({name for row in rows for name in row if name.startswith("val-core/")})
    if not names:
        return []
    scores = validations.scores(rows)
    best = max(scores, key=scores.get, default=None)
    shown = {rows[0]["step"]: "first", best: "best", rows[-1]["step"]: "last"}
    cells = [
        [f"{row['step']} ({shown[row['step']]})", *(_number(row.get(name)) for name in names)]
        for row in rows
        if row["step"] in shown
    ]
    return _table("Validation", ["step", *(name.removeprefix("val-core/") for name in names)], cells)


def _training(rows: list[dict], curves: dict[str, str]) -> list[str]:
    """A table of the means over the first and the last tenth of the steps; empty without steps."""
    if not rows:
        return []
    tenth = -(-len(rows) // 10)
    cells = [[title, _mean(rows[:tenth], name), _mean(rows[-tenth:], name)] for name, title in curves.items()]
    return _table("Training", ["", f"first {tenth}", f"last {tenth} steps"], cells)


def _table(title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in cells), ""]


def _mean(rows: list[dict], name: str) -> str:
    known = [row[name] for row in rows if row.get(name) is not None]
    return _number(sum(known) / len(known) if known else None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
