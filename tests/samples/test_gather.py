"""What some ranks have of a batch is on all of them afterwards, bit for bit and in ticket order."""

from helpers import run_script


def test_every_rank_has_all_groups_whoever_had_them():
    done = run_script("tests/programs/gather.py", 50_000, ranks=3)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {n} has all" for n in range(3)
    ]
