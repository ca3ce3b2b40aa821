"""Prompts: verl's layout and plain questions, the endless order, and one clear message for each kind of unusable input. Rows
may lack what an environment brings; a plain string begins with one BOS, whether the tokenizer adds it or the string has it."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import GSM8K
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import train_sync
from examples.demo.sums import build_tokenizer
from rl import parts
from rl.data.args import DataArgs
from rl.data.files import read_table
from rl.data.prompts import PromptDataset, PromptOrder
from rl.data.tables import ENVIRONMENT
from rl.environments import named
from rl.errors import UserError

TOKENIZER = build_tokenizer()


def dataset(*files, split="train", tokenizer=TOKENIZER, brought=frozenset(), **flags):
    return PromptDataset([str(f) for f in files], split, tokenizer, DataArgs(**flags), None, {"": (None, brought)})


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if path.suffix == ".jsonl" else json.dumps(rows, indent=1))
    return path


def parquet(path, *given, rows=None, **columns):
    table = pa.Table.from_pylist(given).slice(0, rows)
    for name, values in columns.items():
        table = table.append_column(name, values)
    pq.write_table(table, path)
    return path


def verl_row(prompt, truth="46", source="demo"):
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}}


CHAT = [{"role": "user", "content": "12+34="}]


@given(st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_the_order_is_endless_and_each_epoch_a_permutation(n, seed, shuffle):
    order, again = PromptOrder(n, seed, shuffle), PromptOrder(n, seed, shuffle)
    drawn = [order(ticket) for ticket in range(3 * n)]
    for epoch in range(3):
        part = drawn[epoch * n : (epoch + 1) * n]
        assert {e for e, _ in part} == {epoch} and sorted(i for _, i in part) == list(range(n))
    assert [again(ticket) for ticket in reversed(range(3 * n))] == drawn[::-1], "a ticket's place depends on nothing but itself"
    if not shuffle:
        assert [i for _, i in drawn] == list(range(n)) * 3


def test_epochs_and_seeds_differ():
    order = PromptOrder(100, seed=1)
    orders = {tuple(PromptOrder(100, seed)(t + 100 * epoch)[1] for t in range(100)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4 and order(10**9)[0] == 10**7


def test_plain_question_and_answer(tmp_path):
    (row,) = dataset(write(tmp_path / "a.jsonl", {"question": "1+1=", "answer": "1+1 is\n#### 1,002"}))
    assert row.row["prompt"] == [{"role": "user", "content": "1+1="}]  # for an environment, which may add messages
    assert row.ground_truth == "1002" and row.data_source == "openai/gsm8k"
    assert row.text == "<|user|>1+1=<|assistant|>"
    (row,) = dataset(write(tmp_path / "b.jsonl", {"question": "1+1=", "answer": "(3, 4)", "data_source": "math"}))
    assert row.ground_truth == "(3, 4)", "only GSM8K's numbers have commas to drop"


def test_too_long_prompts(tmp_path):
    file = write(tmp_path / "a.jsonl", verl_row("1+1="), verl_row("1234567890+1="), verl_row("2+2="))
    with pytest.raises(UserError, match=r"a\.jsonl row 1.* 13 tokens.*--max-prompt-length 8.*--filter-overlong-prompts"):
        dataset(file, max_prompt_length=8)
    assert [r.text for r in dataset(file, max_prompt_length=8, filter_overlong_prompts=True)] == ["1+1=", "2+2="]
    for limit, truncation, text in [(8, "left", "67890+1="), (8, "right", "12345678"), (1, "left", "="), (1, "right", "1")]:
        rows = dataset(file, max_prompt_length=limit, truncation=truncation)
        assert rows[1].text == text and rows.truncated == (1 if limit == 8 else 3)
    assert dataset(file, max_prompt_length=13).truncated == 0
    with pytest.raises(UserError, match="no prompt is left of 3"):
        dataset(file, max_prompt_length=2, filter_overlong_prompts=True)


def test_max_samples_and_prompt_key(tmp_path):
    file = write(tmp_path / "a.jsonl", *({"q": f"{i}+1=", "ground_truth": str(i + 1), "data_source": "demo"} for i in range(5)))
    rows = dataset(file, prompt_key="q", train_max_samples=2)
    assert [r.text for r in rows] == ["0+1=", "1+1="] and rows[1].ground_truth == "2"


MIXED = {  # truths of two rows -> what pyarrow says of them
    "text and a number": (["007", 7], "7"),
    "a number and text": ([7, "007"], "'007'"),
    "a word that is JSON": (["[1, 2]", {"a": 1}], "cannot mix"),
    "null as text": ([True, "null"], "'null'"),
    "a truth and a number": ([True, 1], "bool"),
    "an integer of more than 64 bits": ([1, 12345678901234567890123], "too large"),
    "an integer and a fraction": ([2**53 + 1, 1.5], "9007199254740993"),
    "in a list": ([["x"], ["1", 2]], "int"),
    "half a character": (["1", "\ud83d"], "ud83d"),
}


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_value_of_another_kind_is_named(name, case, tmp_path):
    """datasets silently converts the values of a JSON column to one kind."""
    truths, message = MIXED[case]
    file = write(tmp_path / name, *(verl_row("1+1=", truth) for truth in truths))
    with pytest.raises(UserError, match=rf"{name}: column 'reward_model' cannot be read \(.*{message}"):
        dataset(file)


@pytest.mark.parametrize("rows", [[1, 2], [1, 2.5], ["x", None], [{"a": 1}, {"b": "x"}], [{}, {"a": []}], [[1], []]])
def test_values_that_are_read_as_written_are_taken(rows, tmp_path):
    read = read_table(str(write(tmp_path / "a.jsonl", *({"a": value} for value in rows))), "train")
    assert [row["a"] for row in read] == rows or isinstance(rows[0], dict)  # keys of other rows are null


def test_json_over_several_lines(tmp_path):
    (tmp_path / "a.json").write_text("\n".join(json.dumps({"a": value}, indent=1) for value in ("1", "2\u2028")))
    assert [row["a"] for row in read_table(str(tmp_path / "a.json"), "train")] == ["1", "2\u2028"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_text_that_looks_like_a_time_stays_text(name, tmp_path):
    """datasets makes times of a JSON column of dates alone."""
    dates = ["2021-05-01", "2021-05-02T10:00:00Z", "2021-05-03 11:12:13"]
    rows = [verl_row("1+1=", date) | {"extra_info": {"of": [{"day": date}]}} for date in dates]
    read = dataset(write(tmp_path / name, *rows))
    assert [row.ground_truth for row in read] == dates and read[1].extra_info["of"] == [{"day": dates[1]}]


def test_what_is_not_taken_is_not_looked_at(tmp_path):
    good, bad = (
        write(tmp_path / "a.jsonl", verl_row("1"), verl_row("2"), verl_row("3", None, source=None)),
        tmp_path / "b.jsonl",
    )
    write(bad, verl_row("4", None))
    rows = dataset(good, bad, train_max_samples=2)
    assert [r.text for r in rows] == ["1", "2"] and rows.sources() == {"demo": f"{good} row 0"}
    with pytest.raises(UserError, match=r"a\.jsonl row 2: data_source is None"):
        dataset(good, bad, train_max_samples=3)


def test_many_rows_are_the_rows_one_by_one(tmp_path, capsys):
    """More rows than are tokenised at once, in both layouts, from two files."""
    texts = [f"{i}+{i}=" for i in range(1300)]
    strings = write(tmp_path / "a.jsonl", *(verl_row(text, str(i)) for i, text in enumerate(texts)))
    chats = write(tmp_path / "b.jsonl", *(verl_row([{"role": "user", "content": text}], "1") for text in texts))
    rows = dataset(strings, chats, max_prompt_length=10, filter_overlong_prompts=True)
    short = [text for text in texts if len(text) <= 8]  # two tokens come with a chat
    assert [r.text for r in rows] == texts + [f"<|user|>{text}<|assistant|>" for text in short]
    assert rows[7].ids == TOKENIZER.encode("7+7=") and rows[1299].ground_truth == "1299"
    assert rows[1300].where == f"{chats} row 0"
    chat = [{"role": "user", "content": texts[0]}]
    assert rows[1300].ids == TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_images_are_refused_rather_than_ignored(tmp_path):
    geo3k = GSM8K.parent / "geo3k" / "train.parquet"
    if not geo3k.exists():
        pytest.skip(f"no geometry problems at {geo3k}")
    with pytest.raises(UserError, match=r"train\.parquet row 0: the prompt has images, which --model does not take"):
        dataset(geo3k)
    rows = [{**verl_row("1+1="), "images": []}, {**verl_row("2+2="), "images": []}]
    assert len(dataset(write(tmp_path / "a.jsonl", *rows))) == 2


DATA_SOURCE = {"data_source": "d"}
GOOD = verl_row("1")
QUESTION = {"question": "1", "answer": "#### 1"}
BAD_ROWS = {  # rows of x.jsonl -> what is said
    "missing column": ([{"text": "1"} | DATA_SOURCE], "x.jsonl.*'prompt'.*data_source, text"),
    "no truth": ([{"prompt": "1"} | DATA_SOURCE], "x.jsonl: no ground truth"),
    "null truth": ([GOOD, verl_row("1", None)], "x.jsonl row 1: no ground truth"),
    "no source": ([{"prompt": "1", "ground_truth": "1"}], "x.jsonl.*'data_source'.*--reward"),
    "blank truth": ([GOOD, verl_row("1", " ")], "x.jsonl row 1: no ground truth"),
    "nothing behind the mark": ([QUESTION, QUESTION | {"answer": "so #### "}], "x.jsonl row 1: no ground truth"),
    "null reward_model": ([GOOD, {"prompt": "1", "reward_model": None} | DATA_SOURCE], "x.jsonl row 1: no ground truth"),
    "truth in another column": (
        [verl_row("1", None) | {"ground_truth": "1"}, verl_row("1", None) | {"ground_truth": None}],
        "x.jsonl row 1: no ground truth",
    ),
    "an empty list": ([verl_row("1", ["1"]), verl_row("1", [])], "x.jsonl row 1: no ground truth"),
    "a reward_model of text": (
        [GOOD | {"reward_model": '{"ground_truth": "1"}'}],
        "x.jsonl row 0: no ground truth: reward_model is .*of a reward_model, only its ground_truth is read",
    ),
    "an answer that is no number": ([QUESTION | {"answer": math.nan, "data_source": "demo"}], "x.jsonl row 0: no ground truth"),
    "rows that are no objects": ([GOOD, 7], "x.jsonl row 1: 7 is not an object"),
    "empty": ([], "x.jsonl: the file has no rows.*--train-files"),
    "not a chat": ([verl_row([{"text": "1"}])], "x.jsonl row 0.*neither a string nor a list"),
    "no chat template accepts it": (
        [verl_row(CHAT), verl_row([{"role": "nobody", "content": "1"}])],
        "x.jsonl row 1: the model's chat template refuses the messages .TemplateError: no such role",
    ),
    "content not text": ([verl_row([{"role": "user", "content": None}])], "row 0.*--prompt-key"),
    "messages not dicts": ([verl_row([1, 2])], "x.jsonl row 0.*--prompt-key"),
    "prompt a number": ([verl_row(1)], "x.jsonl row 0.*neither a string nor a list"),
    "null prompt": ([GOOD, verl_row(None)], "x.jsonl row 1.*neither a string nor a list"),
    "blank chat": ([verl_row(CHAT), verl_row([{"role": "user", "content": " "}])], "x.jsonl row 1: the prompt.*is empty"),
    "blank question": ([QUESTION, QUESTION | {"question": ""}], "x.jsonl row 1: the prompt .column 'question'.*is empty"),
    "no token": ([GOOD, verl_row("\u2603")], "x.jsonl row 1: the prompt makes no token"),
    "empty prompt": ([GOOD, verl_row("")], "x.jsonl row 1: the prompt.*is empty"),
    "not gsm8k": ([QUESTION, QUESTION | {"answer": "1"}], "x.jsonl row 1: the answer has no '####'.*'data_source'.*--reward"),
}
NOT_UTF8 = r"x\.jsonl: cannot be read .'utf-8' codec can't decode byte 0xe9 in position \d+"
BAD = {
    "no number": (
        lambda p: parquet(p / "x.parquet", verl_row("1", 1.5), verl_row("1", math.nan)),
        "x.parquet row 1: no ground truth",
    ),
    "columns alone": (lambda p: parquet(p / "x.parquet", GOOD, rows=0), "x.parquet: the file has no rows.*--train-files"),
    "absent": (lambda p: p / "x.parquet", "x.parquet: no such file"),
    "damaged parquet": (lambda p: (p / "x.parquet").write_bytes(b"PAR1 no") and p / "x.parquet", "x.parquet: cannot be read"),
    "damaged json": (lambda p: (p / "x.jsonl").write_text('{"prompt": ') and p / "x.jsonl", "x.jsonl: cannot be read .*JSON"),
    "hub": (lambda p: "nobody/nothing-here", "--train-files nobody/nothing-here: neither"),
    "a map": (
        lambda p: parquet(p / "x.parquet", GOOD, ability=pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))),
        r"x.parquet: cannot be read .*'ability'.*save that column as text",
    ),
    "not utf8": (lambda p: latin(p, "prompt"), NOT_UTF8),
    "not utf8, not read": (lambda p: latin(p, "other"), NOT_UTF8),
}
OF_OTHER_TYPES = {  # a row of x.parquet -> what is said
    "a list as a source": (GOOD | {"data_source": ["1"]}, r"data_source is \['1'\]\. Put a name there, as text"),
    "an object as a source": (GOOD | {"data_source": {"a": 1}}, r"data_source is \{'a': 1\}\. Put a name there, as text"),
    "bytes as a source": (GOOD | {"data_source": b"\xff"}, r"data_source is b'\\xff'\. Put a name there, as text"),
    "a list as a reward_model": (GOOD | {"reward_model": ["1"]}, r"no ground truth: reward_model is \['1'\]"),
    "a list as an answer": ({"prompt": "1", "answer": ["1"]} | DATA_SOURCE, r"the answer is \['1'\]\. Save it as text"),
    "bytes as a prompt": (GOOD | {"prompt": b"\xff"}, r"column 'prompt' is neither a string .*, but b'\\xff'"),
}
BAD |= {
    case: (lambda p, row=row: parquet(p / "x.parquet", row), f"x.parquet row 0: {said}")
    for case, (row, said) in OF_OTHER_TYPES.items()
}


def latin(path, column):
    line = json.dumps(GOOD | {column: "é"}, ensure_ascii=False)
    (path / "x.jsonl").write_bytes(line.encode("latin-1"))
    return path / "x.jsonl"


@pytest.mark.parametrize("case", [*BAD_ROWS, *BAD])
def test_bad_input_is_named(case, tmp_path, monkeypatch):
    # the environment variable was read when these were imported
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}1"
    of, message = (BAD_ROWS | BAD)[case]
    file = of(tmp_path) if callable(of) else write(tmp_path / "x.jsonl", *of)
    with pytest.raises(UserError, match=message) as raised:
        dataset(file, tokenizer=tokenizer, truncation="left")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("answer", "truth"), [(0, "0"), (False, "False"), (7, "7")])
def test_an_answer_that_is_no_text_is_a_truth(tmp_path, answer, truth):
    file = write(tmp_path / "a.jsonl", {"question": "1-1=", "answer": answer, "data_source": "demo"})
    assert dataset(file)[0].ground_truth == truth


def test_no_file_is_named():
    with pytest.raises(UserError, match="--val-files names no file"):
        dataset(split="val")


def test_a_tokenizer_without_chat_template(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"a\.jsonl row 0.*no chat template"):
        dataset(write(tmp_path / "a.jsonl", verl_row(CHAT)), tokenizer=tokenizer)


# ------------------------------------------------------------------------------------------- what an environment brings


ALL, TRUTH = frozenset({"prompt", "ground_truth"}), frozenset({"ground_truth"})
ASKED = [{"role": "user", "content": "12"}]


def read_rows(path, rows, brought=frozenset()):
    return dataset(write(path / "rows.jsonl", *rows), brought=brought)


@pytest.mark.parametrize(
    "row", [{"level": 3}, {"prompt": [], "level": 3}, {"prompt": "", "level": 3}, {"prompt": None, "level": 3}]
)
def test_a_row_may_have_no_prompt(row, tmp_path):
    (prompt,) = read_rows(tmp_path, [row], ALL)
    assert prompt.ids == [] and prompt.text == "" and prompt.row == {"prompt": [], "level": 3}
    assert prompt.ground_truth is None and prompt.data_source == ENVIRONMENT
    with pytest.raises(UserError):
        read_rows(tmp_path, [row], TRUTH)
    with pytest.raises(UserError):
        read_rows(tmp_path, [row])


def test_rows_with_and_without_a_prompt(tmp_path):
    rows = [{"prompt": ASKED, "n": 1}, {"prompt": [], "n": 2}, {"prompt": [{"role": "user", "content": ""}], "n": 3}]
    prompts = read_rows(tmp_path, rows, ALL)
    assert [bool(prompt.ids) for prompt in prompts] == [True, False, True] and prompts.sources() == {
        ENVIRONMENT: f"{tmp_path / 'rows.jsonl'} row 0"
    }
    assert [prompts.about(index).get("prompt") for index in range(3)] == ["12", None, None], "the record's"


@pytest.mark.parametrize("brought", [ALL, TRUTH])
def test_a_row_may_have_no_ground_truth(brought, tmp_path):
    rows = [{"prompt": ASKED}, {"prompt": ASKED}]
    prompts = read_rows(tmp_path, rows, brought)
    assert len(prompts) == 2 and prompts[1].ground_truth is None and prompts.source(0) == ENVIRONMENT
    assert len(read_rows(tmp_path, [row | {"data_source": None} for row in rows], brought)) == 2
    for lacks, said in (({}, "no ground truth"), ({"answer": "#### "}, "no ground truth"), ({"answer": "7"}, "data_source")):
        with pytest.raises(UserError, match=said):
            read_rows(tmp_path, [row | lacks for row in rows])
        assert len(read_rows(tmp_path, [row | lacks for row in rows], brought)) == 2


def test_an_answer_that_is_gsm8k_s_is_graded_as_before(tmp_path):
    rows = [{"question": "12", "answer": "as is #### 7"}]
    for brought in (ALL, TRUTH, frozenset()):
        (prompt,) = read_rows(tmp_path, rows, brought)
        assert (prompt.data_source, prompt.ground_truth, bool(prompt.ids)) == ("openai/gsm8k", "7", True)
    (prompt,) = read_rows(tmp_path, [{"question": "12", "answer": "yes"}], ALL)
    assert (prompt.data_source, prompt.ground_truth) == (ENVIRONMENT, "yes")


@pytest.mark.parametrize(
    ("flags", "brought"),
    [
        ({}, set()),
        ({"env": "x.py:X"}, ALL),
        ({"agent": "true"}, ALL),
        ({"serve_policy": 8000}, ALL),
        ({"tools": "x.py:f"}, set()),
        ({"tools": "x.py:f", "reward": "x.py:g"}, TRUTH),
        ({"reward": "x.py:g"}, set()),
    ],
)
def test_who_brings_what(flags, brought):
    args = parts.make(train_sync.Args, **flags)
    assert named.brought(args.environment, args.reward.own_reward) == brought


# ------------------------------------------------------------------------------------------------------ the first token


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = "abcdefghijklmnopqrstuvwxyz+=0123456789\n:[]/_|<>ISTNUR"


def of_bytes(bos: str, eos: str, *, adds_bos: bool, adds_eos: bool = False) -> PreTrainedTokenizerFast:
    """A byte tokenizer like Llama 3's and Qwen's, with a post-processor that adds the given tokens."""
    special = [bos, eos, "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *BYTES])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    words = [bos] * adds_bos + ["$A"] + [eos] * adds_eos
    template = processors.TemplateProcessing(single=" ".join(words), special_tokens=[(bos, 0), (eos, 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)


def of_pieces(kind: type, special: list[str], **how) -> PreTrainedTokenizerBase:
    """A tokenizer of pieces like Llama 2's, Mistral's and Gemma's, with a mark for blanks."""
    vocab = {token: i for i, token in enumerate([*special, *LETTERS, "▁"])}
    return kind(vocab=vocab, merges=[], **how)


LLAMA, GEMMA = ["<unk>", "<s>", "</s>"], ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
ADDING = {
    "llama 3": lambda: of_bytes("<|begin_of_text|>", "<|eot_id|>", adds_bos=True),
    "llama 2": lambda: of_pieces(LlamaTokenizer, LLAMA, add_bos_token=True),
    "mistral": lambda: of_pieces(LlamaTokenizer, LLAMA, add_bos_token=True, legacy=True),
    "gemma": lambda: of_pieces(GemmaTokenizer, GEMMA, add_bos_token=True),
    "with an end, too": lambda: of_bytes("<s>", "</s>", adds_bos=True, adds_eos=True),
}
SILENT = {
    "qwen": lambda: of_bytes("<|endoftext|>", "<|im_end|>", adds_bos=False),
    "llama 2 without": lambda: of_pieces(LlamaTokenizer, LLAMA, add_bos_token=False),
}
TEXTS = ["BOShello 1+1=", "BOS hello", "BOS\nhello", "BOS[INST] 1+1= [/INST]", "BOS"]


def ids_of(path: Path, tokenizer: PreTrainedTokenizerBase, *prompts, split: str = "train") -> list[list[int]]:
    """Return the token ids of these prompts, read from a file."""
    rows = [{"prompt": prompt, "data_source": "x", "ground_truth": "1"} for prompt in prompts]
    return [prompt.ids for prompt in dataset(write(path, *rows), split=split, tokenizer=tokenizer, max_prompt_length=100)]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ADDING)
def test_a_string_with_its_own_bos_gets_no_second_one(tmp_path, kind, split):
    """It is taken as it is: an end token is not added either."""
    tokenizer = ADDING[kind]()
    texts = [text.replace("BOS", tokenizer.bos_token) for text in TEXTS]
    assert all(tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) > 1 for text in texts), "the tokenizer adds one"
    found = ids_of(tmp_path / "x.jsonl", tokenizer, *texts, split=split)
    for text, ids in zip(texts, found, strict=True):
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1, text
        rest = text.split(tokenizer.bos_token)[-1]
        expected = tokenizer(tokenizer.bos_token + rest, add_special_tokens=False)["input_ids"]
        assert ids == expected, text


@pytest.mark.parametrize("kind", [*ADDING, *SILENT])
def test_other_strings_are_what_the_tokenizer_makes_of_them(tmp_path, kind):
    """A BOS in the middle is the user's own."""
    tokenizer = (ADDING | SILENT)[kind]()
    texts = ["1+1=", " 1+1=", f"1+1={tokenizer.bos_token}2+2=", tokenizer.bos_token[:-1]]
    if kind in SILENT:
        texts += [text.replace("BOS", tokenizer.bos_token) for text in TEXTS]
    found = ids_of(tmp_path / "x.jsonl", tokenizer, *texts)
    assert found == [tokenizer(text)["input_ids"] for text in texts]
    assert all((ids[0] == tokenizer.bos_token_id) == (kind in ADDING) for ids in found[:4])


def test_a_tokenizer_without_a_bos(tmp_path):
    tokenizer = of_bytes("<|endoftext|>", "<|im_end|>", adds_bos=False)
    tokenizer.bos_token = None
    assert ids_of(tmp_path / "x.jsonl", tokenizer, "<|endoftext|>1+1=") == [tokenizer("<|endoftext|>1+1=")["input_ids"]]
