"""A tool that runs the model's Python in a sandbox: --tools examples/python_tool.py:python"""

from program_grader import NoSandbox, check, run
from rl.errors import UserError

SECONDS = 10
LONGEST = 4000  # characters that the model reads

try:
    check()
except NoSandbox as error:
    raise UserError(str(error)) from None


def python(code: str) -> str:
    """Runs a Python program and returns what it prints. There is no network; files in /tmp last until the program ends.

    Args:
        code: The program. It must print what you want to know.
    """
    try:
        ran = run(code, seconds=2 * SECONDS, cpu=SECONDS, errors=True)
    except NoSandbox as error:  # the machine's fault: no answer for the model
        raise OSError(str(error)) from None
    text = ran.output if len(ran.output) <= LONGEST else f"{ran.output[:LONGEST]}... (cut)"
    return text if ran.ended in ("ok", "error", "syntax") else f"{text}\nerror: {ran.ended} limit"
