"""`--push-to`: the last checkpoint on the Hugging Face hub, with a short model card.

The repository is made or found before the first step: a run that may not write there fails at once. Left out: the optimizer's
state; docs/serving.md has the command for any checkpoint.
"""

from concurrent.futures import wait
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, constants

from rl.background import in_background
from rl.checkpoint.best import TRAINING, step_of
from rl.errors import UserError
from rl.ranks import watchdog


def open_repository(repo: str) -> None:
    """Make the repository if it does not exist. Raise UserError if that fails, before anything is trained."""
    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # of the name, the token, the network or the hub
        raise UserError(f"--push-to {repo}: {error!s:.300}. Correct the name or `hf auth login`, or leave it out.") from None


def push(args, script: str, run_dir: Path, checkpoint: Path) -> str:
    """Push the checkpoint's Hugging Face files as one commit; return the repository's address. args: the script's flags. Raise
    UserError if that fails; the run and its checkpoint are complete anyway."""
    repository = args.checkpoint.push_to
    is_on_hub = "/" in args.model and not Path(args.model).exists()
    base = args.model if is_on_hub else Path(args.model).name
    what = "reinforcement learning" if hasattr(args, "loss") else "supervised training"
    head = {"library_name": "transformers", "base_model": args.model if is_on_hub else None, "tags": [what.replace(" ", "-")]}
    how = f"with `{script}.py`, lr {args.learner.lr:g}, seed {args.seed}"
    text = f"# {repository.rpartition('/')[2]}\n\n`{base}` after {step_of(checkpoint):,} steps of {what} {how}.\n"
    ModelCard(f"---\n{ModelCardData(**head).to_yaml()}\n---\n\n{text}").save(checkpoint / "README.md")
    about = {
        "commit_message": f"Step {step_of(checkpoint)} of {run_dir.name}",
        "ignore_patterns": [f"{TRAINING}/*", "best.json"],
    }
    pushed = in_background(lambda: HfApi().upload_folder(repo_id=repository, folder_path=checkpoint, **about), "push")
    while not wait([pushed], timeout=1.0).done:
        watchdog.progress()  # an upload may take longer than --hang-timeout
    if error := pushed.exception():
        raise UserError(
            f"--push-to {repository}: {error!s:.300}. The run is complete, and its checkpoint is {checkpoint}. Push it with: "
            f'hf upload {repository} {checkpoint} . --exclude "{TRAINING}/*"'
        )
    return f"{constants.ENDPOINT}/{repository}"
