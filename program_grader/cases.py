"""A row's tests, read in the layouts of known data sets of programming tasks, and whether a program's output passes them."""

import contextlib
import json
import math
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One test: what Sandbox.run gives to the program, and the output, or a function's value, that is right."""

    task: dict[str, Any]
    expected: Any = None

    def passes(self, output: str) -> bool:
        """Return whether a program that ended without an error and printed this output passes."""
        if "stdin" in self.task:
            return same_text(output, self.expected)
        try:
            answer = json.loads(output)
        except (ValueError, RecursionError):
            return False
        if "checks" in self.task:
            return answer == {"passed": True}
        return isinstance(answer, dict) and "value" in answer and same_value(answer["value"], self.expected)


def read_cases(truth: Any) -> list[Case]:
    """Return the tests of a ground truth, which may be JSON. Raise ValueError if it has none in a known layout.

    Layouts: {"inputs", "outputs", "fn_name"} (APPS, TACO, verl's prime_code), also within "input_output"; a list of {"input",
    "output", "testtype", "metadata"} (LiveCodeBench); asserts, as a list or under "test_list" (MBPP) or "assert_case" (verl's
    sandbox_fusion); {"test", "entry_point"} (HumanEval)."""
    truth = json.loads(truth) if isinstance(truth, str) else truth
    if isinstance(truth, dict) and truth.get("input_output"):
        return read_cases(truth["input_output"])
    if isinstance(truth, list) and truth:
        of_strings = all(isinstance(case, str) for case in truth)
        return read_cases({"test_list": truth}) if of_strings else [_of_live_code_bench(case) for case in truth]
    if not isinstance(truth, dict):
        raise ValueError(f"the ground truth {truth!r:.100} has no tests")
    if truth.get("test") and truth.get("entry_point"):
        return [Case({"checks": f"{truth['test']}\ncheck({truth['entry_point']})"})]
    asserts = truth.get("test_list") or truth.get("assert_case") or []
    asserts = [text for text in ([asserts] if isinstance(asserts, str) else asserts) if text]
    if asserts:
        before = truth.get("test_setup_code") or "\n".join(truth.get("test_imports") or ())
        return [Case({"checks": f"{before}\n{text}"}) for text in asserts]
    inputs, outputs = list(truth.get("inputs") or ()), list(truth.get("outputs") or ())
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs: {truth!r:.100}")
    return [_case(truth.get("fn_name"), given, expected) for given, expected in zip(inputs, outputs, strict=True)]


def _of_live_code_bench(case: Any) -> Case:
    if not isinstance(case, dict) or not case.keys() >= {"input", "output"}:
        raise ValueError(f"the ground truth has a test {case!r:.100}, without input and output")
    name = (case.get("metadata") or {}).get("func_name") or case.get("fn_name")
    if case.get("testtype") == "functional" and not name:
        raise ValueError('the ground truth has a functional test without "metadata": {"func_name": ...}')
    return _case(name if case.get("testtype") != "stdin" else None, case["input"], case["output"])


def _case(function: str | None, given: Any, expected: Any) -> Case:
    if function:
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
        return Case({"function": function, "arguments": arguments}, _from_json(expected))
    expected, given = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (expected, given))
    return Case({"stdin": given}, expected)


def _from_json(value: Any) -> Any:
    """Return the value of a text that is JSON; anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def same_text(output: str, expected: str) -> bool:
    """Compare the non-empty lines word by word. A fraction may be off by 1e-5, and 3.0 is right if 3 is expected. (verl's
    prime_code also accepts integers that are off by 1e-5, and allows only one number per line.)"""
    lines, wanted = ([line.split() for line in text.splitlines() if line.strip()] for text in (output, expected))
    return len(lines) == len(wanted) and all(
        len(words) == len(its) and all(map(_same_word, words, its)) for words, its in zip(lines, wanted, strict=True)
    )


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    integers = [text.lstrip("+-").isdigit() for text in (word, wanted)]
    try:
        return not all(integers) and _close(float(word), float(wanted), exactly=integers[1])
    except ValueError:
        return False


def _close(number: float, wanted: float, exactly: bool = False) -> bool:
    with contextlib.suppress(OverflowError):  # an integer beyond any float
        if math.isfinite(number) and math.isfinite(wanted):
            return number == wanted if exactly else math.isclose(number, wanted, rel_tol=1e-5, abs_tol=1e-8)
    return False


def same_value(value: Any, expected: Any) -> bool:
    """Return whether JSON values are equal; fractions may be off by 1e-5. As in verl's prime_code, an expected list may hold
    the value."""
    return _same_json(value, expected) or (isinstance(expected, list) and bool(expected) and _same_json(value, expected[0]))


def _same_json(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_json, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_json(value[key], expected[key]) for key in value)
    if isinstance(expected, float) and isinstance(value, int | float):
        return _close(value, expected)
    return value == expected
