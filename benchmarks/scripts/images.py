"""Parts of runs with images compared with what they could be: the learner, its memory, and the generator over vLLM.

    python benchmarks/scripts/images.py                                    # writes benchmarks/results/images.{json,md}

Random models of Qwen3-VL's kind in fp32, 8 prompts with a picture each, 8 responses to a prompt. All sides prepare the pictures
in every round, from their files, but for the bare learner, which has their pixels.
- learner: `learn` of train_sync.py compared with transformers' forward, backward and fused AdamW on the same packed rows; each
  picture goes through the tower once. Tokens count each response with its prompt.
- generator: our step loop over vLLM compared with vLLM's own engine with its own settings, given the same pixels and seeds.
- memory: the most that a step of the learner takes above weights and moments, compared with a step in which each response has
  its image, and with a count of what it must hold (images_memory.py).
trl.py compares whole steps with TRL's GRPOTrainer.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import RESULTS, Rounds, over, ratios, run, setting, table, words, write

PROMPTS = RESPONSES = 8


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    tower: int  # hidden size of the vision tower
    depth: int  # layers of the tower
    side: int  # of a picture, in pixels
    tokens: int  # of a response, at most


SIZES = {
    "toy": Size(64, 1, 32, 1, 64, 4),
    "1M": Size(128, 4, 96, 3, 128, 64),
    "30M": Size(512, 8, 256, 6, 256, 128),
}


@dataclass
class Args:
    parts: tuple[Literal["learner", "generator", "memory"], ...] = ("learner", "generator", "memory")
    """What is measured; what the result file holds of other parts stays."""
    sizes: tuple[Literal[tuple(SIZES)], ...] = ("1M", "30M")
    """Which models, by about how many parameters they have."""
    rounds: int = 7
    """Measurements of each side; in `learner` and `generator` the first is not counted."""
    minutes: float = 10
    """No round of a part and size begins that would end later than this."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


# -------------------------------------------------------------------------------------------------- model and pictures


def save(path: str, size: Size) -> int:
    """The model with its tokenizer and image processor; returns its parameters."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from examples.demo.pictures import VISION, build_processor, build_tokenizer

    tokenizer, processor = build_tokenizer(), build_processor()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=max(1, size.hidden // 64),
        head_dim=32,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=4096,
        rope_parameters=rope,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = dict(
        depth=size.depth,
        hidden_size=size.tower,
        num_heads=size.tower // 32,
        intermediate_size=4 * size.tower,
        out_hidden_size=size.hidden,
        patch_size=processor.patch_size,
        num_position_embeddings=256,
        deepstack_visual_indexes=[0],
    )
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(VISION), strict=True))
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    for part in (model, tokenizer, processor):
        part.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def save_rows(folder: str, size: Size, count: int = 8 * PROMPTS) -> str:
    """A parquet file of this many rows in verl's layout, each with a picture of its own, in the same folder."""
    import numpy as np
    from datasets import Dataset
    from PIL import Image

    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        picture = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((size.side, size.side), Image.NEAREST)
        picture.save(file := f"{folder}/{number}.png")
        truth = {"ground_truth": "1"}
        prompt = [{"role": "user", "content": "<image>Number?"}]
        rows.append({"data_source": "demo", "prompt": prompt, "images": [file], "reward_model": truth})
    Dataset.from_list(rows).to_parquet(path := f"{folder}/rows.parquet")
    return path


def prompts_of(model: str, file: str):
    """The rows as prompts, of whose pictures no pixels have been made."""
    from rl.data.args import DataArgs
    from rl.data.image_prompts import ImagePrep
    from rl.data.prompts import PromptDataset
    from rl.model.pretrained import load_config, load_tokenizer

    args = DataArgs(max_prompt_length=1024)
    return PromptDataset((file,), "train", load_tokenizer(model), args, ImagePrep(model, load_config(model)))


def batch_of(size: Size, model: str, file: str):
    """What a learner is given: random responses to the first prompts, the same in each call; no pixels have been made."""
    import numpy as np

    from rl.data.prompts import PromptOrder
    from rl.learning.batch import Batch
    from rl.learning.batch_images import BatchImages
    from rl.samples.group import Group, Response

    rng, rows, groups = np.random.default_rng(0), prompts_of(model, file), []
    lengths = rng.integers(size.tokens // 4, size.tokens + 1, (PROMPTS, RESPONSES))
    answers = [[rng.integers(60, 70, n).astype(np.int32) for n in of_one] for of_one in lengths]
    scores = rng.integers(0, 2, lengths.shape).astype(float)
    for ticket in range(PROMPTS):
        responses = [
            Response(tokens, np.full(len(tokens), -4, np.float32), np.zeros(len(tokens), np.int32), "stop", score)
            for tokens, score in zip(answers[ticket], scores[ticket], strict=True)
        ]
        prompt = rows[ticket]
        groups.append(Group(ticket, np.array(prompt.ids, np.int32), "demo", responses, images=prompt.images.digest))
    out = Batch.of(groups)
    out.images = BatchImages(rows, PromptOrder(PROMPTS, 0, shuffle=False), groups)
    return out


# --------------------------------------------------------------------------------------------------------- the parts


def learner(size: Size, model: str, file: str, args: Args) -> dict[str, list[float]]:
    """Tokens/s by side, one a round."""
    import torch
    import torch.nn.functional as F

    import train_sync
    from rl.flags import read
    from rl.learning.batch import micro_batches
    from rl.learning.learner import Learner
    from rl.model.loading import load_weights
    from rl.ranks import dist
    from rl.ranks.timers import Timers

    ranks = dist.init()
    sync = read(train_sync.Args, args=["--model", model, "--max-response-length", str(size.tokens)])
    learns = Learner(model, sync.learner, ranks, total_steps=1000)
    bare = load_weights(model, torch.float32, say=False).train()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True)
    first = batch_of(size, model, file)
    micros = micro_batches(first, torch.arange(len(first.lengths)), sync.learner.max_tokens_per_micro_batch, ranks)
    pixels = [micro.inputs["images"].pixels() for micro in micros]

    def bare_step(_) -> None:
        for micro, of_row in zip(micros, pixels, strict=True):
            logits = bare(
                input_ids=micro.inputs["input_ids"],
                position_ids=micro.inputs["position_ids"],
                pixel_values=of_row,
                image_grid_thw=micro.inputs["images"].grid,
                logits_to_keep=micro.predict,
                use_cache=False,
                layout=micro.layout,
            ).logits[0]  # [n, V]
            (F.cross_entropy(logits, micro.labels, reduction="sum") / len(first.token)).backward()
        optimizer.step()
        optimizer.zero_grad()

    update = lambda given: train_sync.learn(sync, learns, given, Timers())  # noqa: E731
    out = rates({"bare": bare_step, "update": update}, lambda: batch_of(size, model, file), sum(first.total_lengths), args)
    torch.distributed.destroy_process_group()  # vLLM would join it
    return out


def generator(size: Size, model: str, file: str, args: Args) -> dict[str, list[float]]:
    """Response tokens/s by side, one a round."""
    from rl.generation.engine import EngineArgs, Request, SamplingParams
    from rl.generation.vllm.engine import VLLMEngine, vllm

    length, count = len(prompts_of(model, file)[0].ids) + size.tokens, PROMPTS * RESPONSES
    settings = {"max_num_seqs": count, "max_num_batched_tokens": max(8192, length)}
    engine = VLLMEngine(model, EngineArgs(**settings), length)
    known = dict(skip_tokenizer_init=True, enforce_eager=True, logprobs_mode="processed_logprobs", async_scheduling=False)
    known |= settings | engine.images.settings(on_accelerator=False)
    raw = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(model=model, dtype="float32", max_model_len=length, **known))

    def ours(rows) -> None:
        engine._updates += 1  # as after a publish: nothing of the round before may be found
        engine.engine.reset_encoder_cache()
        params = SamplingParams(max_tokens=size.tokens, ignore_eos=True)
        for i in range(PROMPTS):
            prompt = rows[i]
            for j in range(RESPONSES):
                engine.add(Request((i, j), prompt.ids, params, RESPONSES * i + j, images=prompt.images))
        while engine.num_unfinished:
            engine.step()

    def vllms(rows) -> None:
        common = dict(max_tokens=size.tokens, ignore_eos=True, detokenize=False, logprobs=0)
        for i in range(PROMPTS):
            prompt = rows[i]
            given = engine.images.prompt(prompt.images, prompt.ids, "")
            for j in range(RESPONSES):
                params = vllm.SamplingParams(seed=RESPONSES * i + j, **common)
                raw.add_request(f"{i}/{j}", {k: v for k, v in given.items() if k != "cache_salt"}, params)
        while raw.has_unfinished_requests():
            raw.step()
        raw.reset_prefix_cache()
        raw.reset_encoder_cache()

    sides = {"vLLM's own loop": vllms, "our loop over vLLM": ours}
    return rates(sides, lambda: prompts_of(model, file), count * size.tokens, args)


def memory(size: Size, model: str, file: str, args: Args) -> dict[str, list[float]]:
    """MB by side, one a round."""
    import sys

    out: dict[str, list[float]] = {side: [] for side in ("counted", "update", "an image for each response")}
    (name,) = (name for name, of in SIZES.items() if of is size)
    env = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # a large tensor's memory goes back when the tensor does
    for _ in Rounds(3, args.minutes):
        for side, of in out.items():
            script = str(Path(__file__).with_name("images_memory.py"))
            done = run([sys.executable, script, side, model, file, name], threads=2, **env)
            of.append(json.loads(done.output.splitlines()[-1])["peak"] / 1e6)
    return out


def rates(sides: dict, make: Callable, tokens: int, args: Args) -> dict[str, list[float]]:
    """Tokens/s by side. make: makes what a side is given, each time, outside of the timing."""
    out: dict[str, list[float]] = {side: [] for side in sides}
    for number in Rounds(args.rounds + 1, args.minutes):
        for side, act in sides.items():
            given, started = make(), time.perf_counter()
            act(given)
            if number:
                out[side].append(tokens / (time.perf_counter() - started))
    return out


# -------------------------------------------------------------------------------------------------------- the tables

BASES = {"learner": "bare", "generator": "vLLM's own loop", "memory": "counted"}
UNITS = {"learner": ("tokens/s", ",.0f"), "generator": ("response tokens/s", ",.0f")}
UNITS["memory"] = ("MB above weights and moments", ",.0f")


def part_table(part: str, sizes: dict[str, dict]) -> str:
    unit, form = UNITS[part]
    rows = []
    for of_size in sizes.values():
        base = of_size["sides"].get(BASES[part], [])
        for side, values in of_size["sides"].items():
            ratio = over(ratios(values, base)) if len(base) == len(values) else ""
            rows.append([of_size["about"], side, over(values, form), ratio])
    return table(["model", "side", unit, f"over {BASES[part]}"], rows)


def main(args: Args) -> None:
    import torch

    file = args.out / "images.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for part in args.parts:
        results[part] = {"setting": setting("transformers", threads=torch.get_num_threads()), "sizes": {}}
        for name in args.sizes:
            with tempfile.TemporaryDirectory() as folder:
                size, model = SIZES[name], f"{folder}/model"
                parameters = save(model, size)
                rows = save_rows(folder, size)
                act = {"learner": learner, "generator": generator, "memory": memory}[part]
                about = f"{parameters / 1e6:.1f}M, pictures of {size.side} x {size.side}, up to {size.tokens} tokens"
                results[part]["sizes"][name] = {"about": about, "sides": act(size, model, rows, args)}
    text = [
        f"**{part}**\n\n{part_table(part, of['sizes'])}\n\n{words(of['setting'])}; rounds are interleaved, median (min - max)"
        for part, of in results.items()
    ]
    write("images", results, "\n\n".join(text), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
