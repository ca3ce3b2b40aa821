"""A grader of programs that a model wrote, which imports nothing of the rest of this project. It needs Linux and bubblewrap:

    from program_grader import grade

    grade("```python\\nprint(2 * int(input()))\\n```", {"inputs": ["4"], "outputs": ["8"]})  # {"score": 1.0, "acc": 1.0, ...}

verdict.py finds the program in a response and cases.py reads the tests. sandbox.py runs the program, inside.py is the first
process in the sandbox, and calls.py lists the system calls that are refused.
"""

from program_grader.sandbox import NoSandbox, Ran, Sandbox, check, run
from program_grader.verdict import extract, grade

__all__ = ["NoSandbox", "Ran", "Sandbox", "check", "extract", "grade", "run"]
