"""A ring that is too small for the largest possible group is refused at the start, and the error gives the needed size."""

import re
import shutil

import numpy as np
import pytest
from helpers import run_script

import train_async
import train_one_step_off
import train_sync
from examples.demo.sums import build_tokenizer
from rl import parts
from rl.errors import UserError
from rl.samples.group import Group, Response
from rl.samples.ring_size import check_ring, largest_record, ring_mb_for, routes_bytes
from rl.transport.ring import RecordTooLarge, Ring

LAYERS, CHOSEN = 3, 2


def full(prompt: int, length: int, n: int, dtype=None) -> Group:
    """A group whose responses have full length, and masks of 40 turns at most. dtype: that of its routes."""
    rows = lambda tokens: None if dtype is None else np.zeros((tokens, LAYERS, CHOSEN), dtype)  # noqa: E731
    numbers = (np.zeros(length, np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32))
    extra = {f"number_{i}": -1234.5678 for i in range(8)}
    mask, routes = np.arange(length) * 80 // length % 2 == 0, rows(length - 1)
    responses = [Response(*numbers, "length", 0.123456789, extra, mask=mask, routes=routes) for _ in range(n)]
    return Group(10**9, np.zeros(prompt, np.int32), "some/data_source", responses, prompt_routes=rows(prompt))


@pytest.mark.parametrize("dtype", [None, np.uint8, np.uint16])
@pytest.mark.parametrize(("prompt", "length", "n"), [(1, 1, 1), (5, 9, 3), (700, 3000, 16), (16, 20_000, 4)])
def test_no_group_is_larger_than_it_is_reckoned(prompt, length, n, dtype):
    args = train_async.Args(max_prompt_length=prompt, max_response_length=length, rollout_n=n)
    routes = 0 if dtype is None else LAYERS * CHOSEN * np.dtype(dtype).itemsize
    size, most = len(full(prompt, length, n, dtype).to_bytes()), largest_record(args, routes)
    assert size <= most <= 1.1 * size + 4096 + 1024 * n + 12 * prompt


@pytest.mark.parametrize("record", [1, 2**19 - 64, 2**19 - 63, 1_028_935, 127_145_984])
def test_the_number_to_give_is_the_least_that_takes_the_record(record):
    needed = ring_mb_for(record)
    for megabytes, fits in ((needed, True), (needed - 1, False)):
        if not megabytes:
            continue
        ring = Ring.create(megabytes << 20)
        assert (record <= ring.max_record) == fits
        ring.close()
    small = Ring.create(1 << 20)
    if needed > 1:
        with pytest.raises(RecordTooLarge):
            small.put(bytes(record))
    else:
        small.put(bytes(record))
    small.close()


@pytest.mark.parametrize("args", [train_async.Args, train_one_step_off.Args])
def test_the_check_names_the_number_and_takes_it(args, models):
    sizes = {"rollout_n": 128, "max_response_length": 400, "router_replay": "R3"}
    per_token = routes_bytes(args(**sizes), models["moe"])
    assert per_token == 2 * 2, "2 layers, 2 of 8 experts of each token"
    with pytest.raises(UserError, match=r"^--ring-mb 1: a group of --rollout-n 128 .* \(--router-replay R3\)") as raised:
        check_ring(parts.make(args, **sizes, ring_mb=1), models["moe"])
    needed = int(re.search(r"Give --ring-mb (\d+)", str(raised.value))[1])
    assert needed == 2 and check_ring(parts.make(args, **sizes, ring_mb=needed), models["moe"]) is None
    longer = {"rollout_n": 16, "max_response_length": 40_000}
    with pytest.raises(UserError, match=r"Give --ring-mb 16\b"):
        check_ring(parts.make(args, **longer, ring_mb=15), models["qwen3"])
    assert check_ring(args(), models["qwen3"]) is None and check_ring(train_sync.Args(rollout_n=10**6), "nowhere") is None


def test_a_run_ends_before_anything_is_generated(tmp_path, models):
    model = shutil.copytree(models["moe"], tmp_path / "moe")
    build_tokenizer().save_pretrained(model)
    words = "--router-replay R3 --ring-mb 1 --rollout-n 512 --max-response-length 150 --test-freq 0"
    done = run_script("train_async.py", "--model", model, *words.split(), "--output-dir", tmp_path, ranks=2, check=False)
    assert done.returncode == 1 and done.stderr.count("error: ") == 1
    assert re.search(r"error: --ring-mb 1: a group .* Give --ring-mb \d+", done.stderr)
    assert not [*tmp_path.glob("*/metrics.jsonl")]
