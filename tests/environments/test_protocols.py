"""Three protocols with their official clients, in processes of their own: each call of a conversation continues its tokens,
and a stream's text arrives while the turn is sampled."""

import asyncio
import base64
import io
import itertools
import json

import pytest
from helpers import eventually
from PIL import Image
from test_agents import ASKED, RESET, ROW, agents, begun, says, written
from test_pool import answers, ids_of
from test_turns import SCHEMA, turns_of

from user_processes import pictures
from user_processes.open_call import Growing, said
from user_processes.protocols import anthropic, chat, responses
from user_processes.protocols.form import Answer, Refused, reading

START = """
import asyncio, json, os, sys
from pathlib import Path

function, heard = json.loads(sys.argv[1])["function"], Path(sys.argv[2])
messages = json.load(sys.stdin)["prompt"]
assert (os.environ["EPISODE_SEED"], os.environ["EPISODE_SPLIT"]) == ("1", "train")
assert os.environ["NO_PROXY"].split(",") == ["example.org", "127.0.0.1"]
assert os.environ["PYTHONPATH"] == str(heard.parent) and "MY_TOKEN" not in os.environ
print("what it prints")

def refused(kind, make, said, **more):
    try:
        make(**more)
    except kind as error:
        assert said in str(error), error
        return
    raise AssertionError(f"{more} was answered")
"""
RESPONSES = """
import openai

client, tools = openai.OpenAI(max_retries=0), [{"type": "function"} | function]
make = client.responses.create
usual = {"model": "policy", "input": messages}
refused(openai.NotFoundError, make, "there is no model", **usual | {"model": "gpt"})
refused(openai.BadRequestError, make, "background", background=True, **usual)
refused(openai.BadRequestError, make, "tools must be functions", tools=[{"type": "web_search"}], **usual)
refused(openai.BadRequestError, make, "an image is", model="policy", input=[
    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])
refused(openai.BadRequestError, make, "max_output_tokens", max_output_tokens=-1, **usual)
refused(openai.BadRequestError, make, "needs a call without", text={"format": {"type": "json_object"}}, **usual)
refused(openai.BadRequestError, make, "cannot be read", previous_response_id="resp_7", **usual)
first = make(tools=tools, **usual)
(call,) = first.output
assert call.type == "function_call" and json.loads(call.arguments) == {"expression": "2*3"} and first.status == "completed"
assert first.usage.input_tokens > 100 and first.usage.output_tokens > 20
answer = {"type": "function_call_output", "call_id": call.call_id, "output": "6"}
text = ""
with client.responses.stream(model="policy", tools=tools, input=[*messages, *first.output, answer]) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            text += event.delta
            heard.write_text(text)
    final = stream.get_final_response()
assert text == final.output_text == "It is six.", text

async def again():
    return await openai.AsyncOpenAI().responses.create(
        model="policy", tools=tools, previous_response_id=final.id, input="In digits.", max_output_tokens=1)

said = asyncio.run(again())
assert said.status == "incomplete" and said.incomplete_details.reason == "max_output_tokens"
print(json.dumps({"reward": float(said.output_text == "6")}))
"""
ANTHROPIC = """
import anthropic

client = anthropic.Anthropic(max_retries=0)
tools = [{"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}]
make = client.messages.create
usual = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 100, "messages": messages}
refused(anthropic.NotFoundError, make, "there is no model", **usual | {"model": "claude"})
refused(anthropic.BadRequestError, make, "tools must be functions", tools=[{"type": "bash_20250124", "name": "bash"}], **usual)
refused(anthropic.BadRequestError, make, "max_tokens", **usual | {"max_tokens": 0})
refused(anthropic.BadRequestError, make, "an image is", **usual | {"messages": [
    {"role": "user", "content": [{"type": "image", "source": {}}]}]})
refused(anthropic.AuthenticationError, make, "has this key", extra_headers={"x-api-key": "sk-1"}, **usual)
first = make(tools=tools, **usual)
(call,) = first.content
assert call.type == "tool_use" and call.input == {"expression": "2*3"} and first.stop_reason == "tool_use"
assert first.usage.input_tokens > 100 and first.usage.output_tokens > 20
answer = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "6"}]}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
text = ""
with client.messages.stream(tools=tools, **usual | {"messages": messages}) as stream:
    for piece in stream.text_stream:
        text += piece
        heard.write_text(text)
    final = stream.get_final_message()
assert text == final.content[0].text == "It is six." and final.stop_reason == "end_turn"
messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": "In digits."}]
said = asyncio.run(anthropic.AsyncAnthropic().messages.create(
    tools=tools, **usual | {"messages": messages, "max_tokens": 1}))
assert said.stop_reason == "max_tokens"
print(json.dumps({"reward": float(said.content[0].text == "6")}))
"""
CHAT = """
import openai

client, tools = openai.OpenAI(max_retries=0), [{"type": "function", "function": function}]
assert [model.id for model in client.models.list()] == ["policy"]
make = client.chat.completions.create
usual = {"model": "policy", "messages": messages}
refused(openai.NotFoundError, make, "there is no model 'gpt'", **usual | {"model": "gpt"})
refused(openai.BadRequestError, make, "an image is", **usual | {"messages": [
    {"role": "user", "content": [{"type": "image_url"}]}]})
refused(openai.BadRequestError, make, "samples freely", logprobs=True, **usual)
for it in ({"max_tokens": -1}, {"max_tokens": 0}, {"max_completion_tokens": 0}, {"max_tokens": 5, "max_completion_tokens": 0}):
    refused(openai.BadRequestError, make, "must be a whole number of at least 1", **it, **usual)
refused(openai.AuthenticationError, make, "has this key", extra_headers={"Authorization": "Bearer sk-1"}, **usual)
for path in ("/episodes/next", "/episodes/end"):  # of workers: a command ends its episode by exiting
    refused(openai.NotFoundError, client.post, "", path=path, cast_to=object, body={})
first = make(tools=tools, temperature=0.1, **usual)
(call,) = first.choices[0].message.tool_calls
assert first.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"expression": "2*3"}
assert first.usage.prompt_tokens > 100 and first.usage.completion_tokens > 20
messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "6"}]
text = ""
counts = {"stream_options": {"include_usage": True}}
with client.chat.completions.stream(model="policy", messages=messages, tools=tools, **counts) as stream:
    for event in stream:
        if event.type == "content.delta":
            text += event.delta
            heard.write_text(text)
    whole = stream.get_final_completion()
assert text == whole.choices[0].message.content == "It is six.", text
assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens == len(text) + 1
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "In digits."}]
said = asyncio.run(openai.AsyncOpenAI().chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=1))
assert said.choices[0].finish_reason == "length"
print(json.dumps({"reward": float(said.choices[0].message.content == "6")}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "package"), [(CHAT, "openai"), (RESPONSES, "openai"), (ANTHROPIC, "anthropic")])
def test_a_conversation_of_each_client_is_one_history(script, package, model, tokenizer, tmp_path, monkeypatch, capfd):
    """Tools, a stream that has arrived before its turn has ended, and errors, which are no turns and cost nothing."""
    pytest.importorskip(package)
    for name, value in {"PYTHONPATH": str(tmp_path), "NO_PROXY": "example.org", "MY_TOKEN": "x"}.items():
        monkeypatch.setenv(name, value)
    heard = tmp_path / "heard"
    command = f"{written(tmp_path / 'agent.py', START + script)} '{json.dumps(SCHEMA)}' {heard}"
    pool = agents(model, command)
    assert pool.scores_at_end[""] and not pool.note
    pool.begin("a", ROW, seed=1, own_seed=1)
    first = answers(pool, ["a"])["a"]
    prompt = tokenizer.apply_chat_template(ROW["prompt"], tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(first["prompt"]) == prompt
    asked = says(pool, "a", ASKED)
    assert (asked["history"], asked["calls"], asked["malformed"], asked["done"]) == (0, 1, 0, False)
    assert asked["ids"] == turns_of("qwen2_5").between([{"role": "tool", "content": "6"}])
    turn = ids_of("It is six.<|im_end|>")
    for number in range(1, len(turn)):
        pool.pass_on({asked["stream"]: turn[number - 1 : number]})
        expected = tokenizer.decode(turn[:number]).strip()
        assert eventually(lambda: heard.exists() and heard.read_text() == expected, 20), (heard.exists(), expected)  # noqa: B023
    pool.ask("a", "step", ids=turn)
    more = answers(pool, ["a"])["a"]
    assert (more["history"], more["most"], more["stream"]) == (0, 1, None)
    assert tokenizer.decode(more["ids"]) == "\n<|im_start|>user\nIn digits.<|im_end|>\n<|im_start|>assistant\n"
    done = says(pool, "a", "6", end="")
    assert done["done"] and done["reward"] == 1.0 and done["ids"] == []
    pool.close()
    said = capfd.readouterr()
    assert "what it prints" in said.err + said.out and "reward" not in said.err + said.out


LEAVES = """
import json, os, urllib.request

def ask(**more):
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    data = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Go."}]} | more).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"}))

with ask(stream=True) as reply:
    assert b"Wel" in reply.readline()
print(json.dumps({"reward": float(json.load(ask())["choices"][0]["message"]["content"])}))
"""


@pytest.mark.slow
def test_an_agent_that_leaves_a_stream_may_ask_again(model, tmp_path, capfd):
    """The turn is sampled to its end, and the next call is a fork."""
    pool = agents(model, written(tmp_path / "agent.py", LEAVES))
    pool.begin("a", ROW, seed=1, own_seed=1)
    first = answers(pool, ["a"])["a"]
    turn = ids_of("Well, yes.<|im_end|>")
    pool.pass_on({first["stream"]: turn[:3]})
    for token in turn[3:-1]:
        assert not pool.poll(0.3)
        pool.pass_on({first["stream"]: [token], "an episode that has ended": [token]})
    pool.ask("a", "step", ids=turn)
    assert answers(pool, ["a"])["a"]["history"] == 1
    assert says(pool, "a", "2")["reward"] == 2.0
    pool.close()
    assert "Error" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------- a turn's text as it is sampled

TURNS = [
    ("qwen2_5", "It is six: 👩‍🚀 naïve 六.  \n\n", {"content": "It is six: 👩‍🚀 naïve 六."}),
    ("qwen2_5", f"Let me see, 3 < 4 and <b>.\n{ASKED}", {"content": "Let me see, 3 < 4 and <b>."}),
    ("qwen2_5", f"I ask.\n{ASKED}\nThen.", {"content": "I ask.\n\nThen."}),
    (
        "qwen2_5",
        '<tool_call>\n{"name": calculate}\n</tool_call>',
        {"content": '<tool_call>\n{"name": calculate}\n</tool_call>'},
    ),
    ("qwen3", f"<think>\nHm, <tool_call>?\n</think>\n\nYes.\n{ASKED}", {"reasoning": "Hm, <tool_call>?", "content": "Yes."}),
    ("qwen3", "<think>\nHm", {"reasoning": "Hm", "content": ""}),
    ("qwen3_5_think", "Hm.\n</think>\n\nYes.", {"reasoning": "Hm.", "content": "Yes."}),
    ("llama3_1", '{"name": "calculate", "parameters": {"expression": "2*3"}}', {"content": ""}),
    ("llama3_1", "{ is a brace", {"content": "{ is a brace"}),
]


@pytest.mark.parametrize(("family", "text", "expected"), TURNS)
def test_text_that_was_shown_is_never_taken_back(family, text, expected):
    """Token by token, and several tokens at once: the pieces make up the whole turn, in its own words."""
    turns = turns_of(family)
    ids = turns.tokenizer(text, add_special_tokens=False)["input_ids"] + [min(turns.end_tokens)]
    whole, _ = said(turns, ids)
    for size in (1, 2, 7):
        growing = Growing(turns, ())
        shown = [growing.shown]
        for at in range(0, len(ids), size):
            growing.ids += ids[at : at + size]
            growing.more()
            shown.append(growing.shown)
        final = growing.whole(whole)
        assert {name: final[name] for name in expected} == expected
        assert all(b[name].startswith(a[name]) for a, b in itertools.pairwise([*shown, final]) for name in a)
        if expected["content"].startswith("It is"):
            assert len({its["content"] for its in shown}) > 15 / size
        assert final == whole


def test_a_second_end_of_a_thought_takes_back_nothing_that_was_shown():
    turns = turns_of("qwen3")
    growing = Growing(turns, ())
    for token in turns.tokenizer("Yes.\n</think>\nNo.\n</think>\nSo.", add_special_tokens=False)["input_ids"]:
        growing.ids.append(token)
        growing.more()
    whole, _ = said(turns, growing.ids)
    assert whole["content"] == "So." and growing.whole(whole) == {"content": "Yes.", "reasoning": "", "calls": []}


# --------------------------------------------------------------------------------------------- the forms, without a process


def test_items_of_responses_are_messages_of_chat_completions():
    """What an agent sends back in each protocol is the same conversation."""
    calls = [("c1", "calculate", '{"expression": "2*3"}'), ("c2", "calculate", '{"expression": "3*3"}')]
    functions = [{"id": id, "type": "function", "function": {"name": n, "arguments": a}} for id, n, a in calls]
    in_chat = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "I ask.", "tool_calls": functions},
            {"role": "tool", "tool_call_id": "c1", "content": "6"},
            {"role": "tool", "tool_call_id": "c2", "content": "9"},
            {"role": "assistant", "content": "6 and 9."},
            {"role": "user", "content": "So?"},
        ],
        "max_tokens": 7,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer"}}},
    }
    in_responses = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Go."}]},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
            *({"type": "function_call", "call_id": id, "name": n, "arguments": a} for id, n, a in calls),
            {"type": "function_call_output", "call_id": "c1", "output": "6"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "9"}]},
            {"role": "assistant", "content": "6 and 9."},
            {"role": "user", "content": "So?"},
        ],
        "max_output_tokens": 7,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        "text": {"format": {"type": "json_schema", "name": "number", "schema": {"type": "integer"}}, "verbosity": "low"},
    }
    used = [{"type": "tool_use", "id": id, "name": n, "input": json.loads(a)} for id, n, a in calls]
    in_anthropic = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I ask."}, *used],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "6"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "9"}]},
                ],
            },
            {"role": "assistant", "content": "6 and 9."},
            {"role": "user", "content": [{"type": "text", "text": "So?"}]},
        ],
        "max_tokens": 7,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "integer"}}},
    }
    found = [
        protocol.call({"model": "policy"} | given, [])
        for protocol, given in ((chat, in_chat), (responses, in_responses), (anthropic, in_anthropic))
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].messages[0] == {"role": "system", "content": "Be brief."} and found[0].most == 7
    assert found[0].schema == '{"type": "integer"}'
    assert found[0].messages[3:5] == [{"role": "tool", "content": text, "name": "calculate"} for text in "69"]


def test_an_image_is_the_same_in_each_form():
    """In a message of the user, and in a tool's answer."""
    Image.new("RGB", (2, 2), "red").save(file := io.BytesIO(), "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    url = f"data:image/png;base64,{data}"
    source = {"type": "base64", "media_type": "image/png", "data": data}
    shown = {
        chat: [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}],
        responses: [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": url, "detail": "auto"}],
        anthropic: [{"type": "text", "text": "See"}, {"type": "image", "source": source}],
    }
    function = {"name": "look", "arguments": "{}"}
    used = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    further = {
        chat: [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": shown[chat]},
        ],
        responses: [
            {"type": "function_call", "call_id": "c1"} | function,
            {"type": "function_call_output", "call_id": "c1", "output": shown[responses]},
        ],
        anthropic: [
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": shown[anthropic]}]},
        ],
    }
    content = {"content": f"See{pictures.MARK}", "images": [file.getvalue()]}
    asks = {"role": "assistant", "content": "", "calls": [{"name": "look", "arguments": {}}]}
    expected = [{"role": "user"} | content, asks, {"role": "tool", "name": "look"} | content]
    for protocol, more in further.items():
        given = [{"role": "user", "content": shown[protocol]}, *more]
        name = "input" if protocol is responses else "messages"
        assert protocol.call({"model": "policy", name: given}, []).messages == expected


@pytest.mark.parametrize(
    ("protocol", "given", "wrong"),
    [
        (chat, {"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "grammar"}}, "cannot be read"),
        (chat, {"messages": [{"role": "user", "content": "?"}], "n": 0}, "n 0: must be a whole number"),
        (chat, {"messages": [{"role": "user", "content": "?"}], "stop": ["a", ""]}, "texts that are not empty"),
        (anthropic, {"messages": [{"role": "user", "content": "?"}], "stop_sequences": [3]}, "texts that are not empty"),
        (responses, {"input": "?", "text": {"format": {"type": "json_schema"}}}, "cannot be read"),
        (responses, {"input": "?", "conversation": "conv_1"}, "conversation"),
        (responses, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        (responses, {"input": []}, "at least one item"),
        (responses, {"input": "?", "previous_response_id": "resp_3"}, "cannot be read"),
        (anthropic, {"messages": [{"role": "robot", "content": "?"}]}, "cannot be read"),
        (anthropic, {"messages": []}, "at least one message"),
    ],
)
def test_what_is_not_possible_is_refused_in_words(protocol, given, wrong):
    with pytest.raises(Refused, match=wrong) as refused, reading():
        protocol.call({"model": "policy"} | given, [])
    assert refused.value.status == 400


def test_a_previous_response_is_continued_with_this_call_s_instructions():
    """The names of its tools are known by their ids."""
    before = [
        {"role": "system", "content": "Old."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "calls": []},
    ]
    answer = Answer(0, 0, 5, 3, calls=[{"name": "calculate", "arguments": {}}], is_whole=True)
    output = {"type": "function_call_output", "call_id": "call_0_0", "output": "6"}
    given = {"model": "policy", "previous_response_id": "resp_0", "input": [output]}
    tool = {"role": "tool", "content": "6", "name": "calculate"}
    assert responses.call(given, [(before, answer)]).messages == [*before, tool]
    new = responses.call(given | {"instructions": "New."}, [(before, answer)]).messages
    assert new == [{"role": "system", "content": "New."}, *before[1:], tool]


@pytest.mark.parametrize(("protocol", "name"), [(chat, "stop"), (anthropic, "stop_sequences")])
@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_the_turn_and_is_not_in_its_text(protocol, name, streams):
    """Nor is anything that may become one shown. The next call sends the text back without it, and continues the tokens."""
    text, seen = "I look.\nObserve it.\nObservation: 6", []

    async def play() -> tuple[dict, dict, list]:
        of, session = await begun()
        go = {"role": "user", "content": "Go."}
        given = {"model": "policy", "messages": [go], "stream": streams, name: ["Observation:", "Never"]}
        call = protocol.call(given, [])

        async def heard() -> list:
            found = [piece async for piece in session.pieces(call)]
            seen.extend(text for _, text, _ in found)
            return [found[-1][2]]

        calling = asyncio.create_task(heard())
        first = await session.ask(RESET)
        for token in ids_of(text) if streams else ():
            await of.order("parts", parts={session.key: [token]})
            await asyncio.sleep(0)
        step = asyncio.create_task(session.ask({"do": "step", "ids": ids_of(text)}))
        answers = await calling
        back = [go, {"role": "assistant", "content": answers[0].content}, {"role": "user", "content": "So?"}]
        calling = asyncio.create_task(anext(session.pieces(protocol.call(given | {"messages": back}, []))))
        second = await step
        calling.cancel()
        return first, second, answers

    first, second, answers = asyncio.run(play())
    assert first["stop"] == second["stop"] == ("Observation:", "Never")
    assert second["history"] == 0
    assert second["ids"] == turns_of("qwen2_5").between([{"role": "user", "content": "So?"}], is_cut=True)
    body = protocol.body(answers)
    if protocol is chat:
        said, reason = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
    else:
        said, reason = body["content"][0]["text"], body["stop_reason"]
        assert body["stop_sequence"] == "Observation:"
    assert said == "I look.\nObserve it." and reason == {chat: "stop", anthropic: "stop_sequence"}[protocol]
    assert not streams or ("".join(seen) == said and len(seen) > 5)


def test_several_answers_to_a_call_are_forks_of_it():
    """n: each with its own tokens, and in a stream with its own index."""

    async def play(streams: bool) -> tuple[list[dict], list]:
        of, session = await begun()
        given = {"model": "policy", "messages": [{"role": "user", "content": "Go."}], "n": 3, "stream": streams}
        call = chat.call(given | {"stream_options": {"include_usage": True}}, [])
        many = chat.events(call, session.pieces(call)) if streams else session.pieces(call)

        async def heard() -> list:
            return [item async for item in many]

        calling = asyncio.create_task(heard())
        found = [await session.ask(RESET)]
        for text in ("One.", "Two.", "Three."):
            if streams:
                await of.order("parts", parts={session.key: ids_of(text)})
                await asyncio.sleep(0)
            step = asyncio.create_task(session.ask({"do": "step", "ids": ids_of(f"{text}<|im_end|>")}))
            if text != "Three.":
                found.append(await step)
        answers = await calling
        step.cancel()
        return found, answers

    found, answers = asyncio.run(play(streams=False))
    assert [answer["history"] for answer in found] == [0, 1, 2] and found[1]["ids"] == found[0]["prompt"]
    body = chat.body([answer for kind, _, answer in answers if kind == "end"])
    assert [choice["message"]["content"] for choice in body["choices"]] == ["One.", "Two.", "Three."]
    assert body["usage"]["prompt_tokens"] == len(found[0]["prompt"])
    _, events = asyncio.run(play(streams=True))
    texts = {0: "", 1: "", 2: ""}
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: "One.", 1: "Two.", 2: "Three."} and events[-1] == "[DONE]"
