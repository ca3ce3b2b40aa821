"""Responses of agents: what their calls extend is continued, what they do not is a further history of the same response."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine
from test_episodes import ANSWER, TURN, Played, finish, make, script

from rl.generation.agent_episodes import AgentEpisodes
from rl.generation.engine import Output, Request, SamplingParams
from rl.generation.generator import Key
from rl.learning.batch import Batch, MicroBatch
from rl.model import sampling_mask
from rl.samples.group import Group

SUB, OTHER = [40, 41], [50, 51, 52]  # prompts of further histories
DONE = {"done": True, "reward": 1.0}


class Agents(Played):
    """In place of processes: `calls` are an agent's calls after each turn, (history, ids) or (history, ids, most)."""

    def __init__(self, calls, prompt=None, most=None, last=DONE):
        self.calls, self.prompt, self.most, self.last = calls, prompt or (lambda key: [2, 3]), most, last
        super().__init__(self._say, scores_at_end=True)

    def begin(self, key, row, seed, own_seed, split):
        super().begin(key, row, seed, own_seed, split)
        self._pending[-1][1].update(prompt=self.prompt(key), most=self.most)

    def _say(self, key, turn, ids):
        if turn > len(self.calls):
            return {"seconds": float(turn)} | self.last
        history, ids, *most = self.calls[turn - 1]
        return {"seconds": float(turn), "history": history, "ids": ids, "most": most[0] if most else None}


def agents(calls, engine=None, prompt=None, most=None, last=DONE, **flags):
    """A generator whose agents make these calls."""
    generator, played = make(Agents(calls, prompt, most, last), engine=engine, **flags)
    old = generator.responses
    generator.responses = AgentEpisodes(old.job, old.engine, old.engine_ranks, old.args, old.end_tokens)
    generator.working = generator.responses.working
    return generator, played


def group_of(*given, n=2, **flags) -> Group:
    """What becomes of a prompt, as it arrives at a learner."""
    generator, _ = agents(*given, n=n, **flags)
    generator.start(0)
    return Group.from_bytes(finish(generator).to_bytes())


def runs(response) -> list[tuple[list[int], list[bool]]]:
    """Tokens and mask of each history."""
    lengths = response.histories or [len(response.token_ids)]
    ends = np.cumsum(lengths)
    mask = np.ones(len(response.token_ids), bool) if response.mask is None else response.mask
    assert ends[-1] == len(response.token_ids)
    return [(response.token_ids[e - n : e].tolist(), mask[e - n : e].tolist()) for n, e in zip(lengths, ends, strict=True)]


def test_calls_that_extend_each_other_are_one_history():
    """As an environment's: not a field of the record is another."""
    for response in group_of([(0, ANSWER), (0, ANSWER)]).responses:
        assert response.histories is None and response.token_ids.tolist() == TURN + ANSWER + TURN + ANSWER + TURN
        assert response.score == 1.0 and response.extra["forks"] == 0 and response.extra["turns"] == 3


def test_histories_are_continued_by_turns():
    """A sub-agent's two calls between the main agent's two, and one that stands alone."""
    calls = [(1, SUB), (1, ANSWER), (0, ANSWER), (2, OTHER)]
    first, other = group_of(calls).responses
    both = ([True] * 3 + [False] * 3 + [True] * 3,) * 2
    assert runs(first) == [
        (TURN + ANSWER + TURN, both[0]),
        (SUB + TURN + ANSWER + TURN, [False] * 2 + both[1]),
        (OTHER + TURN, [False] * 3 + [True] * 3),
    ]
    assert first.log_probs[~first.mask].tolist() == [0.0] * 11 and first.log_probs[first.mask].tolist() == [-1.0] * 15
    assert set(first.versions.tolist()) == {3} and first.score == 1.0 and first.extra["forks"] == 2
    assert other.token_ids.tolist() == first.token_ids.tolist() and first.extra["turns"] == 5
    assert [answered for _, answered in first.seconds] == [1, 4, 2, 3, 5], "in the order of the tokens"


def test_a_group_s_baseline_counts_a_forked_response_once():
    """Complaint 3: histories are no further samples of the group."""
    groups = [group_of(calls) for calls in ([], [(1, SUB), (2, SUB)])]
    plain, forked = (Batch.of([group]) for group in groups)
    assert (
        torch.equal(plain.score, forked.score)
        and torch.equal(plain.group, forked.group)
        and forked.lengths.tolist() == [13] * 2
    )
    assert [r.histories for r in groups[1].responses] == [[3, 5, 5]] * 2


def test_a_first_call_unlike_its_group_s_is_a_history_of_its_own():
    """A time or a path in the system message: the response is trained all the same."""
    group = group_of([(0, ANSWER), (1, SUB)], prompt=lambda key: [2, 3] if key[1] == 0 else OTHER)
    first, other = group.responses
    assert group.prompt_ids.tolist() == [2, 3] and first.extra["forks"] == 1 and other.extra["forks"] == 2
    assert [tokens for tokens, _ in runs(first)] == [TURN + ANSWER + TURN, SUB + TURN]
    assert [tokens for tokens, _ in runs(other)] == [[], OTHER + TURN + ANSWER + TURN, SUB + TURN]
    group = group_of([], prompt=lambda key: [2, 3] if key[1] == 0 else OTHER * 10)
    assert [r.score for r in group.responses] == [1.0, None] and "--max-response-length" in group.responses[1].error


@pytest.mark.parametrize("length", range(3, 28))
def test_the_budget_is_all_histories_together(length):
    """Wherever it ends: not a token more, and nothing that ends in a prompt."""
    calls = [(1, SUB), (0, ANSWER), (1, ANSWER), (2, OTHER)]
    for response in group_of(calls, length=length).responses:
        tokens = len(response.token_ids)
        assert tokens <= length and (response.mask is None or response.mask[-1])
        assert all(mask[-1] for _, mask in runs(response))
        assert response.extra["cut_by_length"] == (length < 26) and response.score == (1.0 if length >= 26 else 0.25)
        assert response.finish_reason == ("stop" if length >= 26 else "length")


def test_a_call_s_own_limit_cuts_a_turn_and_no_response():
    """The environment is asked all the same, and puts the end token in front of what follows."""
    generator, played = agents([(0, [1, *ANSWER], None)], most=2)
    generator.start(0)
    for response in finish(generator).responses:
        assert response.token_ids.tolist() == [*TURN[:2], 1, *ANSWER, *TURN] and response.extra["cut_by_length"] == 0
        assert response.mask.tolist() == [True] * 2 + [False] * 4 + [True] * 3
    assert [ids for _, what, ids in played.asked if what == "step"][:2] == [TURN[:2]] * 2


def test_a_call_s_stop_strings_are_those_of_its_turn():
    """Beside those of the run; those of a call before are forgotten."""
    generator, played = agents([(0, ANSWER), (1, SUB)], stop=("</run>",))
    answer, asked = played.answer, []
    played.answer = lambda key, turn, ids: answer(key, turn, ids) | {"stop": ["Observation:"] * (turn == 1)}
    add = generator.engine.add
    generator.engine.add = lambda request: [asked.append(request.sampling.stop.strings), add(request)]
    generator.start(0)
    finish(generator)
    assert sorted(asked) == 4 * [("</run>",)] + 2 * [("</run>", "Observation:")]


def test_a_verifier_sees_the_last_answer_wherever_it_is():
    """The main agent's, though its history comes before the sub-agent's."""
    said = iter(range(60, 70))
    numbered = lambda request: (lambda ids, logs: ([*ids[:-1], next(said), 1], [*logs, -1.0]))(*script(request))  # noqa: E731
    for calls, last in (([(1, SUB), (0, ANSWER)], "5 6 62 1"), ([(1, SUB)], "5 6 64 1")):
        generator, _ = agents(calls, engine=None, n=1, last={"done": True, "reward": None})
        generator.responses.engine.script = numbered
        generator.start(0)
        assert finish(generator).responses[0].score == 7.0 and generator.pool.texts == {(0, 0): last}


def test_max_turns_counts_the_calls_of_all_histories():
    generator, played = agents([(1, SUB), (2, OTHER), (3, SUB)], max_turns=2)
    generator.start(0)
    for response in finish(generator).responses:
        assert response.histories == [3, 5] and response.extra["cut_by_turns"] == 1 and response.score == 0.25
    assert not played.alive


def test_an_agent_that_fails_in_a_further_history_costs_its_own_response():
    generator, played = agents([(1, SUB)])
    played.answer = lambda key, turn, ids: (
        {"event": "error", "message": "no"} if turn == 2 and key[1] else played._say(key, turn, ids)
    )
    generator.start(0)
    first, second = finish(generator).responses
    assert first.score == 1.0 and second.score is None and second.error == "error: no"


@pytest.mark.parametrize("steps", range(1, 16, 2))
def test_a_stop_starts_agents_again_and_counts_them(steps):
    """They cannot be played again. Whatever the stop cuts, what was recorded is forgotten."""
    calls = [(1, SUB), (0, ANSWER)]
    whole = group_of(calls)
    generator, _ = agents(calls)
    generator.start(0)
    for _ in range(steps):
        if generator.score(generator.decode()):
            return
    (group,) = generator.unfinished()
    begun = [int(len(r.token_ids) > 0) for r in group.responses]
    resumed, _ = agents(calls)
    resumed.start(group.ticket, Group.from_bytes(group.to_bytes()))
    found = finish(resumed)
    for response, expected in zip(found.responses, whole.responses, strict=True):
        assert runs(response) == runs(expected) and response.score == 1.0
    assert [r.extra["restarts"] for r in found.responses] == begun


def test_what_is_paused_continues_in_its_history():
    """train_sync.py with --over-sample: the engine is given another prompt, and what that has become."""
    import train_sync

    generator, _ = agents([(1, SUB), (0, ANSWER), (1, ANSWER)], n=1, Args=train_sync.Args, length=40)
    generator.start(5)
    groups = generator.generate([0]) + generator.generate([1])
    assert len({repr(runs(group.responses[0])) for group in groups}) == 1 and len(groups) == 2


@pytest.mark.parametrize("flags", [{}, {"keep_sampling_mask": True, "top_k": 2}])
def test_a_further_history_has_what_the_flags_keep_of_each_token(flags):
    """A KV cache of its own (--partial-rollout keep), and what its tokens were sampled from (--keep-sampling-mask)."""
    width, kept = sampling_mask.most_tokens(SimpleNamespace(**{"keep_sampling_mask": False, "top_k": -1} | flags)), []
    record = np.arange(9 * width, dtype=np.int32).reshape(9, width)

    class Keeps(ScriptedEngine):
        def add(self, request):
            kept.append((request.prompt_ids, request.kv_version))
            super().add(request)

        def step(self):
            ended = super().step()
            return [dataclasses.replace(o, support=record[: len(o.token_ids)]) for o in ended] if width else ended

    engine = Keeps(script, 1)
    engine.version = 3
    generator, _ = agents([(1, SUB), (0, ANSWER), (1, ANSWER)], n=1, **flags)
    generator.responses.engine = generator.engine = engine
    generator.start(0)
    (response,) = finish(generator).responses
    assert response.histories == [9, 11] and kept == [([2, 3], None), (SUB, None), ([2, 3], 3), (SUB, 3)]
    if width:
        expected = [record, np.full((2, width), sampling_mask.NOTHING), record]
        assert np.array_equal(response.support, np.concatenate(expected))


def test_random_numbers_are_each_history_s_own():
    """Asked the same twice, as for a vote, the policy may answer otherwise."""
    seeds = []
    engine = ScriptedEngine(lambda request: seeds.append(request.seed) or script(request), 1)
    generator, _ = agents([(1, [2, 3]), (0, ANSWER), (2, [2, 3])], n=2)
    generator.responses.engine.script = engine.script
    generator.start(0)
    finish(generator)
    assert len(set(seeds)) == 6 and len(seeds) == 8


def test_an_agent_that_starts_over_has_the_random_numbers_that_it_had():
    """A tape has ended within a further history, and the agent does not repeat its calls."""
    seeds = []
    generator, played = agents([(1, SUB), (0, ANSWER)], n=1)
    say, again = played.answer, iter([{}, {"asked": "again"}])
    played.answer = lambda *given: say(*given) | next(again, {})
    generator.responses.engine.script = lambda request: seeds.append(request.seed) or script(request)
    generator.start(0)
    (response,) = finish(generator).responses
    assert response.extra["restarts"] == 1 and response.extra["forks"] == 1 and response.score == 1.0
    assert seeds[:2] == seeds[2:4] and len(seeds) == 5


@pytest.mark.parametrize("resumes", [False, True])
def test_a_turn_is_passed_on_as_it_is_sampled(resumes):
    """Once, each token in the step that samples it, also if the response is paused meanwhile; only to agents that want it."""
    passed = []
    generator, played = agents([(1, SUB), (0, ANSWER)], n=1)
    played.pass_on = lambda parts: passed.append(parts["name"])
    say, number = played.answer, iter(range(9))
    played.answer = lambda *given: say(*given) | ({"stream": "name"} if next(number) < 2 else {})
    generator.start(0)
    for _ in range(9):
        generator.score(generator.decode())
        if resumes:
            generator.responses.pause(below=Key(True, 0))
            generator.responses.resume()
    assert passed == [TURN[:1], TURN[1:2]] * 2 and not generator.responses._streams


def test_calls_at_once_are_recorded_alike_in_any_order():
    """Random numbers are those of a history's prompt, and so is its place."""

    def by_seed(request):
        before = request.so_far.token_ids if request.so_far else []
        return [*before, 60 + request.seed % 97, 1], [-1.0] * (len(before) + 2)

    found = []
    for calls in (
        [(1, OTHER), (2, SUB), (3, SUB), (1, ANSWER), (2, [6]), (0, ANSWER)],
        [(1, SUB), (2, SUB), (1, [6]), (3, OTHER), (3, ANSWER), (0, ANSWER)],
    ):
        generator, _ = agents(calls, n=2, length=60)
        generator.responses.engine.script = by_seed
        generator.start(0)
        found.append([runs(response) for response in finish(generator).responses])
    assert found[0] == found[1]
    assert [tokens[: len(p)] for (tokens, _), p in zip(found[0][0][1:], (SUB, SUB, OTHER), strict=True)] == [SUB, SUB, OTHER]


@pytest.mark.parametrize("unlike", [-1, 0])
def test_every_history_is_replayed_with_the_experts_that_sampled_it(models, ranks, unlike):
    """--router-replay R3: the log-probs and routes of each history are those of a pass over it alone, and those of the learner,
    with all in one row. unlike: the response whose first call is not its group's; it ends first."""
    from transformers import AutoModelForCausalLM

    from rl.generation.embedded import TransformersEngine
    from rl.learning.args import LearnerArgs
    from rl.learning.learner import Learner
    from rl.model.router import UNKNOWN

    def engine_of():
        return TransformersEngine(models["moe"], 64, 4, end_tokens={1, 2, 3, 4, 5, 6}, records_routes=True)

    calls = [(1, [20, 9]), (0, [21, 8]), (1, [22, 7, 8]), (2, [23])]
    prompt = lambda key: [7, 7, 2] if key[1] == unlike else [2, 3]  # noqa: E731
    generator, played = agents(calls, engine=engine_of(), prompt=prompt, n=5, length=50)
    played.answer = lambda key, turn, ids: DONE if key[1] == unlike else played._say(key, turn, ids)
    generator.start(0)
    played._pending.reverse()  # the first response's call comes last
    group = Group.from_bytes(finish(generator).to_bytes())
    assert group.prompt_ids.tolist() == [2, 3] and sum(len(r.histories or []) > 2 for r in group.responses) >= 2
    assert (group.responses[0].histories or [1])[0] > 0 or unlike == 0
    ends, whole, plain, of_plain = [], engine_of(), AutoModelForCausalLM.from_pretrained(models["moe"]), []
    for response in group.responses:
        end = 0
        for number, (tokens, mask) in enumerate(runs(response)):
            end += len(tokens)
            if not tokens:
                continue
            ids = ([] if number else [2, 3]) + tokens
            so_far = Output(0, ids[1:], [0.0] * len(ids[1:]), [0] * len(ids[1:]), "unfinished")
            whole.add(Request(0, ids[:1], SamplingParams(max_tokens=len(ids)), 0, so_far=so_far))
            expected = whole.step()[0].routes[: len(ids) - 1]
            own = response.routes[end - len(tokens) : end - 1]
            assert np.array_equal(own if number else np.concatenate([group.prompt_routes, own]), expected)
            log_probs = plain(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
            of_plain += [log_probs[i - 1, ids[i]] for i, own in enumerate(mask, len(ids) - len(tokens)) if own]
        ends += [end - 1 for end in np.cumsum(response.histories or [len(response.token_ids)]).tolist() if end]
    batch = Batch.of([group])
    micro = MicroBatch.of(batch, list(range(5)), torch.device("cpu"))
    free = [len(part) for part in (group.prompt_ids, *(r.token_ids for r in group.responses))]
    assert int((micro.routes[:, 0, 0] == UNKNOWN).sum()) == len(ends) and len(micro.routes) == sum(free)
    learner = Learner(models["moe"], LearnerArgs(lr_warmup_steps=0, router_replay="R3"), ranks, 10)
    found, metrics = learner.forward(micro).log_prob, learner.router_metrics()
    torch.testing.assert_close(found.detach(), torch.stack(of_plain), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.detach(), batch.rollout_log_prob[micro.index], atol=1e-4, rtol=0)
    assert batch.mask[micro.index].all() and len(found) == int(batch.mask.sum()) > 40
    assert metrics["moe/replay/tokens_differ"] < 0.01
