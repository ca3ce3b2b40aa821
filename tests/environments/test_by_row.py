"""Several environments in one run: a row's column chooses its own, with its tools, its rewards and its metrics."""

import json
import shutil
from pathlib import Path

import pytest
from families import end_tokens, tokenizer_of
from helpers import ROOT, bits, run_script, undocumented
from test_data import write
from test_pool import answers, ids_of

import train_sync
from rl import parts
from rl.algorithm.metrics import validation_metrics
from rl.data.args import DataArgs
from rl.data.prompts import PromptDataset
from rl.environments import named
from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.errors import UserError
from rl.ranges import check

TOOLS = ROOT / "examples" / "tools.py"
ONES = '''
class Ones:
    """Scores itself, by the ones in the answer."""

    def step(self, message):
        return [], message["content"].count("1") / 8, True


class Game:
    """As TRL's: its methods are tools, and it scores an episode that was cut."""

    def reset(self, **row):
        return " Play!"

    def guess(self, word: str) -> str:
        """Guesses.

        Args:
            word: A word.
        """
        return "no"

    def get_reward(self):
        return 0.5
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environments")
    (path / "ones.py").write_text(ONES)
    return path


def flags_of(folder: Path) -> EnvironmentArgs:
    env = (f"ones={folder}/ones.py:Ones", f"game={folder}/ones.py:Game")
    return EnvironmentArgs(env=env, tools=f"calculator={TOOLS}:calculate")


def test_a_row_is_played_in_its_own_environment(folder, model):
    """All are forks of one process, which has imported both files, one of them once for its two classes."""
    pool = Environments(flags_of(folder), model, end_tokens("qwen2_5"))
    names = {name: [schema["function"]["name"] for schema in tools.schemas] for name, tools in pool.tools.items()}
    assert names == {"ones": [], "game": ["guess"], "calculator": ["calculate"]}
    assert pool.scores_at_end == {"ones": False, "game": True, "calculator": False}
    for name in names:
        row = {"environment": name, "prompt": [{"role": "user", "content": "?"}]}
        pool.begin(name, row, seed=1, own_seed=1)
    begun = answers(pool, names)
    assert {name: "prompt" in answer for name, answer in begun.items()} == {"ones": False, "game": True, "calculator": False}
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "12*11"}}</tool_call><|im_end|>'
    for name, said in {"ones": "11<|im_end|>", "game": call, "calculator": call}.items():
        pool.ask(name, "step", ids=ids_of(said))
    found = answers(pool, names)
    texts = {name: tokenizer_of("qwen2_5").decode(answer["ids"]) for name, answer in found.items()}
    assert found["ones"]["reward"] == 0.25 and found["ones"]["done"]
    assert "132" in texts["calculator"] and "there is no tool 'calculate': guess" in texts["game"]
    pool.close()


def test_a_prompt_shows_the_tools_of_its_row_and_lacks_what_its_environment_brings(folder, model, tmp_path):
    args = flags_of(folder)
    pool = Environments(args, model, end_tokens("qwen2_5"))
    pool.close()
    by_row = {name: (tools, named.brought(args, None, name)) for name, tools in pool.tools.items()}
    assert {name: sorted(brought) for name, (_, brought) in by_row.items()} == {
        "ones": ["ground_truth", "prompt"],
        "game": ["ground_truth", "prompt"],
        "calculator": [],
    }
    assert named.brought(args, "--reward x.py:f", "calculator") == {"ground_truth"}

    def dataset(*rows) -> PromptDataset:
        file = write(tmp_path / "rows.jsonl", *rows)
        return PromptDataset([str(file)], "train", tokenizer_of("qwen2_5"), long, None, by_row)

    long = DataArgs(max_prompt_length=9999)
    asked = {"prompt": [{"role": "user", "content": "What?"}], "ground_truth": "7", "data_source": "demo"}
    sums = asked | {"environment": "calculator"}
    found = dataset(sums, asked | {"environment": "game"}, {"environment": "ones", "level": 3})
    assert ["calculate" in prompt.text for prompt in found] == [True, False, False]
    assert ['"guess"' in prompt.text for prompt in found] == [False, True, False]
    assert found[2].ids == [] and found[2].ground_truth is None and found[0].row["environment"] == "calculator"
    file = str(tmp_path / "rows.jsonl")
    assert found.sources() == {"demo": f"{file} row 0", "environment": f"{file} row 2"}
    assert found.source_sizes() == {"demo": 2, "environment": 1}
    assert [found.source(i) for i in (0, 2)] == ["demo", "environment"]

    names = "one of those of --env and --tools: ones, game, calculator"
    for row, said in (
        (sums | {"environment": "chess"}, f"rows.jsonl row 1: the column 'environment' is 'chess'.*{names}"),
        (sums | {"environment": None}, f"rows.jsonl row 1: the column 'environment' is None.*{names}"),
        (sums | {"ground_truth": None}, "rows.jsonl row 1: no ground truth"),
        (sums | {"prompt": None}, "rows.jsonl row 1: column 'prompt' is neither"),
    ):
        with pytest.raises(UserError, match=said):
            dataset(sums, row)
    with pytest.raises(UserError, match=f"rows.jsonl row 0: the column 'environment' is missing.*{names}"):
        dataset(asked)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"env": ("a=FILE:Ones", "FILE:Game")}, "--env: a response has one environment.*Or name each"),
        ({"env": ("FILE:Ones", "FILE:Game")}, "--env: a response has one environment.*Or name each"),
        ({"env": "FILE:Ones", "tools": "a=FILE:f"}, "--env and --tools: a response has one environment"),
        ({"env": "a=FILE:Ones", "agent": "python x.py"}, "--env and --agent: a response has one environment"),
        ({"env": "a=FILE:Ones", "tools": "a=FILE:f"}, "'a' is the name of two environments"),
        ({"env": ("a=FILE:Ones", "b=no.py:X")}, "--env no.py:X: there is no file no.py"),
        ({"env": "a=FILE:Ones", "tools": "b=FILE"}, "--tools .*: write it as path/to/file.py:names"),
        ({"env": "a=FILE:Ones", "tools": "b=FILE:f", "reward": "REWARD:g"}, "a function of environments needs --env"),
    ],
)
def test_flags_that_name_no_environments(flags, said, folder, tmp_path):
    (tmp_path / "reward.py").write_text("def g(environments): ...\n")
    places = {"FILE": str(folder / "ones.py"), "REWARD": str(tmp_path / "reward.py")}

    def placed(value):
        for name, place in places.items():
            value = value.replace(name, place) if isinstance(value, str) else tuple(map(placed, value))
        return value

    with pytest.raises(UserError, match=said):
        check(parts.make(train_sync.Args, **{name: placed(value) for name, value in flags.items()}))


def test_an_import_that_fails_names_the_flags(folder, model):
    args = EnvironmentArgs(env=f"a={folder}/ones.py:Ones", tools=f"b={TOOLS}:nothing")
    with pytest.raises(UserError, match=r"--env a=.*Ones --tools b=.*: .*tools.py has no 'nothing'"):
        Environments(args, model, end_tokens("qwen2_5"))


def test_validations_by_environment():
    usual = {"data_source": "demo", "error": None, "extra": {}}
    rows = [usual | {"index": i // 2, "environment": "ab"[i // 4], "acc": acc} for i, acc in enumerate((1, 0, 1, 1, 0, 0))]
    found = validation_metrics(rows)
    assert found["val-aux/env/a/acc/mean@2"] == 0.75 and found["val-aux/env/b/acc/mean@2"] == 0.0
    assert found["val-core/demo/acc/mean@2"] == 0.5
    plain = validation_metrics([row | {"environment": ""} for row in rows])
    assert plain == {name: value for name, value in found.items() if "/env/" not in name}


# ----------------------------------------------------------------------------------------------------------- whole runs

STEPS, SAVED = 4, 2


def problems(path: Path, split: str, count: int) -> Path:
    """The demo's products, which the calculator's verifier scores, and every second one for its ones."""
    from examples.demo.calculator import problems

    names = ("calculator", "ones")
    return write(path, *(row | {"environment": names[i % 2]} for i, row in enumerate(problems(split)[:count])))


@pytest.mark.runs
@pytest.mark.timeout(900)
def test_two_environments_in_one_run(folder, tmp_path):
    """Sync and async train the same bits, a replay too; each environment's scores are its own. test_round_trips.py resumes an
    environment's run."""
    flags = ["--model", "demo-calculator", "--env", f"ones={folder}/ones.py:Ones"]
    flags += ["--tools", f"calculator={TOOLS}:calculate", "--max-response-length", 24, "--rollout-n", 4]
    flags += ["--train-files", problems(tmp_path / "train.jsonl", "train", 40)]
    flags += ["--val-files", problems(tmp_path / "val.jsonl", "val", 8), "--train-batch-size", 4, "--lr", 1e-3]
    flags += ["--lr-warmup-steps", 0, "--test-freq", STEPS, "--no-val-before-train", "--total-training-steps", STEPS]
    flags += ["--save-freq", SAVED, "--max-ckpt-to-keep", 0, "--output-dir", tmp_path, "--experiment-name"]
    run_script("train_sync.py", *flags, "sync")
    sync = bits(tmp_path / "sync", STEPS)
    assert sync != bits(tmp_path / "sync", SAVED)
    rows = {row["step"]: row for row in map(json.loads, (tmp_path / "sync" / "metrics.jsonl").read_text().splitlines())}
    assert not undocumented(rows)
    turns = {
        name: {row.get(f"reward/extra/env/{name}/turns/mean", 1) for row in rows.values()} for name in ("ones", "calculator")
    }
    assert turns["ones"] == {1} and max(turns["calculator"]) > 1

    lines = map(json.loads, (tmp_path / "sync" / "val_generations" / f"step_{STEPS:06d}.jsonl").read_text().splitlines())
    scores = {"calculator": [], "ones": []}
    for number, line in enumerate(lines):
        last = line["response"].rpartition("<|assistant|>")[2].partition("<|end|>")[0]
        right = last.count("1") / 8 if number % 2 else float(last == line["ground_truth"])
        assert line["score"] == right
        scores[("calculator", "ones")[number % 2]].append(right)
    assert sum(scores["ones"]) > 0
    for name, its in scores.items():
        assert rows[STEPS][f"val-aux/env/{name}/acc/mean@1"] == pytest.approx(sum(its) / len(its))

    for line in map(json.loads, (tmp_path / "sync" / "groups.jsonl").read_text().splitlines()):
        for number, name in enumerate(scores):
            of_step = [score for group in line["groups"] if group["index"] % 2 == number for score in group["scores"]]
            if of_step:
                found = rows[line["step"]][f"reward/extra/env/{name}/score/mean"]
                assert found == pytest.approx(sum(of_step) / len(of_step))

    run_script("train_async.py", *flags, "async", "--staleness-threshold", 0, ranks=2)
    assert bits(tmp_path / "async", STEPS) == sync
    again = run_script("replay.py", tmp_path / "sync", "--output-dir", tmp_path, "--experiment-name", "again")
    assert "the weights are bit for bit those of" in again.stdout

    shutil.rmtree(tmp_path / "sync" / f"step_{STEPS:06d}")
    (folder / "ones.py").write_text(ONES + "\n")
    refused = run_script("train_sync.py", *flags, "sync", check=False)
    assert refused.returncode == 1 and "the content of --env" in refused.stderr
