"""An agent of OpenAI's Agents SDK, unchanged: its default model, which speaks the Responses API, is the policy.

    python -m venv sdk && sdk/bin/pip install openai-agents      # apart from the run's own packages
    torchrun --standalone --nproc-per-node 2 train_async.py --model demo-calculator \
        --agent 'sdk/bin/python examples/openai_agent.py' --max-response-length 24 --train-batch-size 16

Its import takes seconds for each response: a worker of --serve-policy, as worker.py, would import it once.
"""

import json
import os
import sys

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # it would send traces to OpenAI

from agents import Agent, Runner, function_tool
from openai import BadRequestError


@function_tool
def calculate(expression: str) -> str:
    """Computes."""
    a, b = expression.split("*")
    return str(int(a) * int(b))


if __name__ == "__main__":
    row = json.load(sys.stdin)
    try:
        result = Runner.run_sync(Agent("calculator", tools=[calculate]), row["prompt"])
    except BadRequestError:  # the response's budget is used up
        sys.exit()
    print(json.dumps({"reward": float(result.final_output == row["ground_truth"])}))
