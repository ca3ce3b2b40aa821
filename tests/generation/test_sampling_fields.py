"""A sampling rule that an engine does not read is refused; what an engine says that it reads, it reads."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest

import train_sync
from rl.errors import UserError
from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Request, SamplingParams, check_sampling
from rl.generation.generator import Generator

NAMES = {field.name for field in fields(SamplingParams)}


class Watched:
    """The fields of SamplingParams, and which of them were asked for. A property counts as the fields that it asks for."""

    def __init__(self):
        self.asked: set[str] = set()

    def __getattr__(self, name: str):
        if name not in NAMES:
            return getattr(SamplingParams, name).fget(self)
        self.asked.add(name)
        return getattr(SamplingParams(), name)


def test_the_embedded_engine_reads_what_it_says(models):
    every = {*range(1000)}  # any token ends a response, unless it is ignored
    engine, watched = TransformersEngine(models["qwen3"], max_length=20, end_tokens=every), Watched()
    engine.add(Request(0, [3, 4], watched, 0))
    while engine.num_unfinished:
        engine.step()
    assert watched.asked == TransformersEngine.reads


@dataclass
class Sampled:
    """vLLM's FlatLogprobs, as far as they are read."""

    token_ids: list[int]
    logprobs: list[float]

    def __len__(self) -> int:
        return len(self.token_ids)


def test_vllm_is_given_what_it_says():
    engine = pytest.importorskip("rl.generation.vllm.engine", exc_type=ImportError).VLLMEngine
    given, watched = [], Watched()
    own = {"seeds": False, "eos": [1], "_updates": 0, "_salts": {}, "images": None, "_ask": lambda *of: given.append(of)}
    request = Request(0, [3, 4], watched, 0)
    engine._hand_over(SimpleNamespace(**own), "0", request)
    assert len(given) == 1
    pending = SimpleNamespace(request=request, versions=[0])
    engine._joined(SimpleNamespace(version=0), pending, Sampled([5], [-1.0]), "stop", None)  # what it gives is asked for here
    assert watched.asked == engine.reads


@dataclass(frozen=True)
class WithMinP(SamplingParams):
    min_p: float = 0.0


@pytest.mark.parametrize("of", ["sampling", "val_sampling"])
@pytest.mark.parametrize("engine", [TransformersEngine, type("VLLMEngine", (), {"reads": TransformersEngine.reads})])
def test_a_rule_that_the_engine_would_ignore_ends_the_start(monkeypatch, engine, of):
    monkeypatch.setattr("rl.generation.engine.SamplingParams", WithMinP)
    start: Callable = lambda args: Generator(engine.__new__(engine), None, None, args, SimpleNamespace(size=1))  # noqa: E731
    start(train_sync.Args())
    monkeypatch.setattr(train_sync.Args, of, property(lambda args: WithMinP(min_p=0.1)))
    with pytest.raises(UserError, match=rf"^{engine.__name__} does not sample by min_p, which is 0\.1 here .*--engine.*reads"):
        start(train_sync.Args())


def test_a_field_at_its_default_needs_no_engine(monkeypatch):
    monkeypatch.setattr("rl.generation.engine.SamplingParams", WithMinP)
    check_sampling(TransformersEngine.__new__(TransformersEngine), WithMinP(top_p=0.9))


def test_a_forks_rule_is_warned_of_by_its_one_property(monkeypatch):
    """`truncates` is what the warning about truncated sampling and the embedded engine ask."""
    assert [SamplingParams(**rule).truncates for rule in ({}, {"top_p": 0.9}, {"top_k": 3})] == [False, True, True]
    args = train_sync.Args(top_p=0.9, top_k=7, temperature=0.5, max_response_length=5, ignore_eos=True, val_top_p=0.8)
    assert args.sampling == SamplingParams(0.5, 0.9, 7, 5, True)
    assert args.val_sampling == SamplingParams(0.0, 0.8, -1, 5, False)
