"""Answers from the tape: real processes of environments, whose answers are random, and which count their calls."""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import end_tokens, tokenizer_of
from helpers import eventually
from processes import descendants
from test_pool import answers

from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.errors import UserError
from rl.generation.generator import Key
from rl.rewards.pool import RewardArgs, ScoringPool
from user_processes.tape import Tape

CODE = '''
import os
import random
from pathlib import Path

CALLS = Path(__file__).with_name("calls")
assert not CALLS.with_name("gone").exists()


def drawn():
    with open(CALLS, "a") as calls:
        calls.write("x")
    return os.urandom(4).hex()


class Random:
    def reset(self, row, seed):
        self.said = [drawn()]

    def step(self, message):
        self.said.append(drawn())
        done = message["content"] == "end"
        return [{"role": "user", "content": " ".join(self.said)}], float(int(self.said[-1], 16)), done


class Stated(Random):
    def get_state(self):
        return self.said

    def set_state(self, state):
        self.said = state


class Seeded:
    """Draws from `random`, which is seeded for each turn."""

    def step(self, message):
        return [{"role": "user", "content": str(random.random())}], None, False

    def get_state(self):
        return None

    def set_state(self, state):
        random.seed(state)


class Fixed:
    def reset(self, row, seed):
        self.turns = 0

    def step(self, message):
        drawn()
        self.turns += 1
        return [{"role": "user", "content": str(self.turns)}], None, False


class NoJson(Random):
    def get_state(self):
        return {1, 2}

    set_state = get_state


class Ends(Random):
    def step(self, message):
        if CALLS.with_name("fails").exists():
            os._exit(1)
        return super().step(message)


def tool(a: int) -> str:
    """Draws.

    Args:
        a: A number.
    """
    return drawn()


def keeper(a: int) -> str:
    return drawn()


keeper.__doc__, keeper.keeps_state = tool.__doc__, True
'''
ID = Key(False, 3), 0
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": 1}}}}\n</tool_call><|im_end|>'


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "calls").touch()
    return tmp_path


@pytest.fixture
def start(model, folder):
    """A function that starts a rank's environments: of a class or functions, with a tape."""
    pools = []

    def started(name: str, **flags) -> Environments:
        kind = "env" if name[0].isupper() else "tools"
        flags = {kind: f"{folder}/code.py:{name}", "record_env": str(folder / "tape"), "env_timeout": 20.0} | flags
        pools.append(Environments(EnvironmentArgs(**flags), model, end_tokens("qwen2_5")))
        tape = Tape(flags["record_env"], flags.get("from_tape"))
        tape.serve(ScoringPool(RewardArgs()), pools[-1], started.engine)
        return pools[-1]

    started.engine = SimpleNamespace(version=0)
    yield started
    for pool in pools:
        pool.close()


def ids_of(text: str) -> list[int]:
    return tokenizer_of("qwen2_5")(text + "<|im_end|>" * (not text.endswith(">")), add_special_tokens=False)["input_ids"]


def answer(pool: Environments, id=ID) -> dict:
    return {name: value for name, value in answers(pool, [id])[id].items() if name != "seconds"}


def begin(pool: Environments, id=ID, says: str = "go") -> dict:
    pool.begin(id, row={"prompt": [{"role": "user", "content": says}]}, seed=7, own_seed=8, split="train")
    return answer(pool, id)


def play(pool: Environments, *turns: str, id=ID) -> list[dict]:
    """The answers to these turns of the model in a new episode."""
    pool.end(id)
    answers = [begin(pool, id)]
    for turn in turns:
        pool.ask(id, "step", ids=ids_of(turn))
        answers.append(answer(pool, id))
    return answers


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text())


def processes(pool: Environments) -> int:
    return len(descendants(pool._server.pid))


@pytest.mark.parametrize(("name", "turn"), [("Stated", "hello"), ("tool", CALL.format("tool"))])
def test_an_episode_continues_from_the_tape_and_calls_nothing_twice(name, turn, start, folder):
    """A function keeps nothing; a class is given its state: what it says next contains all that it said before."""
    pool = start(name)
    first = play(pool, turn, turn)
    before = calls(folder)
    assert play(pool, turn, turn) == first
    assert calls(folder) == before and eventually(lambda: not processes(pool))
    pool.ask(ID, "step", ids=ids_of("end"))
    last = answer(pool)
    assert calls(folder) == before + (name == "Stated") and processes(pool) == 1
    assert last["done"] and "event" not in last
    if name == "Stated":
        assert last["state"][:3] == first[2]["state"]


def test_the_tape_only_answers_the_same_words_row_and_file(start, folder):
    pool = start("Stated")
    first = play(pool, "hello", "hello")
    assert play(pool, "hello") == first[:2]
    pool.ask(ID, "step", ids=ids_of("go off"))
    other = answer(pool)
    assert other["ids"] != first[2]["ids"]
    pool.end(ID)
    before = calls(folder)
    begin(pool, says="go away")
    begin(pool, (ID[0], 1))
    begin(pool, (Key(False, 4), 0))
    assert calls(folder) == before + 3
    (folder / "code.py").write_text(CODE + "\n")
    begin(start("Stated"))
    assert calls(folder) == before + 4


@pytest.mark.parametrize("name", ["Fixed", "keeper", "Random"])
def test_what_has_no_state_to_give_plays_its_turns_again(name, start, folder):
    """If it answers otherwise, its response starts again, and what is recorded then is what counts."""
    turn = CALL.format(name) if name == "keeper" else "hello"
    pool = start(name)
    first = play(pool, turn)
    assert play(pool, turn) == first and eventually(lambda: not processes(pool))
    before = calls(folder)
    pool.ask(ID, "step", ids=ids_of("go off"))
    said = answer(pool)
    if name == "Fixed":
        assert calls(folder) == before + 2
        assert tokenizer_of("qwen2_5").decode(said["ids"]).startswith("\n<|im_start|>user\n2<|im_end|>")
        return
    assert said["asked"] == "again" and calls(folder) > before
    fresh = play(pool, turn, turn)
    assert fresh[1]["ids"] != first[1]["ids"]
    before = calls(folder)
    assert play(pool, turn, turn) == fresh and calls(folder) == before


def test_torn_lines_are_left_out(start, folder):
    """Wherever the last line is torn, its question is asked again, and the file stays good."""
    file = folder / "tape" / "train" / "00000003.jsonl"
    pool = start("Stated")
    first = play(pool, "hello", "hello")
    whole = file.read_bytes()
    last = whole.rindex(b"\n") + 1
    for end in (last - 1, last, last + 1, random.Random(0).randrange(last, len(whole)), len(whole) - 1):
        file.write_bytes(whole[:end])
        before = calls(folder)
        again = play(pool, "hello", "hello")
        assert again[:2] == first[:2] and again[2]["ids"] != first[2]["ids"] and calls(folder) == before + 1
        assert again[2]["state"][:2] == first[1]["state"]
        assert play(pool, "hello", "hello") == again
    file.write_bytes(whole)
    assert play(pool, "hello", "hello") == first


def test_a_tape_alone_calls_nothing_and_says_what_it_lacks(start, folder):
    """The environment cannot even be imported any more; a failure is answered, too."""
    pool = start("Ends")
    first = play(pool, "hello")
    (folder / "fails").touch()
    other = ID[0], 1
    failed = play(pool, "hello", id=other)
    assert failed[1]["event"] == "died"
    pool.close()
    (folder / "gone").touch()
    alone = {"record_env": None, "from_tape": str(folder / "tape")}
    before = calls(folder)
    tape = start("Ends", **alone)
    assert play(tape, "hello") == first and play(tape, "hello", id=other) == failed and not processes(tape)
    with pytest.raises(UserError, match=r"00000003\.jsonl, response 0: the answer to turn 2 of the model is not on the tape"):
        tape.ask(ID, "step", ids=ids_of("hello"))
        answer(tape)
    with pytest.raises(UserError, match=r"00000009\.jsonl, response 0: the start of the episode is not on the tape"):
        begin(tape, (Key(False, 9), 0))
    assert calls(folder) == before
    with pytest.raises(UserError, match="was recorded with other environments, tools or files"):
        start("Random", **alone)
    (folder / "fails").unlink()
    (folder / "gone").unlink()
    pool = start("Ends")
    assert "event" not in play(pool, "hello", id=other)[1], "a failure is asked again"


def test_a_turn_after_the_tape_draws_what_it_would_have_drawn(start, folder):
    """`random` is seeded for each turn."""
    file = folder / "tape" / "train" / "00000003.jsonl"
    pool = start("Seeded")
    first = play(pool, "hello", "hello", "hello")
    assert len({str(said["ids"]) for said in first[1:]}) == 3
    file.write_bytes(file.read_bytes().rpartition(b"\n")[0])
    assert play(pool, "hello", "hello", "hello") == first and processes(pool) == 1


def test_validations_of_other_weights_are_asked_again(start, folder):
    pool = start("Stated")
    id = Key(True, 3), 0
    first = play(pool, "hello", id=id)
    assert play(pool, "hello", id=id) == first
    start.engine.version = 1
    assert play(pool, "hello", id=id)[1] != first[1]
    assert {file.parent.name for file in folder.glob("tape/*/*.jsonl")} == {"val_000000", "val_000001"}


def test_a_state_that_json_cannot_hold_is_an_event_that_says_so(start):
    assert "Object of type set is not JSON serializable" in begin(start("NoJson"))["message"]


def test_a_disk_that_is_full_is_an_event_that_says_so(start, folder):
    pool = start("Stated")
    begin(pool)
    (folder / "tape" / "train" / "00000003.jsonl").unlink()
    os.symlink("/dev/full", folder / "tape" / "train" / "00000003.jsonl")
    pool.ask(ID, "step", ids=ids_of("hello"))
    assert "No space left on device" in answer(pool)["message"]
