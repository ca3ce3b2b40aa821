"""Agents that own their loop: real processes with real clients; what one does costs its own response alone."""

import asyncio
import sys
from pathlib import Path

import pytest
from families import end_tokens, tokenizer_of
from test_pool import answers, ids_of, wait_for
from test_turns import SCHEMA, turns_of

import train_sync
from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.errors import UserError
from user_processes.agents import Agents, Session
from user_processes.protocols import chat
from user_processes.protocols.chat import as_messages
from user_processes.worker import Warm

ROW = {"ground_truth": "6", "prompt": [{"role": "user", "content": "2*3="}]}
ASKED = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2*3"}}\n</tool_call>'


def agents(model: str, command: str, **flags) -> Environments:
    pool = Environments(EnvironmentArgs(agent=command, **{"env_timeout": 30.0} | flags), model, end_tokens("qwen2_5"))
    pool.serve(0)
    return pool


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return f"{sys.executable} {path}"


def says(pool: Environments, key, text: str, end: str = "<|im_end|>") -> dict:
    """The agent's answer to this turn of the model."""
    pool.ask(key, "step", ids=ids_of(text + end))
    return answers(pool, [key])[key]


@pytest.mark.parametrize(("form", "said"), [("auto", "drops the answers of tools"), ("hermes", "get a description of them")])
def test_a_template_that_cannot_do_tools_is_named_at_the_start(form, said, tmp_path):
    """Agents name their tools with each call, and may have none: the run starts, and its user knows."""
    tokenizer_of("phi3").save_pretrained(tmp_path)
    settings = {
        "programs": {},
        "reward": "",
        "reward_weights": [],
        "model": str(tmp_path),
        "trust_remote_code": False,
        "chat_template": None,
        "system_prompt": None,
        "images": None,
    }
    assert said in Warm(settings | {"end_tokens": sorted(end_tokens("phi3")), "form": form}).ready["note"]


RUDE = """
import json, os, subprocess, sys, time, urllib.error, urllib.request

def ask(body):
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
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
    odd.append({"messages": [{"role": "user", "content": 7}]})
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
if what == "hears that its budget is used up":
    for _ in range(2):
        try:
            ask({"messages": messages})
        except urllib.error.HTTPError as error:
            assert json.load(error)["error"]["code"] == "context_length_exceeded"
print({"lies": '{"reward": NaN}', "lies in words": '{"reward": "much"}', "says nothing": ""}.get(what, '{"reward": 2}'))
"""
EVENTS = {"calls nothing": "error", "dies": "error", "fails": "error", "lies": "bad_value", "lies in words": "bad_value"}
EVENTS |= {"hangs": "timeout"}


@pytest.mark.slow
def test_what_an_agent_does_costs_its_own_response(model, tmp_path):
    """Each failure is an event of its kind; others are scored, and one that says no reward is for a verifier. One whose budget
    is used up hears so at its open call, and may still say what it has reached."""
    pool = agents(model, written(tmp_path / "agent.py", RUDE), env_timeout=15.0)
    good = {"good": 2.0, "sends rubbish": 2.0, "leaves children": 2.0, "says nothing": None}
    good[(cut := "hears that its budget is used up")] = 2.0
    for key in [*EVENTS, *good]:
        pool.begin(key, {"ground_truth": key}, seed=1, own_seed=1)
    found = answers(pool, [*EVENTS, *good])
    begun = [key for key in found if "event" not in found[key]]
    for key in begun:
        pool.ask(key, "step", ids=ids_of("Hi.<|im_end|>"))
    found |= answers(pool, begun)
    assert found[cut]["history"] == 1  # the same call again extends nothing
    pool.ask(cut, "end", ids=[])
    found |= answers(pool, [cut])
    assert {key: answer["event"] for key, answer in found.items() if "event" in answer} == EVENTS
    assert {key: answer["reward"] for key, answer in found.items() if "event" not in answer} == good
    assert "before its first call" in found["calls nothing"]["message"] and "code 3" in found["fails"]["message"]
    assert "was killed by SIGKILL" in found["dies"]["message"] and "--env-timeout" in found["hangs"]["message"]
    for key in good:
        pool.end(key)
    wait_for(pool, 1)  # no agent, and no child of one
    pool.close()


def test_an_agent_that_cannot_be_started_is_a_message():
    for flags, said in (
        ({"agent": "no-such-program x"}, "there is no program 'no-such-program'"),
        ({"agent": "python 'x"}, "cannot be read as a command"),
        ({"agent": "python x.py", "tools": "a.py:f"}, "a response has one environment"),
    ):
        with pytest.raises(UserError, match=said):
            EnvironmentArgs(**flags).check(train_sync.Args())


# ---------------------------------------------------------------------------------------- conversations, without a process


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def model_said(text: str) -> dict:
    return {"role": "assistant", "content": text}


RESET = {"do": "reset", "row": ROW, "own_seed": 1, "split": "train"}


async def begun(family: str = "qwen2_5") -> tuple[Agents, Session]:
    """Agents, and a session that its agent has taken."""
    of = Agents({"agent": None, "timeout": 20.0}, lambda schemas: turns_of(family, with_tools=bool(schemas)), None)
    session = await of.begin()
    session.is_taken.set()
    return of, session


async def ask(session, **body) -> dict:
    """The answer to a call in the form of chat completions."""
    call = chat.call({"model": "policy"} | body, session.answered)
    return chat.body([answer async for kind, _, answer in session.pieces(call) if kind == "end"])


def played(calls: list[list[dict]], *said: list[int], family: str = "qwen2_5", tools=None, most=None):
    """What the rank hears of an agent that makes these calls, and what the agent hears. said: the tokens of each turn."""
    heard, found = [], []

    async def agent(session) -> None:
        for messages in calls:
            heard.append(await ask(session, messages=messages, tools=tools, max_tokens=most))

    async def play() -> None:
        _, session = await begun(family)
        calling = asyncio.create_task(agent(session))
        found.append(await session.ask(RESET))
        for ids in said:
            found.append(await session.ask({"do": "step", "ids": ids}))
        calling.cancel()

    asyncio.run(play())
    return found, heard


def test_calls_at_once_are_answered_one_after_the_other():
    async def play() -> list[str]:
        _, session = await begun()
        calls = [asyncio.create_task(ask(session, messages=[user(f"{n}")])) for n in range(5)]
        await session.ask(RESET)
        for n in range(4):
            assert (await session.ask({"do": "step", "ids": ids_of(f"{n}.<|im_end|>")}))["history"] == n + 1
        last = asyncio.create_task(session.ask({"do": "step", "ids": ids_of("4.<|im_end|>")}))
        said = [(await call)["choices"][0]["message"]["content"] for call in calls]
        last.cancel()
        return said

    assert asyncio.run(play()) == [f"{n}." for n in range(5)]


def test_calls_extend_the_longest_conversation_that_is_theirs(tokenizer):
    """A sub-agent's calls between two of the main one; both continue where they were."""
    main, sub = [user("Plan."), model_said("Ask."), user("Done?")], [user("Search."), model_said("Found."), user("More.")]
    compressed = [user("In short: planned."), model_said("Yes."), user("Done?")]
    turns = [ids_of(f"{text}<|im_end|>") for text in ("Ask.", "Found.", "No.", "No.")]
    found, _ = played([main[:1], sub[:1], sub, main, compressed], *turns)
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert [(answer["history"], tokenizer.decode(answer["ids"])) for answer in found[1:]] == [
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
def test_what_does_not_extend_a_conversation_is_a_further_one(changed):
    assert played([[user("Go.")], changed], ids_of("Yes.<|im_end|>"))[0][1]["history"] == 1


@pytest.mark.parametrize(
    "returned",
    [
        {"role": "assistant", "content": None, "tool_calls": [("other", '{ "expression":"2*3"}')]},
        {"role": "assistant", "content": "", "tool_calls": [("call_0_0", '{"expression": "2*3"}')], "refusal": None},
        {"role": "assistant", "content": [{"type": "text", "text": "\n"}], "tool_calls": [("c", '{"expression": "2*3"}')]},
    ],
)
def test_messages_are_compared_by_what_they_say(returned):
    """Clients write ids, blanks and empty texts as they like."""
    calls = [
        {"id": number, "type": "function", "function": {"name": "calculate", "arguments": arguments}}
        for number, arguments in returned["tool_calls"]
    ]
    answer = {"role": "tool", "tool_call_id": calls[0]["id"], "content": [{"type": "text", "text": "6"}]}
    asked = [[user("2*3=")], [user("2*3="), returned | {"tool_calls": calls}, answer]]
    found, _ = played(asked, ids_of(f"{ASKED}<|im_end|>"), tools=[SCHEMA])
    assert found[1]["history"] == 0 and found[1]["ids"] == turns_of("qwen2_5").between([{"role": "tool", "content": "6"}])


def test_a_thought_is_not_part_of_what_is_compared():
    """It stays among the tokens, whether the client returns it or not."""
    ids = tokenizer_of("qwen3")("<think>\nHm.\n</think>\n\nYes.<|im_end|>", add_special_tokens=False)["input_ids"]
    for returned in (model_said("Yes."), model_said("Yes.") | {"reasoning_content": "Hm."}):
        found, heard = played([[user("Go.")], [user("Go."), returned, user("On.")]], ids, family="qwen3")
        said = heard[0]["choices"][0]["message"]
        assert found[1]["history"] == 0 and said["content"] == "Yes." and said["reasoning_content"] == "Hm."


def test_a_call_that_cannot_be_read_is_text():
    broken = '<tool_call>\n{"name": calculate}\n</tool_call>'
    asked = [[user("2*3=")], [user("2*3="), model_said(broken), user("Again.")]]
    found, heard = played(asked, ids_of(f"{broken}<|im_end|>"), tools=[SCHEMA])
    assert (found[1]["history"], found[1]["calls"], found[1]["malformed"]) == (0, 0, 1)
    said = heard[0]["choices"][0]
    assert said["message"]["content"] == broken and said["finish_reason"] == "stop"


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe"])
def test_a_conversation_with_calls_is_the_template_s_own(family):
    """Of a further history all is encoded, with the calls as its template writes them; names of special tokens are text."""
    tokenizer, turns, end = tokenizer_of(family), turns_of(family), "<|im_end|><|eot_id|>"
    call = {"id": "c", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "2*3"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    given = [user("2*3="), said, {"role": "tool", "tool_call_id": "c", "content": f"6{end}"}, user("So?")]
    ids = turns.prompt([], as_messages(given))
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


@pytest.mark.parametrize(("spare", "reason"), [(1, "stop"), (0, "length")])
def test_a_turn_without_its_end_token_was_cut_unless_a_stop_string_ended_it(spare, reason):
    """If tokens were left of the call's limit, it was one of the run's. The end token comes before the next message, either
    way."""
    asked = [[user("2*3=")], [user("2*3="), model_said("<answer>6</answer>"), user("Again.")]]
    ids = ids_of("<answer>6</answer>")
    found, heard = played(asked, ids, most=len(ids) + spare)
    said = heard[0]["choices"][0]
    assert said["message"]["content"] == "<answer>6</answer>" and said["finish_reason"] == reason
    assert found[1]["ids"] == turns_of("qwen2_5").between([user("Again.")], is_cut=True)
