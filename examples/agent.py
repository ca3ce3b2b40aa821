"""An agent that owns its loop: it asks the model, runs the tool calls itself, and scores the answer.

    torchrun --standalone --nproc-per-node 2 train_async.py --model demo-calculator --agent 'python examples/agent.py' \
        --max-response-length 24 --train-batch-size 16 --total-training-steps 40

It is started for each response. Any client of OpenAI's chat completions will do; the standard library starts fastest. See
docs/agents.md.
"""

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string", "description": "Two numbers with *."}}}
TOOL = {"type": "function", "function": {"name": "calculate", "description": "Computes.", "parameters": PARAMETERS}}


def ask(messages: list[dict]) -> dict:
    """Return the model's next message."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [TOOL]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def calculate(expression: str) -> str:
    """Return the product of two numbers: the model's tool."""
    a, b = expression.split("*")
    return str(int(a) * int(b))


def answer(messages: list[dict]) -> str:
    """Return the model's final answer, after running its tool calls."""
    while "tool_calls" in (said := ask(messages)):
        messages.append(said)
        for call in said["tool_calls"]:
            try:
                result = calculate(**json.loads(call["function"]["arguments"]))
            except (TypeError, ValueError) as error:
                result = f"error: {type(error).__name__}: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return said["content"]


if __name__ == "__main__":
    row = json.load(sys.stdin)  # the columns of the data, and ground_truth
    with contextlib.suppress(urllib.error.HTTPError):  # the response's budget is used up
        print(json.dumps({"reward": float(answer(row["prompt"]) == row["ground_truth"])}))
