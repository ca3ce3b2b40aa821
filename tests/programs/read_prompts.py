"""A job that only reads prompts. Each rank writes the prompts it has, and how much of the work was its own.

torchrun --nproc-per-node 2 tests/programs/read_prompts.py MODEL OUT FLAGS
FLAGS: JSON, of DataArgs; generators, if it is a job of two roles
"""

import json
import sys
from pathlib import Path

from rl import split
from rl.data import image_prompts
from rl.data.args import DataArgs
from rl.data.image_prompts import ImagePrep
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from rl.model.pretrained import load_config, load_tokenizer, takes_images
from rl.ranks import dist, launch, process

model, out, given = sys.argv[1:]
flags = json.loads(given)
generators = flags.pop("generators", 0)
args = DataArgs(**flags | {"train_files": tuple(flags["train_files"])})


def main(_) -> None:
    rank = launch.here().rank
    tokenizer, counts = load_tokenizer(model), {"texts": 0, "images": 0}
    tokenize, sizes = type(tokenizer).__call__, image_prompts.images.sizes

    class Counted(type(tokenizer)):
        def __call__(self, text, **how):
            counts["texts"] += 1
            return tokenize(self, text, **how)

    def counted_sizes(sources):
        counts["images"] += len(sources)
        return sizes(sources)

    tokenizer.__class__, image_prompts.images.sizes = Counted, counted_sizes
    said = {}
    try:
        config = load_config(model)
        prep = ImagePrep(model, config) if takes_images(config) else None
        rows = PromptDataset(args.train_files, "train", tokenizer, args, prep)
        measured = dict(counts)
        tokenizer.__class__ = Counted.__base__
        ids = [prompt.ids for prompt in (rows[i] for i in range(len(rows)))]
        said = {"rows": list(rows.rows), "truncated": rows.truncated, "ids": ids}
    except UserError as error:
        measured, said = dict(counts), {"error": str(error)}
    (Path(out) / f"{rank}.json").write_text(json.dumps(measured | said))


def join() -> object:
    return split.init_split(generators) if generators else dist.init()


process.run(main, join)
