"""verl's programs: our script for each that trains, and what to use here in place of the others."""

import re
from typing import NamedTuple

from rl.errors import UserError
from rl.from_verl.verl_run import ASYNC, ONE_STEP_OFF, SFT, SYNC

TRAINERS = {  # part of a module's name -> our script, unless keys say otherwise; the first that is found counts
    "fully_async": ASYNC,
    "one_step_off": ONE_STEP_OFF,
    "sft_trainer": SFT,
    "main_ppo": SYNC,
    "main_dapo": SYNC,
    "main_entropy": SYNC,
}


class Other(NamedTuple):
    """Programs that train nothing which a script here trains."""

    name: str  # regular expression, found in the module's name
    what: str
    instead: str


OTHERS = [
    Other("main_eval", "grades responses in a file", "train_sync.py --val-only --val-files ... samples and grades in one run"),
    Other("main_generation", "samples responses", "train_sync.py --val-only --val-files ... --log-val-generations N samples "
          "and grades; docs/serving.md serves a trained model"),
    Other("model_merger|merge_lora", "merges verl's checkpoints", "a checkpoint here is a Hugging Face directory; merge verl's "
          "with verl, and give the result to --model"),
    Other("convert|migrate_.*checkpoint", "converts checkpoints", "Hugging Face directories are read as they are, and written"),
    Other("data_preprocess|data_process", "writes data", "verl's parquet files work unchanged; python examples/make_data.py "
          "gsm8k|geo3k|dapo-math writes the same rows"),
    Other("diagnose", "looks at the machine", "python doctor.py checks it"),
    Other(r"\bvla\b", "trains robots", "--env file.py:Class takes an environment of text"),
]  # fmt: skip
NAMES = re.compile("|".join([*TRAINERS, *(other.name for other in OTHERS)]))


def trainer(module: str) -> str | None:
    """Return our script for one of verl's trainers; None for another program."""
    if any(re.search(other.name, module) for other in OTHERS):
        return None
    return next((script for part, script in TRAINERS.items() if part in module), None)


def check(module: str) -> None:
    """Raise UserError unless the module, if there is one, is a trainer."""
    if not module or trainer(module):
        return
    for other in OTHERS:
        if re.search(other.name, module):
            raise UserError(f"{module} {other.what}, which no script here does. Instead: {other.instead}.")
    raise UserError(
        f"{module} is no trainer of verl's that is known here ({', '.join(TRAINERS)}), so nothing is translated. If it takes "
        "the keys of one of these, give its key=value words alone."
    )
