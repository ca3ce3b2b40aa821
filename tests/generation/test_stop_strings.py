"""--stop: a response ends with the token that completes a string, whatever the tokenizer cuts texts into, and however often the
response is put aside."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import drain
from scripted import ScriptedPool, engine_ranks, scripted_job
from test_engine import requests_for
from test_episodes import Played, finish
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

import train_async
from rl import parts
from rl.data.prompts import Prompt
from rl.errors import UserError
from rl.generation.embedded import TransformersEngine
from rl.generation.episodes import Episodes
from rl.generation.generator import Generator, Responses
from rl.generation.stop_strings import StopStrings
from rl.ranges import check
from rl.samples.group import Group

TEXT = ["<answer> 12 </answer>\nQ: why? Ünïcødé 你好。 ok.", "a b  c\n\nUser: <|end|> </ans wer> ☃☃ </answer >", "</ a>. a.b,c"]
STRINGS = [("</answer>",), ("\n\n", "User:"), (" b ",), ("。",), ("☃☃", "Ü"), ("<|end|>",), (" ", "xyz"), ("a.b",)]


def byte_level(trained: bool) -> PreTrainedTokenizerFast:
    """As Qwen's and Llama 3's; without training every token is a byte."""
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = 400 if trained else 257
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's and Gemma's: spaces belong to words, unknown characters are bytes, and the first space is stripped."""
    pieces = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys("▁abcUsernwQ<>/:.?12xyz"), "▁b"]
    tokenizer = Tokenizer(kinds.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "b")], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    tokenizer.normalizer, tokenizer.decoder = normalizers.Replace(" ", "▁"), decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


TOKENIZERS = {"bytes": lambda: byte_level(False), "byte-level": lambda: byte_level(True), "fallback": byte_fallback}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_response_ends_where_its_whole_text_first_has_a_string(kind):
    """Random tokens, amid which a string is; many are no valid UTF-8."""
    tokenizer, rng, found = TOKENIZERS[kind](), random.Random(0), 0
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for strings in STRINGS:
        stop, own = StopStrings(strings, tokenizer), [token for string in strings for token in ids(string)]
        pool = [*ids("".join(TEXT)), *own * 5]
        for _ in range(60):
            tokens = [rng.choice([*pool, rng.randrange(len(tokenizer))]) for _ in range(40)]
            at = rng.randrange(40)
            tokens[at:at] = [*ids("你好" * rng.randrange(5)), *own]
            ends = [n for n in range(1, len(tokens) + 1) if any(s in tokenizer.decode(tokens[:n]) for s in strings)]
            mine = next((n for n in range(1, len(tokens) + 1) if stop.complete(tokens[:n])), None)
            assert mine == (ends[0] if ends else None), (strings, tokenizer.convert_ids_to_tokens(tokens))
            found += bool(ends)
    assert found > 200


# ------------------------------------------------------------------------------------------------------ engines and turns


LETTERS = SimpleNamespace(decode=lambda ids, **_: "".join("abcd"[token % 4] for token in ids))
STOP = ("ca", "dd")


def first_end(tokens: list[int]) -> int | None:
    text = LETTERS.decode(tokens)
    return min((text.index(string) + len(string) for string in STOP if string in text), default=None)


def test_the_engine_ends_a_response_there_and_samples_nothing_else(models):
    """As it is without the strings up to there, and when it continues elsewhere after any step."""
    engine = TransformersEngine(models["qwen3"], max_length=64, max_num_seqs=8, end_tokens={1})
    whole = drain(engine, requests_for(ignore_eos=True))
    requests = requests_for(ignore_eos=True, stop=StopStrings(STOP, LETTERS))
    outputs = drain(engine, requests)
    ends = {id: first_end(output.token_ids) for id, output in whole.items()}
    assert len({*ends.values()}) > 4 and None in ends.values()
    for id, output in outputs.items():
        assert output.finish_reason == ("stop" if ends[id] else "length")
        assert output.token_ids == whole[id].token_ids[: ends[id]]
        assert output.log_probs == pytest.approx(whole[id].log_probs[: ends[id]], abs=1e-5)
    for steps in range(1, 8):
        for request in requests:
            engine.add(request)
        ended = {output.id: output for _ in range(steps) for output in engine.step()}
        begun = {output.id: output for output in engine.unfinished()}
        engine.abort()
        again = [replace(request, so_far=begun[request.id]) for request in requests if request.id in begun]
        ended |= drain(engine, again)
        assert {id: output.token_ids for id, output in ended.items()} == {id: o.token_ids for id, o in outputs.items()}
        assert {output.finish_reason for output in ended.values()} == {"stop", "length"}


def make(engine, turns: int) -> Generator:
    """A generator of six responses, in `turns` turns, each answered with tokens of the text "ddac"."""
    args = parts.make(train_async.Args, rollout_n=6, max_response_length=40, stop=STOP, env="file.py:Class")
    played = Played(lambda key, turn, ids: {"done": turn >= turns, "ids": [] if turn >= turns else [3, 7, 4, 6], "reward": 1.0})
    job = scripted_job(Prompt([2, 3], "", "demo", "1", {}, "", row={}), environments=played, tokenizer=LETTERS)
    ranks = engine_ranks()
    engine.abort()
    responses = Episodes(job, engine, ranks, args, {1}) if turns > 1 else Responses(engine)
    return Generator(engine, job, ScriptedPool(), args, ranks, responses=responses)


def turns_of(response) -> list[list[int]]:
    """The tokens of each turn of the model."""
    tokens = response.token_ids
    mask = np.ones(len(tokens), bool) if response.mask is None else response.mask
    cuts = np.flatnonzero(np.diff(mask.astype(int))) + 1
    pairs = zip(np.split(tokens, cuts), np.split(mask, cuts), strict=True)
    return [part.tolist() for part, sampled in pairs if sampled[0]]


@pytest.mark.parametrize("turns", [1, 4])
def test_a_stopped_run_resumes_as_if_it_had_not_been(models, turns):
    """After any step, also while an environment has a turn that a string has ended. A turn does not end at once because the
    turn before or the answer has a string, or the beginning of one."""
    engine = TransformersEngine(models["qwen3"], max_length=64, end_tokens={1})
    generator = make(engine, turns)
    generator.start(0)
    expected = finish(generator)
    own = [turn for r in expected.responses for turn in turns_of(r)[: None if r.finish_reason == "stop" else -1]]
    assert all(turn[-1] == 1 or first_end(turn) == len(turn) for turn in own)
    assert len([turn for turn in own if turn[-1] != 1]) >= turns + 1
    resumed = 0
    for steps in range(1, 40):
        generator = make(engine, turns)
        generator.start(0)
        if any([generator.score(generator.decode()) for _ in range(steps)]):
            break
        group = Group.from_bytes(generator.unfinished()[0].to_bytes())
        generator = make(engine, turns)
        generator.start(0, group)
        for r, e in zip(finish(generator).responses, expected.responses, strict=True):
            assert r.token_ids.tolist() == e.token_ids.tolist() and r.finish_reason == e.finish_reason
            np.testing.assert_allclose(r.log_probs, e.log_probs, atol=1e-5)
        resumed += 1
    assert resumed > 3


def test_a_string_may_be_white_space_but_not_a_space():
    check(parts.make(train_async.Args, stop=("\n\n", "</answer>")))
    with pytest.raises(UserError, match="--stop: its value is empty"):
        check(parts.make(train_async.Args, stop=(" ",)))
