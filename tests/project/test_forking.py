"""The diffs of docs/forking.md and examples/forks: each applies to a copy of the repository, and the result trains."""

import ast
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, run_script

TITLES = ["A loss with a knob of its own", "An advantage", "A reward", "A script of your own"]
KEYS = ["actor/pg_clipfrac_lower", "critic/advantages/mean", "critic/score/mean", "actor/imitation"]


def section(title: str) -> list[tuple[str, str]]:
    """Return the section's fenced blocks in order: (language, text)."""
    page = (ROOT / "docs" / "forking.md").read_text()
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)


def copy(tree: Path) -> None:
    """Copy what trains."""
    tree.mkdir()
    folders = [path for path in ROOT.iterdir() if path.is_dir() and list(path.glob("*.py"))]
    for path in (*ROOT.glob("*.py"), *folders):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tree / path.name)


def prepare(title: str, tree: Path) -> list[str]:
    """Make the tree, run the section's commands, and return the last one, which trains."""
    copy(tree)
    *first, (language, last) = section(title)
    assert language == "sh"
    for language, text in first:
        command = ["git", "apply", "--recount", "-"] if language == "diff" else text.split()
        done = subprocess.run(command, cwd=tree, input=text, text=True, capture_output=True)
        assert done.returncode == 0, f"{title}: {done.stderr}"
    return last.split()


def test_each_section_is_tested():
    page = (ROOT / "docs" / "forking.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.M) == TITLES


@pytest.mark.parametrize("title", TITLES)
def test_the_diff_applies_and_compiles(title, tmp_path):
    python, script, *_ = prepare(title, tmp_path / "tree")
    assert python == "python"
    for file in (tmp_path / "tree").glob("*.py"):
        compile(file.read_text(), file, "exec")
    assert (tmp_path / "tree" / script).exists()


@pytest.mark.runs
@pytest.mark.parametrize(("title", "key"), zip(TITLES, KEYS, strict=True))
def test_what_it_makes_trains(title, key, demo_model, tmp_path):
    tree = tmp_path / "tree"
    _, script, *flags = prepare(title, tree)
    flags = [tree / flag if flag.startswith("my_reward.py") else flag for flag in flags]
    more = ["--total-training-steps", 3, "--test-freq", 0, "--output-dir", tmp_path / "runs"]
    run_script(tree / script, *flags, *more, imported="packages", env={"PYTHONPATH": str(tree)})
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith(f"{Path(script).stem}-")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-3:] == [1, 2, 3] and key in lines[-1]


# ------------------------------------------------------------------------------------------------------------ examples/forks

FORKS = {path.stem: path for path in sorted((ROOT / "examples" / "forks").glob("*.diff"))}
STATE = {"adaptive_kl", "entropy_target", "greso", "imitation"}  # those that keep something between two steps
LAST = {  # flags -> what the last step's metrics have to be
    "adaptive_kl": (
        ["--target-kl", "1e-12", "--kl-horizon", "64", "--kl-reward-coef", "0.5"],
        lambda m: [row["actor/reward_kl_penalty_coeff"] for row in m] == pytest.approx([0.5, 0.4, 0.48, 0.576]),
    ),
    "entropy_target": (
        ["--entropy-target", "100"],
        lambda m: [row["actor/entropy_coeff"] for row in m] == pytest.approx([0, 0.005, 0.01, 0.015]),
    ),
    "gdpo": (
        ["--adv-estimator", "gdpo", "--reward", "SCORE", "--gdpo-reward-keys", "right", "short"],
        lambda m: all(row["critic/advantages/max"] > 0 for row in m),
    ),
    "greso": ([], lambda m: m[-1]["prompts/hard"] + m[-1]["prompts/easy"] > 0),
    "group_reward": (  # 0, 1, 2 and 3, by score and length
        ["--group-reward", "RANK", "--rollout-n", "4"],
        lambda m: all(row["critic/score/mean"] == 1.5 and 0 <= row["reward/extra/own_score/mean"] <= 1 for row in m),
    ),
    "imitation": (
        ["--sft-files", "demo", "--sft-batch-size", "5", "--sft-coef", "1"],
        lambda m: m[-1]["actor/sft_nll"] < m[0]["actor/sft_nll"],
    ),
    "off_policy_mask": (
        ["--off-policy-mask-threshold", "1e-9", "--ppo-epochs", "2"],
        lambda m: m[-1]["actor/off_policy_masked"] > 0,
    ),
    "optimal_token_baseline": (
        ["--adv-estimator", "optimal_token_baseline"],
        lambda m: any(row["critic/advantages/max"] > 0 for row in m),
    ),
    "repetition_penalty": (  # generator and learner have the same policy
        ["--repetition-penalty", "1.5", "--top-k", "8", "--keep-sampling-mask"],
        lambda m: all(row["training/rollout_probs_diff_max"] < 1e-4 for row in m),
    ),
    "score_centering": (  # the policy is the sampler: minus the entropy over at most five tokens
        ["--score-centering", "--loss-mode", "reinforce", "--keep-sampling-mask", "--top-k", "5", "--top-p", "0.9"],
        lambda m: all(-math.log(5) < row["actor/expected_log_prob"] < 0 for row in m),
    ),
    "teacher_function": (  # which calls all tokens equally likely: the KL is log 16 less the entropy of the policy
        ["--teacher", "function", "--teacher-function", "EVEN", "--teacher-alone"],
        lambda m: all(0 < row["actor/teacher_kl"] < math.log(16) and row["critic/rewards/max"] == 0 for row in m),
    ),
    "top_entropy": (["--top-entropy-quantile", "0.2"], lambda m: all(row["timing_s/entropy"] > 0 for row in m)),
}
REWARD = """
import math

def score(data_source, solution_str, ground_truth, extra_info):
    right = float(solution_str == ground_truth)
    return {"score": right, "right": right, "short": -len(solution_str) - int(solution_str[-1:] or 0) / 10}

def even(prompt, response):
    return [-math.log(16)] * len(response)

async def rank(data_source, solutions, ground_truth, extra_info, scores, prompt):
    ranked = sorted(range(len(scores)), key=lambda i: (scores[i], -len(solutions[i])))
    return [{"score": ranked.index(i), "alike": len({*solutions}) == 1} for i in range(len(scores))]
"""


def apply(name: str, tree: Path) -> None:
    copy(tree)
    done = subprocess.run(["git", "apply", FORKS[name]], cwd=tree, text=True, capture_output=True)
    assert done.returncode == 0, f"{name}: {done.stderr}"


def test_each_fork_is_tested_and_in_the_table():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert FORKS.keys() == LAST.keys() == {*re.findall(r"^\| `(\w+)` \| (?:`--|with `--)", page, re.M)}


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_applies_and_its_scripts_still_share_their_text(name, tmp_path):
    apply(name, tmp_path / "tree")
    parsed = [ast.parse((tmp_path / "tree" / f"train_{script}.py").read_text()) for script in ("sync", "one_step_off", "async")]
    for function in ("actor_loss", "learn"):
        texts = {ast.unparse(node) for tree in parsed for node in tree.body if getattr(node, "name", "") == function}
        assert len(texts) == 1, function


@pytest.mark.runs
@pytest.mark.parametrize("name", FORKS)
def test_a_fork_trains_and_resumes(name, demo_model, tmp_path):
    """Four steps. Where a fork keeps something between two, the last two steps are also those of a run that resumes."""
    apply(name, tmp_path / "tree")
    (tmp_path / "reward.py").write_text(REWARD)
    flags, holds = LAST[name]
    flags = [f"{tmp_path / 'reward.py'}:{flag.lower()}" if flag in ("SCORE", "RANK", "EVEN") else flag for flag in flags]
    more = ["--total-training-steps", 4, "--test-freq", 0, "--save-freq", 2, "--lr", 1e-3, "--lr-warmup-steps", 0]
    more += ["--max-ckpt-to-keep", 0, "--output-dir", tmp_path / "runs", "--experiment-name", "run"]
    run, weights = tmp_path / "runs" / "run", []
    for _ in range(2 if name in STATE else 1):
        own = {"cwd": tmp_path / "tree", "env": {"PYTHONPATH": str(tmp_path / "tree")}}
        run_script(tmp_path / "tree" / "train_sync.py", *flags, *more, imported="packages", **own)
        weights.append((run / "step_000004" / "model.safetensors").read_bytes())
        shutil.rmtree(run / "step_000004")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if row["step"]}
    assert holds([steps[step] for step in (1, 2, 3, 4)]), steps[4]
    assert weights[0] == weights[-1], "resumed after step 2 it is the same run"


@pytest.mark.runs
@pytest.mark.parametrize(("name", "most"), [("score_centering", 1e-5), ("repetition_penalty", 1e-4), ("imitation", 3e-5)])
def test_what_a_fork_adds_has_the_gradient_of_its_definition(name, most, tmp_path):
    """By transformers, of tokens that other weights sampled, packed or one by one. Without its term it is another."""
    apply(name, tmp_path / "tree")
    env = {"PYTHONPATH": str(tmp_path / "tree")}
    done = run_script(ROOT / "tests/programs/gradients_of_forks.py", name, tmp_path, imported="packages", env=env)
    errors, without = json.loads(done.stdout.splitlines()[-1])
    assert max(errors) < most and min(without, default=1) > 0.1


OF_GROUPS = """
def score(data_source, solution_str, ground_truth, extra_info):
    return None if (ground_truth, solution_str) == ("unscored", "aaaa") else {"score": len(solution_str), "kept": 7}

def f(data_source, solutions, ground_truth, extra_info, scores, prompt, step):
    assert (data_source, extra_info, prompt, step, ground_truth != "validation") == ("x", None, "ask", 3, True)
    assert solutions == ["aaa", "a", "aaaa", "aa"] and scores == [3, 1, None if ground_truth == "unscored" else 4, 2]
    answers = {"short": [1, 2, 3], "a number": 1.0, "nan": [1, 2, 3, float("nan")], "unscored": [5, 6, 7, 8]}
    return answers[ground_truth] if ground_truth != "ranks" else [{"score": -n, "half": n / 2} for n in scores]
"""


@pytest.mark.runs
def test_a_function_of_a_group_replaces_its_scores(tmp_path):
    """It ranks; it raises, and returns too few values, a number, no number; a response without a score has none afterwards;
    validations keep theirs."""
    apply("group_reward", tmp_path / "tree")
    (tmp_path / "of_groups.py").write_text(OF_GROUPS)
    functions = [f"{tmp_path / 'of_groups.py'}:{name}" for name in ("score", "f")]
    cases = ["ranks", "raises", "short", "a number", "nan", "unscored"]  # raises: a KeyError
    more = {"imported": "packages", "cwd": tmp_path / "tree", "env": {"PYTHONPATH": str(tmp_path / "tree")}}
    done = run_script(ROOT / "tests" / "programs" / "group_reward.py", *functions, *cases, **more)
    found = json.loads(done.stdout.splitlines()[-1])
    scores = {case: [of["score"] for of in its] for case, its in found.items()}
    none = [None] * 4
    assert scores == {
        "ranks": [-3, -1, -4, -2],
        **dict.fromkeys(("raises", "short", "a number"), none),
        "nan": [1, 2, 3, None],
        "unscored": [5, 6, None, 8],
        "validation": [3, 1, 4, 2],
    }
    assert [of["extra"] for of in found["ranks"]] == [{"kept": 7, "half": n / 2, "own_score": n} for n in (3, 1, 4, 2)]
    events = {(case, of["event"]) for case, its in found.items() for of in its if of["event"]}
    assert events == {("raises", "error"), *((case, "bad_value") for case in ("short", "a number", "nan", "unscored"))}
    assert found["raises"][0]["message"].startswith("KeyError: 'raises' (")
    assert "[1, 2, 3], not a list of 4 values" in found["short"][0]["message"]
