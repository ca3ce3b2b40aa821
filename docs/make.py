"""Pages out of the code: what each file and test does, which flags a paper has, verl's keys, TRL's words, the lines of folders.

    python docs/make.py

`python benchmarks/table.py` writes docs/generated/benchmarks.md.
"""

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

import losses
from tools.from_verl import programs
from tools.from_verl.environment import VARIABLES
from tools.from_verl.table import NOT_HERE, NOT_NEEDED, OWN, TABLE, Row
from tools.from_verl.verl_run import SYNC

ROOT = Path(__file__).resolve().parents[1]
HOUSES = ("rl", "user_processes", "tools")
PACKAGES = ("math_grader", "program_grader")  # that import nothing of ours
TRL_WORDS = ROOT / "docs" / "trl_words.yaml"
NOTE = "<!-- made by `python docs/make.py` out of docstrings; edit those -->"


def first_paragraph(file: Path) -> str:
    """Of the file's docstring, on one line that fits a table."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", r"\|")


def section(title: str, head: str, files: Iterable[Path], folder: Path) -> list[str]:
    rows = [f"| `{file.relative_to(folder)}` | {first_paragraph(file)} |" for file in files]
    return [f"## {title}", "", f"| {head} | |", "|---|---|", *rows, ""]


def promises() -> str:
    """What each test file checks."""
    lines = ["# What each test file checks", "", NOTE, ""]
    for folder in sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir()):
        if files := sorted(folder.glob("test_*.py")):
            lines += section(folder.name, "test", files, ROOT)
    return "\n".join(lines)


def code_map() -> str:
    """What each file of rl/, tools/ and the graders does, folder by folder."""
    lines = ["# What each file does", "", NOTE, "", "Back to [design.md](../design.md), which has the ideas.", ""]
    scripts = [*sorted(ROOT.glob("train_*.py")), *sorted(path for path in ROOT.glob("*.py") if "train" not in path.name)]
    lines += section("Scripts", "file", scripts, ROOT)
    folders = sorted({file.parent for house in HOUSES for file in (ROOT / house).rglob("*.py")})
    for folder in [*folders, *(ROOT / name for name in PACKAGES)]:
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        text = first_paragraph(folder / "__init__.py")
        head, _, *rows = section(f"{folder.relative_to(ROOT)}/", "file", files, folder)
        lines += [head, "", *([text, ""] if text else []), *rows]
    return "\n".join(lines)


def trl_words() -> str:
    """What each of TRL's words is here."""
    lines = ["# TRL's words, and what they are here", "", "<!-- made by `python docs/make.py` out of trl_words.yaml -->", ""]
    lines += ["Back to [from-verl.md](../from-verl.md), which has what is more than another name.", ""]
    lines += ["| TRL | here |", "|---|---|"]
    for word, here in yaml.safe_load(TRL_WORDS.read_text()).items():
        flags = re.sub(r"--[a-z0-9-]+", lambda flag: f"`{flag[0]}`", here)
        lines.append(f"| `{word.replace('-', '_')}` | {flags} |")
    return "\n".join(lines) + "\n"


VERL_KEYS = """# verl's programs, keys and variables, and what each is here

<!-- made by `python docs/make.py` out of tools/from_verl -->

`A.` is `actor_rollout_ref.`; verl's defaults are in brackets. `-` means that nothing has to be set, and says why. "not here"
means that the feature is missing. Where verl has a flag for each role (actor, ref, rollout), there is one here.
Back to [from-verl.md](../from-verl.md).

"""


def verl_keys() -> str:
    """What each of verl's programs and keys, and each variable that its scripts export, is here."""
    out = ["### Programs", "| part of the module's name | here |", "|---|---|"]
    for part, script in programs.TRAINERS.items():
        out.append(f"| `{part}` | `{script}`{', unless keys say otherwise' * (script == SYNC)} |")
    out += [
        f"| {', '.join(f'`{name}`' for name in row.names)} | refused: it {row.what}. Instead: {row.instead} |"
        for row in programs.OTHERS
    ]
    out += ["| any other | refused by its name |", ""]
    for title, rows in (TABLE | {"Supervised training: keys of its own": OWN}).items():
        out += [f"### {title}", "| verl | here |", "|---|---|"]
        out += [f"| {_names(row)} | {_here(row)} |" for row in rows] + [""]
    out += ["### Environment variables", "| variable | here |", "|---|---|"]
    for row in VARIABLES:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        part = f" with `{row.part}`" if row.part else ""
        out.append(f"| {names}{part} | {row.verdict}: {row.why} |")
    return VERL_KEYS + "\n".join(out) + "\n"


def _names(row: Row) -> str:
    """Every name of every key; verl's default behind the first."""
    out = []
    for names in row.names:
        default = f" ({_value(row.defaults[names[0]])})" if names[0] in row.defaults else ""
        shown = [f"`{name.replace('actor_rollout_ref.', 'A.', 1)}`" for name in names]
        out.append(shown[0] + default + (f" or {', '.join(shown[1:])}" if shown[1:] else ""))
    return ", ".join(out)


def _value(value: object) -> str:
    return {None: "null"}.get(value, str(value)) if not isinstance(value, list) else f"[{', '.join(map(str, value))}]"


def _here(row: Row) -> str:
    if row.kind == NOT_NEEDED:
        return f"-: {row.note}"
    if row.kind == NOT_HERE:
        return f"not here: {row.note}"
    flags = ", ".join(f"`{flag}`" for flag in row.flags.split(", ") if flag)
    return flags + (": " if flags and row.note else "") + row.note


READING = (  # what somebody wants to read about -> the files, as a shell writes them; a file is in the first row that names it
    (
        "one step of `train_sync.py`",
        {
            "the algorithm, and every formula": "train_sync.py losses.py",
            "samples -> mini-batches -> gradients": "rl/learning/{batch,learner}.py "
            "rl/algorithm/{whole_batch,metrics,health,args}.py",
            "the forward pass over packed rows": "rl/model/{policy,attention,packing}.py rl/ranks/shards.py",
            "prompts -> responses": "rl/generation/{generator,embedded,engine}.py "
            "rl/data/{prompts,tables}.py rl/samples/{group,schedule}.py",
            "responses -> scores": "rl/rewards/{pool,score,args}.py",
            "new weights, logs, the clock": "rl/training_run.py rl/setup.py rl/record/run.py "
            "rl/background.py rl/samples/recorder.py rl/ranks/{timers,dist,device,stops,watchdog}.py",
        },
    ),
    (
        "what the other scripts add",
        {
            "splitting the ranks: tickets, ring, publishes": "train_one_step_off.py train_async.py "
            "rl/{split*,generator_loop}.py rl/{samples,weights,transport}/* rl/algorithm/staleness.py",
            "answers, a teacher, a critic": "train_sft.py rl/supervised.py rl/algorithm/{critic,teacher,no_signal}.py "
            "rl/data/{demonstrations,teacher_prompts}.py",
        },
    ),
    (
        "what a flag or a model adds",
        {
            "vLLM": "rl/generation/vllm/*",
            "tools, environments, agents": "rl/generation/*episodes.py rl/environments/*",
            "images": "rl/images.py rl/data/image_prompts.py rl/learning/batch_images.py rl/model/vision_forward.py",
            "mixtures of experts": "rl/model/{router,grouped_experts,expert_parallel}.py",
            "gated delta nets": "rl/model/hybrid/*",
            "LoRA": "rl/learning/adapters.py",
            "memory, kernels, long sequences": "rl/learning/compact_adamw.py "
            "rl/model/{log_probs,sequence_parallel,attention_kernels,liger,compiled,sampling_mask}.py",
            "reward functions of your own": "rl/rewards/*",
            "replay": "replay.py",
        },
    ),
    (
        "before, after and around the steps",
        {
            "the command line": "rl/{flags,flags_help,parts,ranges,errors,printable}.py rl/algorithm/*",
            "data": "rl/data/*",
            "loading a model": "rl/model/* rl/learning/* rl/generation/* rl/hub.py",
            "checkpoints": "rl/checkpoint/*",
            "what a run writes down": "rl/record/* rl/masking.py",
            "how processes start, fail and end": "rl/ranks/* rl/*",
        },
    ),
    (
        "programs of their own",
        {
            "reward functions, environments, agents": "user_processes/{*,*/*}",
            "right or wrong; programs in a sandbox": "math_grader/* program_grader/*",
            "memory and time before a run": "plan.py tools/plan/*",
            "what a run wrote": "view.py tools/view/*",
            "what made a step": "why.py",
            "what a reward function pays": "rehearse.py tools/rehearse/*",
            "runs compared": "report.py tools/report/*",
            "does it work on this machine?": "doctor.py tools/doctor/*",
            "verl's commands": "tools/from_verl/* tools/*",
        },
    ),
)


def spelled_out(patterns: str) -> set[Path]:
    """Return the files of patterns such as "rl/data/{images,tools}.py rl/hub.py". Raise ValueError for one without a file."""
    found = set()
    for pattern in patterns.split():
        before, brace, rest = pattern.partition("{")
        inside, _, after = rest.partition("}")
        for one in [before + name + after for name in inside.split(",")] if brace else [pattern]:
            files = {file for file in ROOT.glob(one) if file.suffix == ".py"}
            if not files:
                raise ValueError(f"READING in docs/make.py names {one}, which is no file")
            found |= files
    return found


def reading() -> dict[str, dict[str, set[Path]]]:
    """Return the files of each row of READING. Raise ValueError for a file that none names."""
    houses = {path for house in (*HOUSES, *PACKAGES) for path in (ROOT / house).rglob("*.py")}
    left = {*houses, *ROOT.glob("*.py")}
    rows = {}
    for title, parts in READING:
        rows[title] = {}
        for what, patterns in parts.items():
            rows[title][what] = spelled_out(patterns) & left
            left -= rows[title][what]
    if left:
        raise ValueError(f"READING in docs/make.py has no row for {', '.join(str(file.relative_to(ROOT)) for file in left)}")
    return rows


def lines_of(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def design() -> str:
    """The page with its table of what to read. A number of lines is only changed where it is a tenth off."""
    before, begin, rest = (ROOT / "docs" / "design.md").read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    said = {what: int(lines.replace(",", "")) for what, lines in re.findall(r"^\| ([^|]+) \|.*?([\d,]+)\*{0,2} \|$", old, re.M)}

    def shown(what: str, files: Iterable[Path]) -> str:
        now = lines_of(files)
        return f"{said[what] if abs(now - said.get(what, 0)) < 0.1 * now else round(now, -1):,}"

    lines = ["", "", "| to read about | open | files | lines |", "|---|---|---|---|"]
    patterns = {what: text for _, parts in READING for what, text in parts.items()}
    for title, rows in reading().items():
        files = set().union(*rows.values())
        lines.append(f"| **{title}** | | **{len(files)}** | **{shown(f'**{title}**', files)}** |")
        for what, its in rows.items():
            opened = " ".join(f"`{pattern}`" for pattern in patterns[what].split())
            lines.append(f"| {what} | {opened} | {len(its)} | {shown(what, its)} |")
    return before + begin + "\n".join([*lines, "", ""]) + end + after


BEGIN = "<!-- made by `python docs/make.py` out of READING in it -->"
END = "<!-- end of what docs/make.py makes -->"

OTHER_FLAGS = {  # functions of losses.py that have a paper, and that no word of a flag chooses -> their flags, or forks
    "denominator": "--loss-agg-mode seq-mean-token-sum-norm",
    "k3": "--kl-loss-type k3",
    "score_centering": "score_centering.diff",
    "kl_penalty": "--kl-loss-type k3r",
    "adaptive_kl_coef": "adaptive_kl.diff",
    "adaptive_entropy_coef": "entropy_target.diff",
    "reverse_kl_advantage": "--teacher self --teacher-prompt '{prompt} {answer}'",
    "top_k_reverse_kl": "--teacher-top-k 20",
    "value_loss": "--cliprange-value 0.5",
    "lambda_return": "--lam 0.95",
    "gdpo": "gdpo.diff",
    "optimal_token_baseline": "optimal_token_baseline.diff",
    "high_entropy_tokens": "top_entropy.diff",
    "off_policy_tokens": "off_policy_mask.diff",
    "rollout_is_weights": "--rollout-is token --rollout-is-threshold 0.5_5.0",
    "rollout_rejection_mask": "--rollout-rs batch_k2 --rollout-rs-threshold 0.02",
}
ELSEWHERE = [  # what is no formula of losses.py: what, arXiv, place there, flag
    ("DAPO's dynamic sampling", "2503.14476", "section 3.2", "--filter-groups"),
    ("DAPO's overlong reward shaping", "2503.14476", "eq. 13", "--overlong-buffer-len"),
    ("GRESO", "2506.02177", "-", "greso.diff"),
    ("AReaL's bound of staleness", "2505.24298", "eq. 3", "--staleness-threshold"),
    ("Rollout routing replay", "2510.11370", "-", "--router-replay R3"),
    ("DeepSeek-V3.2's keep sampling mask", "2512.02556", "section 3.1", "--keep-sampling-mask"),
]


def formulas() -> dict[str, str]:
    """Functions of losses.py -> the flags that choose them; "" for one that has none."""
    found = dict(OTHER_FLAGS)
    for flag, words in (("--adv-estimator", losses.ADVANTAGES), ("--loss-mode", losses.POLICY_LOSSES)):
        for word, entry in words.items():
            if word == entry.function.__name__ and word not in found:  # not verl's other name
                found[word] = f"{flag} {word}"
    return found


NUMBERS = r"\d+(?:\.\d+)*"
PLACE = rf"(?:eqs?\.|section|algorithm) {NUMBERS}(?: (?:and|to) {NUMBERS})?"  # in a paper


def papers() -> str:
    """Which flags a paper has, newest first: a docstring in losses.py says "NAME, arXiv NUMBER, PLACE" in a clause of its own;
    the place, such as eq. 7, is missing where nobody has looked it up."""
    rows = [_paper(*row[:3], f"`{row[3]}`") for row in ELSEWHERE]
    for name, flags in formulas().items():
        for clause in re.split(r"(?<=[.;:(])(?<!eq\.)(?<!eqs\.) ", " ".join(getattr(losses, name).__doc__.split())):
            if found := re.search(rf"^\(?(.*), arXiv (\d{{4}}\.\d{{5}})(?:, ({PLACE}))?", clause):
                rows.append(_paper(found[1], found[2], found[3] or "-", f"`{flags}`"))
    rows = [row for _, row in sorted(rows, key=lambda row: row[0], reverse=True)]
    note = "<!-- made by `python docs/make.py` out of losses.py -->"
    back = "Back to [algorithms.md](../algorithms.md). A name that ends in `.diff` is a fork's (examples/forks)."
    return "\n".join(
        ["# Papers, and their flags", "", note, "", back, "", "| what | arXiv | there | here |", "|---|---|---|---|", *rows, ""]
    )


def _paper(what: str, number: str, place: str, here: str) -> tuple[str, str]:
    """(arXiv number, row of the table)."""
    return number, f"| {what} | [{number}](https://arxiv.org/abs/{number}) | {place} | {here} |"


PAGES = {
    "design.md": design,
    "generated/code-map.md": code_map,
    "generated/papers.md": papers,
    "generated/promises.md": promises,
    "generated/trl-words.md": trl_words,
    "generated/verl-keys.md": verl_keys,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page())
