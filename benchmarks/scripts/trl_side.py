"""TRL's side of trl.py and real_model.py, which start it in TRL's own environment: one run, step times as JSON.

    python -P benchmarks/scripts/trl_side.py settings.json result.json    # -P: else `import trl` would find trl.py here

Everything is TRL's own and at its defaults, but for what the settings name, the precision (its weights are in fp32, and
computed with in bf16 if the settings say so) and the CPU. Fixed lengths are made with `min_new_tokens`, which keeps the end
token from being sampled.
"""
# ruff: noqa: E402

import importlib.metadata
import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))


def name_torchvisions_operators() -> None:
    """PyPI's torchvision is built for CUDA's torch; with a CPU's its compiled operators are missing, and it does not import.
    The preparation of images uses none of them: names for them are enough."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or torch.version.cuda or "+" in importlib.metadata.version("torchvision"):
        return
    text = Path(spec.origin).with_name("_meta_registrations.py").read_text()
    for names in set(re.findall(r'register_meta\("(\w+)"\)|torchvision::(\w+)', text)):
        OPERATORS.define(f"{''.join(names)}(Tensor x) -> Tensor")


OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # the names go with it
name_torchvisions_operators()

import transformers
import trl
from datasets import Dataset, Image, List
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    TrainerCallback,
)

from examples.small_tasks import score


class Clock(TrainerCallback):
    """The seconds of each step, and the accuracies that `validate` returns before the first step and after every `every`-th;
    the clock stands still meanwhile."""

    def __init__(self, validate=None, every: int = 0):
        self.steps: list[float] = []
        self.accuracies: dict[int, float] = {}
        self._validate, self._every = validate, every

    def on_train_begin(self, *_, **__):
        self._began = self._after(0)

    def on_step_end(self, _, state, *__, **___):
        self.steps.append(time.perf_counter() - self._began)
        self._began = self._after(state.global_step)

    def _after(self, step: int) -> float:
        if self._every and step % self._every == 0:
            self.accuracies[step] = self._validate()
        return time.perf_counter()


def texts(completions) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def share_of_digits(completions, **_) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts(completions)]


def exact(completions, ground_truth, **_) -> list[float]:
    return [float(text.strip() == truth) for text, truth in zip(texts(completions), ground_truth, strict=True)]


def small(completions, source, ground_truth, **_) -> list[float]:
    answers = zip(source, texts(completions), ground_truth, strict=True)
    scores = [score(task, text, truth, {}) for task, text, truth in answers]
    return [found["score"] if isinstance(found, dict) else found for found in scores]


REWARDS = {"exact": exact, "share_of_digits": share_of_digits, "small": small}


@torch.no_grad()
def greedy_accuracy(model, tokenizer, s: dict) -> float:
    """The mean reward of greedy answers to the validation's rows, all in one batch."""
    was_training, rows = model.training, s["val"]
    prompts = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=False) for r in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    out = model.eval().generate(**inputs, max_new_tokens=s["tokens"], do_sample=False)[:, inputs["input_ids"].shape[1] :]
    model.train(was_training)
    found = [[{"content": text}] for text in tokenizer.batch_decode(out, skip_special_tokens=True)]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    return sum(REWARDS[s["reward"]](found, **columns)) / len(rows)


def load(s: dict) -> tuple:
    """(tokenizer or processor, model, dataset) of the settings; with images where the rows have some, as paths."""
    rows = Dataset.from_list(s["train"])
    if "images" not in rows.column_names:
        model = AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32)
        return AutoTokenizer.from_pretrained(s["model"]), model, rows
    model = AutoModelForImageTextToText.from_pretrained(s["model"], dtype=torch.float32)
    return AutoProcessor.from_pretrained(s["model"]), model, rows.cast_column("images", List(Image()))


def main(settings: dict) -> dict:
    s = settings
    tokenizer, model, rows = load(s)
    config = trl.GRPOConfig(
        output_dir=s["folder"],
        use_cpu=True,
        bf16=s["bf16"],
        seed=s["seed"],
        max_steps=s["steps"],
        per_device_train_batch_size=s["prompts_per_step"] * s["responses"],
        num_generations=s["responses"],
        max_completion_length=s["tokens"],
        generation_kwargs={"min_new_tokens": s["tokens"]} if s["fixed"] else None,
        gradient_checkpointing=s["checkpointing"],
        learning_rate=s["lr"],
        lr_scheduler_type=s["schedule"],
        warmup_steps=s["warmup"],
        weight_decay=0.01,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    clock = Clock(lambda: greedy_accuracy(trainer.model, tokenizer, s), s.get("val_every", 0))
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=REWARDS[s["reward"]],
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    out = {
        "steps": clock.steps,
        "accuracies": clock.accuracies,
        "tokens": [row["completions/mean_length"] * s["prompts_per_step"] * s["responses"] for row in logs],
        "reward": [row["reward"] for row in logs],
        "settings": {name: getattr(config, name) for name in ("optim", "beta", "loss_type", "steps_per_generation")},
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }
    if s["val"]:
        out["accuracy"] = greedy_accuracy(trainer.model, tokenizer, s)
    return out


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        result = main(json.load(file))
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)
