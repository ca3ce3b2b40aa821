"""--prompt-sampling: the chances are GRESO's, a decision is the same wherever it is made, and every ticket has one fate."""

import json
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

import train_sync
from rl.data.prompts import PromptOrder
from rl.errors import UserError
from rl.ranges import check
from rl.samples.buffer import SampleBuffer
from rl.samples.control import ControlBlock
from rl.samples.group import UNPENALISED, Group, Response
from rl.samples.prompt_history import PromptHistory, StreamHistory, shown
from rl.samples.schedule import AsyncSchedule
from rl.samples.tickets import Tickets, drawn, open_tickets, started

pytestmark = pytest.mark.usefixtures("requests_at_once")


def group(ticket: int, *scores: float | None, **more) -> Group:
    ids, zeros = np.zeros(2, np.int32), np.zeros(2, np.float32)
    return Group(ticket, ids, "demo", [Response(ids, zeros, ids, "stop", score, **more) for score in scores])


def history(sampling: str = "greso", prompts: int = 10, seed: int = 0) -> PromptHistory:
    args = SimpleNamespace(prompt_sampling=sampling, seed=seed, compared_rewards=())
    return PromptHistory(args, PromptOrder(prompts, seed))


def share_taken(of: PromptHistory, prompt: int, tickets: int = 20_000) -> float:
    own = [ticket for ticket in range(tickets) if of.order(ticket)[1] == prompt]
    return sum(not of.passes_over(ticket) for ticket in own) / len(own)


def test_what_a_group_shows():
    groups = [group(3, 1, 1), group(1, 0, 0), group(2, 0, 1), group(4, None, 1), group(5, -1, -1), group(6, None, 1, 1)]
    assert shown(groups) == [(3, "easy"), (1, "hard"), (2, "mixed"), (5, "hard"), (6, "easy")]
    penalised = [
        Response(r.token_ids, r.log_probs, r.versions, "stop", score, {UNPENALISED: 1.0})
        for r, score in zip(group(0, 1, 1).responses, (1, 0.5), strict=True)
    ]
    assert shown([Group(7, np.zeros(2, np.int32), "demo", penalised)]) == [(7, "easy")], "the penalty on length aside"


def test_the_form_of_an_answer_is_not_its_being_right():
    """A reward function may give wrong answers in the right form a score, and say what is right as acc."""
    by_form = group(0, 0.1, 0.1, extra={"acc": 0.0})
    assert shown([by_form, group(2, 1, 1)]) == [(0, "hard"), (2, "easy")]
    of = history("skip-solved")
    of.note([by_form])
    of.commit()
    assert of.state()["flat"] == {str(of.order(0)[1]): ["hard", 1]}
    args, buffer = AsyncSchedule(), SampleBuffer(AsyncSchedule(), False, 1)
    stream = StreamHistory(args, history("skip-solved"), buffer, 8)
    buffer.observe(by_form)
    stream.published(0)
    assert list(stream.history.flat.values()) == [["hard", 1]]


def test_a_prompt_is_taken_with_a_chance_that_falls_with_each_flat_group():
    """Chance p to the power of the flat groups in a row of one kind, which a group with a signal or of the other kind ends."""
    of, ticket = history(prompts=4), {}
    for number in range(4):
        ticket[of.order(number)[1]] = number
    rows = {0: ["easy"], 1: ["hard", "hard"], 2: ["easy", "easy", "mixed"], 3: ["easy", "hard"]}
    for prompt, kinds in rows.items():
        for kind in kinds:
            of.observe([(ticket[prompt], kind)])
    of.chance = {"easy": 0.5, "hard": 0.6}
    expected = {0: 0.5, 1: 0.36, 2: 1.0, 3: 0.6}
    for prompt, chance in expected.items():
        assert share_taken(of, prompt) == pytest.approx(chance, abs=0.03), prompt
    solved = history("skip-solved", prompts=4)
    solved.restore(of.state())
    assert [share_taken(solved, prompt) for prompt in (1, 2, 3)] == [1, 1, 1], "only what was right is passed over"
    assert share_taken(solved, 0) == pytest.approx(0.05, abs=0.01)


def test_the_chances_move_towards_the_shares_that_are_aimed_at():
    """A twelfth of the groups may be all right, a sixth all wrong; at the share or above the chance falls by 0.01."""
    of = history(prompts=100)
    of.observe([(ticket, "mixed") for ticket in range(12)])
    assert of.chance == {"easy": 0.51, "hard": 0.51}
    of.observe([(0, "easy"), (1, "hard"), *((ticket, "mixed") for ticket in range(2, 12))])
    assert of.chance == {"easy": 0.5, "hard": 0.52}
    of.observe([(0, "hard"), (1, "hard"), *((ticket, "mixed") for ticket in range(2, 12))])
    assert of.chance == {"easy": 0.51, "hard": 0.51}
    of.observe([])
    assert of.chance == {"easy": 0.51, "hard": 0.51}, "a step that shows nothing moves nothing"
    for _ in range(60):
        of.observe([(ticket, "easy") for ticket in range(12)])
    assert of.chance == {"easy": 0.05, "hard": 0.95}


def test_a_data_set_that_is_solved_still_gives_batches():
    for sampling in ("skip-solved", "greso"):
        of = history(sampling, prompts=8)
        for _ in range(100):
            of.observe([(ticket, "easy") for ticket in range(8)])
        tickets, behind = of.take(0, 16)
        assert len(tickets) == 16 and behind == tickets[-1] + 1 and of.take_skipped() == sorted({*range(behind)} - {*tickets})


def test_a_copy_that_observes_the_same_decides_the_same():
    rng, first, second = random.Random(0), history(prompts=20), history(prompts=20)
    for step in range(30):
        groups = [(ticket, rng.choice(["easy", "hard", "mixed"])) for ticket in range(8 * step, 8 * step + 8)]
        first.observe(groups)
        sent = json.loads(json.dumps(groups))
        assert second.after([sent]) == first.state() != second.state()
        second.observe(sent)
    third = history(prompts=20)
    third.restore(json.loads(json.dumps(first.state())))
    passed = [[of.passes_over(ticket) for ticket in range(500)] for of in (first, second, third)]
    assert passed[0] == passed[1] == passed[2] and 0 < sum(passed[0]) < 500


class Simulated:
    """Learners and generators of a stream from its first step, or from what another one has saved."""

    def __init__(self, args: AsyncSchedule, prompts: PromptHistory, total: int, generators: int, filters: bool, saved=None):
        self.args, self.total = args, total
        self.buffer, self.store = SampleBuffer(args, filters, max_num_gen_batches=10), HashStore()
        self.stream = StreamHistory(args, prompts, self.buffer, total)
        self.step, self.drawn, again, skipped = 0, 0, [], 0
        if saved:
            buffer, stream, self.drawn, self.step = json.loads(saved)
            again = self.buffer.restore(buffer, [], self.drawn)
            self.stream.restore(stream)
            skipped = self.buffer.skipped_below(self.drawn)
        open_tickets(self.store, self.drawn, again, skipped=skipped)
        self.tickets = [Tickets(self.store, args, total, generators) for _ in range(generators)]
        self.running = [[] for _ in range(generators)]
        self.control = ControlBlock(SimpleNamespace(store=self.store, role="learner", ranks=SimpleNamespace(is_main=True)))
        self.publish(args.version_at(self.step + 1))

    def publish(self, version: int) -> None:
        self.version = version
        self.buffer.published(version)
        self.stream.published(version)
        self.announce()

    def announce(self) -> None:
        room = {"dropped": self.buffer.replaced, "skipped": self.stream.skipped, "settled": self.buffer.low}
        self.control.update(version=self.version, **json.loads(json.dumps(room)))

    def turn(self, rng: random.Random, made) -> list[int]:
        """A generator takes tickets and finishes some, the learners train a step if they can. Returns its tickets."""
        place = rng.randrange(len(self.tickets))
        running, state = self.running[place], self.control.state
        running += self.tickets[place].take(3, len(running), self.version, state)
        assert started(self.store) - self.buffer.dropped.total() <= min(self.args.quota(self.version), self.total)
        for ticket in [ticket for ticket in running if rng.random() < 0.4]:
            running.remove(ticket)
            self.buffer.add(made(ticket))
        groups = self.buffer.take(self.step + 1)
        self.stream.extend()
        self.announce()
        if groups:
            self.step += 1
            if self.args.publishes_after(self.step, self.total // self.args.prompts_per_step):
                self.publish(self.version + 1)
        return [of.ticket for of in groups or ()]

    def save(self) -> str:
        """What a checkpoint holds; groups that wait are lost."""
        self.buffer.account([ticket for of in self.running for ticket in of], started(self.store))
        return json.dumps([self.buffer.state(), self.stream.state(), drawn(self.store), self.step])


@settings(max_examples=100, deadline=None)
@given(
    threshold=st.sampled_from([0, 0.5, 1, 2]),
    period=st.integers(1, 2),
    generators=st.integers(1, 3),
    filters=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_stream_starts_what_its_history_does_not_skip(threshold, period, generators, filters, seed):
    """Stopped at any step and resumed: each ticket has one fate, the bound of staleness counts those that start, and at
    threshold 0 they are those that whole batches take."""
    rng, prompts, required, steps = random.Random(seed), 12, 4, 16
    order, level = PromptOrder(prompts, seed), [rng.choice([(1, 1), (0, 0), (0, 1)]) for _ in range(prompts)]
    level[0] = (0, 1)  # with filters a batch needs a prompt that teaches
    made = lambda ticket: group(ticket, *level[order(ticket)[1]])  # noqa: E731
    args = AsyncSchedule(ppo_mini_batch_size=required, publish_every=period, staleness_threshold=threshold)
    saved, trained = None, []
    for until in (rng.randint(1, steps), steps):
        stream = Simulated(args, history(prompts=prompts, seed=seed), steps * required, generators, filters, saved)
        turns = 0
        while stream.step < until:
            trained += stream.turn(rng, made)
            turns += 1
            assert turns < 3000, "the stream stands still"
        saved = stream.save()
    assert len({*trained}) == len(trained) == stream.buffer.trained == steps * required
    assert not {*stream.stream.skipped} & {*trained}
    if threshold == 0 and period == 1:
        assert trained == whole_batches(order, made, filters, seed, required, steps)


def whole_batches(order, made, filters: bool, seed: int, required: int, steps: int) -> list[int]:
    """The tickets of as many batches that are made whole, as train_sync.make_batch makes them."""
    of, ticket, trained = history(seed=seed), 0, []
    of.order = order
    for _ in range(steps):
        kept, dropped = [], []
        while len(kept) < required and len(dropped) < 9 * required:
            tickets, ticket = of.take(ticket, required - len(kept))
            for each in map(made, tickets):
                (dropped if filters and not each.differs() else kept).append(each)
        trained += sorted(each.ticket for each in kept)
        of.note(kept + dropped)
        of.commit()
    return trained


def test_flags_that_it_cannot_work_with():
    with pytest.raises(UserError, match="with --rollout-n 1 there are none"):
        check(train_sync.Args(prompt_sampling="greso", rollout_n=1, adv_estimator="reinforce_pp"))
    with pytest.raises(UserError, match="with --teacher-alone scores do not count"):
        check(train_sync.Args(prompt_sampling="greso", teacher="x", teacher_alone=True))
    check(train_sync.Args(prompt_sampling="greso"))


FLAGS = ["--prompt-sampling", "greso", "--filter-groups", "--train-max-samples", "24", "--lr", "3e-4", "--lr-warmup-steps", "0"]
FLAGS += ["--total-training-steps", "16", "--test-freq", "0", "--save-freq", "8", "--max-ckpt-to-keep", "2"]
FLAGS += ["--use-rollout-log-probs", "False"]


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    return train("train_sync.py", *FLAGS, out=tmp_path_factory.mktemp("sync"), ranks=1)


def tickets_of(run) -> list[dict]:
    return [json.loads(line) for line in (run / "tickets.jsonl").read_text().splitlines()]


def weights_of(run) -> bytes:
    return (run / "step_000016" / "model.safetensors").read_bytes()


def test_whole_batches_pass_over_what_was_flat_and_say_so(sync):
    metrics, run, _ = sync
    rows, of = tickets_of(run), history(prompts=24)
    settled = sorted(ticket for row in rows for name in ("trained", "filtered", "skipped") for ticket in row[name])
    assert settled == [*range(len(settled))], "each ticket has one fate"
    assert all(len(row["trained"]) == 8 for row in rows) and sum(len(row["skipped"]) for row in rows) > 10
    for row in rows:  # a prompt that is skipped was flat when it was last trained or filtered
        assert {of.order(ticket)[1] for ticket in row["skipped"]} <= {*of.flat}, row["step"]
        known = [(ticket, "mixed") for ticket in row["trained"]] + [(ticket, "easy") for ticket in row["filtered"]]
        of.observe(known)  # of which kind does not matter here
        assert metrics[row["step"]]["prompts/skipped"] == len(row["skipped"])
        assert metrics[row["step"]]["data/demo/skipped"] == 8 * len(row["skipped"])
        assert metrics[row["step"]]["data/demo/filtered"] == 8 * len(row["filtered"])
        if not metrics[row["step"]]["train/filled_groups"]:
            assert metrics[row["step"]]["prompts/easy"] + metrics[row["step"]]["prompts/hard"] == len(of.flat)


@pytest.mark.slow
def test_a_stream_that_is_on_policy_trains_what_sync_trains_after_a_resume_too(sync, tmp_path):
    _, run, done = train("train_async.py", *FLAGS, "--staleness-threshold", "0", out=tmp_path, ranks=2)
    assert weights_of(run) == weights_of(sync[1])
    skipped = sorted(ticket for row in tickets_of(run) for ticket in row["skipped"])
    assert skipped == sorted(ticket for row in tickets_of(sync[1]) for ticket in row["skipped"])
    assert f"dropped + 0 in flight; {len(skipped)} more were skipped" in done.stdout
    shutil.rmtree(run / "step_000016")
    name = ["--experiment-name", run.name]
    _, run, done = train("train_async.py", *FLAGS, "--staleness-threshold", "0", *name, out=tmp_path, ranks=2)
    assert weights_of(run) == weights_of(sync[1]) and "more were skipped" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_sync.py", "train_one_step_off.py"])
def test_a_resumed_run_passes_over_the_same(script, sync, tmp_path):
    if script == "train_sync.py":
        run = shutil.copytree(sync[1], tmp_path / sync[1].name)
    else:
        run = train(script, *FLAGS, out=tmp_path, ranks=2)[1]
    whole, rows = weights_of(run), tickets_of(run)
    assert sum(len(row["skipped"]) for row in rows) > 10
    shutil.rmtree(run / "step_000016")
    ranks = 1 if script == "train_sync.py" else 2
    train(script, *FLAGS, "--experiment-name", run.name, out=tmp_path, ranks=ranks)
    assert weights_of(run) == whole and tickets_of(run) == rows
