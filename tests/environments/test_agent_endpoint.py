"""Agents that own their loop: real processes with real clients; what one does costs its own response alone."""

import json
import queue
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import end_tokens, tokenizer_of
from helpers import ROOT
from test_pool import Args, answers
from test_turns import SCHEMA, turns_of

from rl.environments.agents import Agent, Connection, Session
from rl.environments.chat import Call, End, Refused, as_messages
from rl.environments.gateway import Gateway
from rl.environments.pool import Environments
from rl.errors import UserError
from rl.rewards.descendants import descendants

ROW = {"ground_truth": "6", "prompt": [{"role": "user", "content": "2*3="}]}
ASKED = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2*3"}}\n</tool_call>'
WITH_OPENAI = """
import json, os, sys
import openai

assert (os.environ["EPISODE_SEED"], os.environ["EPISODE_SPLIT"]) == ("1", "train")

def refused(kind, **more):
    try:
        client.chat.completions.create(**({"model": "policy", "messages": messages} | more))
    except kind as error:
        return str(error)
    raise AssertionError(f"{more} was answered")

client, messages = openai.OpenAI(max_retries=0), json.load(sys.stdin)["prompt"]
assert [model.id for model in client.models.list()] == ["policy"]
assert "there is no model 'gpt'" in refused(openai.NotFoundError, model="gpt")
assert "only text" in refused(openai.BadRequestError, messages=[{"role": "user", "content": [{"type": "image_url"}]}])
assert "the policy samples one answer" in refused(openai.BadRequestError, n=2)
for it in ({"max_tokens": -1}, {"max_tokens": 0}, {"max_completion_tokens": 0}, {"max_tokens": 5, "max_completion_tokens": 0}):
    assert "must be a whole number of at least 1" in refused(openai.BadRequestError, **it)
assert "not this session's" in str(refused(openai.AuthenticationError, extra_headers={"Authorization": "Bearer sk-1"}))
tools = [json.loads(sys.argv[1])]
said = client.chat.completions.create(model="policy", messages=messages, tools=tools, temperature=0.1)
(call,) = said.choices[0].message.tool_calls
assert said.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"expression": "2*3"}
assert said.usage.prompt_tokens > 100 and said.usage.completion_tokens > 20
messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "6"}]
stream = client.chat.completions.create(
    model="policy", messages=messages, tools=tools, max_tokens=3, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == "six" and chunks[-1].usage.completion_tokens == 3 and chunks[-2].choices[0].finish_reason == "length"
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "In digits."}]
said = client.chat.completions.create(model="policy", messages=messages, tools=tools)
print("what it prints")
print(json.dumps({"reward": float(said.choices[0].message.content == "6")}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer_of("qwen2_5").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen2_5")


def agents(model: str, command: str, **flags) -> Environments:
    flags = {"env_timeout": 30.0, "env_memory_limit_gb": 0.0, "env_cpu_limit": 20.0} | flags
    pool = Environments(Args(agent=command, **flags), model, end_tokens("qwen2_5"), 300)
    pool.serve(0)
    return pool


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return f"{sys.executable} {path}"


def says(pool: Environments, tokenizer, key, text: str, end: str = "<|im_end|>") -> dict:
    """The agent's answer to this turn of the model."""
    pool.ask(key, "step", ids=tokenizer(text + end, add_special_tokens=False)["input_ids"])
    return answers(pool, [key])[key]


def test_the_openai_client_is_answered_and_refused(model, tokenizer, tmp_path):
    """Calls that extend each other add the template's own tokens alone; what is refused is no turn, and costs nothing."""
    pytest.importorskip("openai")
    pool = agents(model, f"{written(tmp_path / 'agent.py', WITH_OPENAI)} '{json.dumps(SCHEMA)}'")
    assert pool.ready["scores_at_end"] and not pool.ready["note"]
    pool.begin("a", ROW, seed=1, own_seed=1)
    first = answers(pool, ["a"])["a"]
    prompt = tokenizer.apply_chat_template(ROW["prompt"], tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(first["prompt"]) == prompt and first["most"] is None
    asked = says(pool, tokenizer, "a", ASKED)
    assert (asked["history"], asked["most"], asked["calls"], asked["malformed"], asked["done"]) == (0, 3, 1, 0, False)
    assert asked["ids"] == turns_of("qwen2_5").between([{"role": "tool", "content": "6"}])
    cut = says(pool, tokenizer, "a", "six", end="")
    assert tokenizer.decode(cut["ids"]) == "<|im_end|>\n<|im_start|>user\nIn digits.<|im_end|>\n<|im_start|>assistant\n"
    done = says(pool, tokenizer, "a", "6")
    assert done["done"] and done["reward"] == 1.0 and done["ids"] == []
    pool.close()


@pytest.mark.parametrize(("form", "said"), [("auto", "drops the answers of tools"), ("hermes", "get a description of them")])
def test_a_template_that_cannot_do_tools_is_named_at_the_start(form, said, tmp_path):
    """Agents name their tools with each call, and may have none: the run starts, and its user knows."""
    tokenizer_of("phi3").save_pretrained(tmp_path)
    flags = Args(agent="true", env_timeout=20.0, tool_format=form)
    pool = Environments(flags, str(tmp_path), end_tokens("phi3"), 300)
    assert said in pool.ready["note"]
    pool.close()


TOOL = '''
def calculate(expression: str) -> str:
    """Computes.

    Args:
        expression: Two numbers.
    """
    return str(eval(expression))

row = json.load(sys.stdin)
'''
LIBRARIES = {
    "agents": f"""
import json, os, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
{TOOL}
set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], AsyncOpenAI())
agent = Agent("a", instructions="Compute.", tools=[function_tool(calculate)], model=model)
answer = Runner.run_sync(agent, row["prompt"][0]["content"]).final_output
print(json.dumps({{"reward": float(answer == row["ground_truth"])}}))
""",
    "smolagents": f"""
import json, os, sys
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
{TOOL}
model = OpenAIServerModel(os.environ["OPENAI_MODEL"])
answer = ToolCallingAgent([tool(calculate)], model, verbosity_level=0).run(row["prompt"][0]["content"])
print(json.dumps({{"reward": float(str(answer) == row["ground_truth"])}}))
""",
}


@pytest.mark.parametrize(
    ("library", "last", "history"),
    [("agents", "6", 0), ("smolagents", ASKED.replace("calculate", "final_answer").replace("expression", "answer"), 1)],
    ids=["openai-agents", "smolagents"],
)
def test_a_public_library_runs_as_it_is(model, tokenizer, tmp_path, library, last, history):
    """openai-agents extends its conversation, smolagents begins another with each call."""
    pytest.importorskip(library)
    pool = agents(model, written(tmp_path / "agent.py", LIBRARIES[library]), env_timeout=100.0)
    pool.begin("a", ROW | {"ground_truth": "6" if library == "agents" else "2*3"}, seed=1, own_seed=1)
    assert "prompt" in answers(pool, ["a"])["a"]
    assert says(pool, tokenizer, "a", ASKED)["history"] == history
    done = says(pool, tokenizer, "a", last)
    assert done["done"] and done["reward"] == 1.0
    pool.close()


RUDE = """
import json, os, subprocess, sys, time, urllib.error, urllib.request

def ask(body, key=os.environ["OPENAI_API_KEY"]):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    data = body if isinstance(body, bytes) else json.dumps({"model": "policy"} | body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})).read()

row = json.load(sys.stdin)
messages = [{"role": "user", "content": "Hello."}]
what = row["ground_truth"]
if what == "calls nothing":
    sys.exit()
if what == "sends rubbish":
    odd = [b"{", b"[" * 100_000, b"3"] + [{"messages": value} for value in ([], [3], [{"role": []}], {}, 7)]
    odd.append({"messages": messages, "tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]})
    for body in (*odd, {"messages": messages, "tools": 7}, {"messages": [{"role": "assistant", "tool_calls": 7}]}):
        try:
            ask(body)
        except urllib.error.HTTPError as error:
            assert error.code == 400 and json.load(error)["error"]["message"], body
        else:
            sys.exit(9)
ask({"messages": messages})
if what == "hangs":
    time.sleep(1000)
if what == "leaves children":
    for is_own in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=is_own)
if what == "dies":
    os.kill(os.getpid(), 9)
if what == "fails":
    sys.exit(3)
if what == "burns":
    while True:
        pass
print({"lies": '{"reward": NaN}', "lies in words": '{"reward": "much"}', "says nothing": ""}.get(what, '{"reward": 2}'))
"""
EVENTS = {
    "calls nothing": "error",
    "dies": "error",
    "fails": "error",
    "lies": "bad_value",
    "lies in words": "bad_value",
    "burns": "error",
}


def test_what_an_agent_does_costs_its_own_response(model, tokenizer, tmp_path):
    """Each failure is an event of its kind; others are scored, and one that says no reward is for a verifier."""
    pool = agents(model, written(tmp_path / "agent.py", RUDE), env_timeout=100.0, env_cpu_limit=2.0)
    good = {"good": 2.0, "sends rubbish": 2.0, "leaves children": 2.0, "says nothing": None}
    for key in [*EVENTS, *good]:
        pool.begin(key, {"ground_truth": key}, seed=1, own_seed=1)
    found = answers(pool, [*EVENTS, *good])
    begun = [key for key in found if "event" not in found[key]]
    for key in begun:
        pool.ask(key, "step", ids=tokenizer("Hi.<|im_end|>", add_special_tokens=False)["input_ids"])
    found |= answers(pool, begun)
    assert {key: answer["event"] for key, answer in found.items() if "event" in answer} == EVENTS
    assert {key: answer["reward"] for key, answer in found.items() if "event" not in answer} == good
    assert "before its first call" in found["calls nothing"]["message"] and "code 3" in found["fails"]["message"]
    assert "was killed by SIGKILL" in found["dies"]["message"]
    for key in good:
        pool.end(key)
    until = time.monotonic() + 20
    while len(descendants(pool._process.pid)) > 1 and time.monotonic() < until:
        pool.poll(0.1)
    assert len(descendants(pool._process.pid)) == 1  # what all are forked from: no agent, and no child of one
    pool.close()


def test_an_agent_that_hangs_costs_its_time_limit(model, tokenizer, tmp_path):
    pool = agents(model, written(tmp_path / "agent.py", RUDE), env_timeout=1.0)
    pool.begin("a", {"ground_truth": "hangs"}, seed=1, own_seed=1)
    answers(pool, ["a"])
    failed = says(pool, tokenizer, "a", "Hi.")
    assert failed["event"] == "timeout" and "--env-timeout" in failed["message"]
    pool.close()


def test_an_agent_hears_that_its_budget_is_used_up(model, tokenizer, tmp_path):
    """Its open call is refused; it may still say what it has reached."""
    text = RUDE.partition("row =")[0] + (
        "messages = [{'role': 'user', 'content': 'Hello.'}]\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        ask({'messages': messages})\n"
        "    except urllib.error.HTTPError as error:\n"
        "        assert json.load(error)['error']['code'] == 'context_length_exceeded'\n"
        "print(json.dumps({'reward': 0.25}))\n"
    )
    pool = agents(model, written(tmp_path / "agent.py", text))
    pool.begin("a", ROW, seed=1, own_seed=1)
    answers(pool, ["a"])
    assert says(pool, tokenizer, "a", "Hi.")["history"] == 1  # the same call again extends nothing
    pool.ask("a", "end")
    assert answers(pool, ["a"])["a"]["reward"] == 0.25
    pool.close()


def test_an_agent_that_cannot_be_started_is_a_message():
    for flags, said in (
        ({"agent": "no-such-program x"}, "there is no program 'no-such-program'"),
        ({"agent": "python 'x"}, "cannot be read as a command"),
        ({"agent": "python x.py", "tools": "a.py:f"}, "a response has one environment"),
        ({"agent": "python x.py", "turn_rewards": True}, "--turn-rewards"),
    ):
        with pytest.raises(UserError, match=said):
            Args(**flags).check()


# ---------------------------------------------------------------------------------------- histories, without a process


class Scripted(Session):
    """A session whose agent is the test: `calls` are its calls, made when the last was answered."""

    def __init__(self, calls: list[list[dict]], family: str = "qwen2_5", tools: list[dict] | None = None):
        super().__init__(None, lambda schemas: turns_of(family, with_tools=bool(schemas)))
        self.answers: list[dict] = []
        for messages in calls:
            self._news.put(Call({"model": "policy", "messages": messages, "tools": tools}, self.answers.append))

    def begin(self) -> list[int]:
        return self._take(self._news.get())[1]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def model_said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def ids_of(text: str) -> list[int]:
    return tokenizer_of("qwen2_5")(text, add_special_tokens=False)["input_ids"]


def test_calls_extend_the_longest_history_that_is_theirs(tokenizer):
    """A sub-agent's calls between two of the main one; both continue where they were."""
    main, sub = [user("Plan."), model_said("Ask."), user("Done?")], [user("Search."), model_said("Found."), user("More.")]
    compressed = [user("In short: planned."), model_said("Yes."), user("Done?")]
    session = Scripted([main[:1], sub[:1], sub, main, compressed])
    session.begin()
    found = []
    for text in ("Ask.", "Found.", "No.", "No."):
        answer = session.step({"ids": ids_of(text + "<|im_end|>")})
        found.append((answer["history"], tokenizer.decode(answer["ids"])))
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert found == [
        (1, f"{system}{start}Search.{end}"),
        (1, f"\n{start}More.{end}"),
        (0, f"\n{start}Done?{end}"),
        (2, f"{system}{start}In short: planned.<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n{start}Done?{end}"),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        [user("Other."), model_said("Yes."), user("On.")],
        [user("Go."), model_said("No."), user("On.")],
        [user("Go."), model_said("Yes.")],
        [user("Go."), model_said("Yes."), model_said("And."), user("On.")],
        [{"role": "system", "content": "Be brief."}, user("Go."), model_said("Yes."), user("On.")],
    ],
)
def test_what_does_not_extend_a_history_is_a_further_one(changed):
    session = Scripted([[user("Go.")], changed])
    session.begin()
    assert session.step({"ids": ids_of("Yes.<|im_end|>")})["history"] == 1


@pytest.mark.parametrize(
    "returned",
    [
        {"role": "assistant", "content": None, "tool_calls": [("other", '{ "expression":"2*3"}')]},
        {"role": "assistant", "content": "", "tool_calls": [("call_0_0", '{"expression": "2*3"}')], "refusal": None},
        {"role": "assistant", "content": [{"type": "text", "text": "\n"}], "tool_calls": [("c", '{"expression": "2*3"}')]},
    ],
)
def test_messages_are_compared_by_what_they_say(returned, tokenizer):
    """Clients write ids, blanks and empty texts as they like."""
    calls = [
        {"id": number, "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        for number, arguments in returned["tool_calls"]
    ]
    answer = {"role": "tool", "tool_call_id": calls[0]["id"], "content": [{"type": "text", "text": "6"}]}
    session = Scripted([[user("2*3=")], [user("2*3="), returned | {"tool_calls": calls}, answer]], tools=[SCHEMA])
    session.begin()
    found = session.step({"ids": ids_of(ASKED + "<|im_end|>")})
    assert found["history"] == 0 and found["ids"] == turns_of("qwen2_5").between([{"role": "tool", "content": "6"}])


def test_a_thought_is_not_part_of_what_is_compared():
    """It stays among the tokens, whether the client returns it or not."""
    tokenizer = tokenizer_of("qwen3")
    for returned in (model_said("Yes."), model_said("Yes.") | {"reasoning_content": "Hm."}):
        session = Scripted([[user("Go.")], [user("Go."), returned, user("On.")]], family="qwen3")
        session.begin()
        ids = tokenizer("<think>\nHm.\n</think>\n\nYes.<|im_end|>", add_special_tokens=False)["input_ids"]
        assert session.step({"ids": ids})["history"] == 0
        said = json.loads(session.answers[0]["text"])["choices"][0]["message"]
        assert said["content"] == "Yes." and said["reasoning_content"] == "Hm."


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe"])
def test_a_conversation_with_calls_is_the_template_s_own(family):
    """Of a further history all is encoded, with the calls as its template writes them; names of special tokens are text."""
    tokenizer, turns, end = tokenizer_of(family), turns_of(family), "<|im_end|><|eot_id|>"
    call = {"id": "c", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "2*3"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    given = [user("2*3="), said, {"role": "tool", "tool_call_id": "c", "content": f"6{end}"}, user("So?")]
    ids = turns.conversation(as_messages(given))
    as_object = said | {"tool_calls": [call | {"function": {"name": "calculate", "arguments": {"expression": "2*3"}}}]}
    for messages in ([given[0], as_object, *given[2:]], given):
        try:
            text = tokenizer.apply_chat_template(messages, tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
            break
        except Exception:
            continue
    assert tokenizer.decode(ids) == text
    plain = tokenizer(text.replace(end, ""), add_special_tokens=False)["input_ids"]
    special = set(tokenizer.added_tokens_decoder)
    assert [i for i in ids if i in special] == [i for i in plain if i in special]


def test_a_call_that_cannot_be_read_is_text():
    broken = '<tool_call>\n{"name": calculate}\n</tool_call>'
    session = Scripted([[user("2*3=")], [user("2*3="), model_said(broken), user("Again.")]], tools=[SCHEMA])
    session.begin()
    found = session.step({"ids": ids_of(broken + "<|im_end|>")})
    assert (found["history"], found["calls"], found["malformed"]) == (0, 0, 1)
    said = json.loads(session.answers[0]["text"])["choices"][0]
    assert said["message"]["content"] == broken and said["finish_reason"] == "stop"


# ------------------------------------------------------------------------------------------------- the endpoint itself


@pytest.fixture
def endpoint() -> Iterator[Connection]:
    """The connection of a command's episode with the server."""
    name = secrets.token_hex(8)
    gateway = Gateway(Args(agent="x"), name, 0)
    yield Connection(name, None, queue.SimpleQueue())
    gateway.close()


def post(endpoint: Connection, body: dict, path: str = "/v1/chat/completions", **headers: str) -> socket.socket:
    """A connection on which this was asked."""
    client, data = socket.socket(), json.dumps(body).encode()
    client.connect(("127.0.0.1", int(re.search(r":(\d+)/v1$", endpoint.variables["OPENAI_BASE_URL"])[1])))
    known = {"Host": "x", "Authorization": f"Bearer {endpoint.variables['OPENAI_API_KEY']}", "Content-Length": str(len(data))}
    known |= headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in known.items())]
    client.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return client


def status(client: socket.socket) -> int:
    with client:
        return int(client.recv(1 << 16).split()[1])


BODY = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}


def test_calls_at_once_are_answered_one_after_the_other(endpoint):
    clients = [post(endpoint, BODY | {"messages": [user(str(i))]}) for i in range(5)]
    found = set()
    for _ in clients:
        call = endpoint.news.get(timeout=30)
        assert endpoint.news.empty()
        found.add(call.messages[0]["content"])
        call.reply(Refused(418, "no"))
    assert found == set("01234") and [status(client) for client in clients] == [418] * 5


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/responses", {}, 404),
        ("/v1/episodes/next", {}, 404),
        ("/v1/episodes/end", {}, 404),  # a command ends its episode by exiting
        ("/v1/chat/completions", {"Authorization": "Bearer other"}, 401),
        ("/v1/chat/completions", {"Content-Length": "many"}, 400),
        ("/v1/chat/completions", {"Content-Length": str(1 << 40)}, 413),
    ],
)
def test_other_requests_are_refused(endpoint, path, headers, expected):
    assert status(post(endpoint, BODY, path, **headers)) == expected and endpoint.news.empty()


def test_an_agent_has_its_own_variables_and_no_path_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("NO_PROXY", "example.org")
    ended = queue.SimpleQueue()
    shown = "print([os.environ[name] for name in ('PYTHONPATH', 'NO_PROXY', 'X')], json.load(sys.stdin))"
    agent = Agent(f'{sys.executable} -c "import json, os, sys; {shown}"', {"a": 1}, {"X": "y"}, ended.put)
    assert ended.get(timeout=30) == End()
    assert agent._last.decode() == f"{[str(tmp_path), 'example.org,127.0.0.1', 'y']} {{'a': 1}}\n"
