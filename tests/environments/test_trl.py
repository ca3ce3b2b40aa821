"""TRL's own trainer plays the same episodes, with the same class of its kind: the same tokens, masks and rewards.

What the model says is given, to both. TRL is not among the requirements of the tests: requirements-bench.txt has it.
"""

import json
import random
from pathlib import Path

import pytest
from families import end_tokens, tokenizer_of
from scripted import ScriptedEngine, ScriptedPool, engine_ranks, scripted_job
from test_episodes import finish
from test_pool import environments

import train_async
from rl import parts
from rl.data.prompts import Prompt
from rl.generation.episodes import Episodes
from rl.generation.generator import Generator
from user_processes.turns import Turns

trl = pytest.importorskip("trl")

WORDS = ["cat", "dog", "ibex", "auk"]
LENGTH = 2000


def turn(rng: random.Random, calls: int) -> str:
    """What the model says in a turn, with that many calls."""
    text = rng.choice(["", "Let me see.\n", "One, two {three} "])
    for _ in range(calls):
        arguments = {"word": rng.choice([*WORDS, "no such word", "naïve ü"])} | ({"times": 2} if rng.random() < 0.3 else {})
        call = {"name": "look", "arguments": arguments} if rng.random() < 0.8 else {"name": "count", "arguments": {}}
        text += f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>\n"
    return text.rstrip("\n") if calls else text + "done"


def played_by_trl(tokenizer, prompt, turns, tmp_path) -> tuple[list, list, list, list]:
    """TRL's prompts, completions, masks of what the model said, and rewards. turns: of each response, token ids a turn."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl_words import Words, measured

    class Scripted(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *_, **__):
            """The next turn of each response: those still under way are the ones with turns left, in order."""
            under_way = [response for response in left if response]
            assert len(under_way) == len(prompt_ids)
            return [response.pop(0) for response in under_way], None

    left = [list(response) for response in turns]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(turns),
        num_generations=len(turns),
        max_completion_length=LENGTH,
        max_tool_calling_iterations=20,
        report_to=[],
        use_cpu=True,
    )
    rows = [{"prompt": prompt, "words": WORDS}]
    import datasets

    trainer = Scripted(
        Qwen2ForCausalLM(config),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=Words,
        reward_funcs=measured,
    )
    out = trainer._generate_and_score_completions(rows * len(turns))
    lengths = out["completion_mask"].sum(1).tolist()
    said = [ids[:length].tolist() for ids, length in zip(out["completion_ids"], lengths, strict=True)]
    masks = [mask[:length].bool().tolist() for mask, length in zip(out["tool_mask"], lengths, strict=True)]
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(out["prompt_ids"], out["prompt_mask"], strict=True)]
    rewards = [sum(of_response) for of_response in zip(*trainer._logs["rewards"].values(), strict=True)]
    return prompts, said, masks, rewards


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_trl_s_own_trainer_plays_the_same_episodes(family, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer, rng = tokenizer_of(family), random.Random(family)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    (end,) = end_tokens(family)
    prompt = [{"role": "user", "content": "Which words are there?"}]
    said = [[*[turn(rng, rng.randint(1, 2)) for _ in range(n)], turn(rng, 0)] for n in (0, 1, 2, 4)]
    turns = [[tokenizer(text, add_special_tokens=False)["input_ids"] + [end] for text in texts] for texts in said]
    theirs = played_by_trl(tokenizer, [dict(message) for message in prompt], turns, tmp_path)

    path = str(tmp_path / "model")
    tokenizer.save_pretrained(path)
    file = Path(__file__).with_name("trl_words.py")
    pool = environments(path, f"{file}:Words", reward=f"{file}:measured")
    left = {number: list(response) for number, response in enumerate(turns)}

    def script(request):
        before = request.so_far.token_ids if request.so_far else []
        new = left[request.id[1]].pop(0)
        return [*before, *new], [0.0] * (len(before) + len(new))

    args = parts.make(train_async.Args, rollout_n=len(turns), max_response_length=LENGTH, max_prompt_length=2000, max_turns=20)
    ids = Turns(tokenizer, pool.tools[""].schemas, {end}).prompt(prompt, [])
    row = {"prompt": prompt, "words": WORDS}
    job = scripted_job(Prompt(ids, "", "words", "", {}, "", row=row), tokenizer=tokenizer, environments=pool)
    engine, ranks = ScriptedEngine(script, end), engine_ranks()
    generator = Generator(engine, job, ScriptedPool(), args, ranks, responses=Episodes(job, engine, ranks, args, {end}))
    generator.start(0)
    group = finish(generator)
    pool.close()

    ours = [response.token_ids.tolist() for response in group.responses]
    masks = [[True] * len(o) if r.mask is None else r.mask.tolist() for o, r in zip(ours, group.responses, strict=True)]
    for number in range(len(turns)):
        assert tokenizer.decode(ours[number]) == tokenizer.decode(theirs[1][number])
    prompts = [group.prompt_ids.tolist()] * len(turns)
    assert (prompts, ours, masks) == theirs[:3]
    assert [r.score for r in group.responses] == pytest.approx(theirs[3])
