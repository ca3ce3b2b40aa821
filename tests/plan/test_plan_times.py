"""Where the plan's seconds come from: fits find the law behind measured steps, rooflines the arithmetic, files what was saved;
and the settings that are compared."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import ROOT, train

import train_async
import train_one_step_off
import train_sync
from rl import flags
from rl.errors import UserError
from rl.plan import choices, roofline, service_times
from rl.plan.calibrate import calibrate
from rl.plan.devices import DEVICES, device
from rl.plan.engine import Engine, Group
from rl.plan.fit import fit_engine, fit_learner, nonnegative
from rl.plan.from_run import times_of_run
from rl.plan.service_times import EngineTimes, LearnerTimes, ServiceTimes
from rl.plan.simulation import Load, Ranks, Scorers, generate, sync
from rl.plan.time_plan import TimeArgs, flags_for, make_job, plan_time
from rl.plan.workload import Drawn, lengths_like

LAW = EngineTimes(
    (1, 8, 32), (0.010, 0.012, 0.030), 2e-6, True, prefill=4e-3, prefill_token=1e-5, prefill_row=2e-4, finish=5e-4
)


def steps_of(times: EngineTimes, slots: int, rounds: int, noise: float = 0.0, held_up: int = 0) -> list[tuple]:
    """The steps of rounds of generation under a law, as a calibration measures them."""
    random, rows = np.random.default_rng(0), []
    for k in range(rounds):
        engine, work = Engine(times, slots, 64), Drawn(4, 12, 0.8, 60, prompt=5 + k, seed=k)
        for ticket in range(1 + k % 12):
            engine.add(Group(ticket, *work.group(ticket)))
        while engine.unfinished:
            engine.begin()
            held, seconds = (engine.running, engine.context, *engine.prefilled), engine.seconds(1)
            ended = len(engine.end(1))
            seconds = (seconds + ended * times.finish) * random.lognormal(0, noise)
            rows.append((*held, ended, seconds))
    for i in random.integers(0, len(rows), held_up):
        rows[i] = (*rows[i][:-1], 100 * rows[i][-1])
    return rows


def test_the_fit_of_an_engine_finds_the_law_behind_the_steps():
    """Whatever the split between the parts, the time of other work is told, in spite of noise and of held-up steps."""
    found = fit_engine(steps_of(LAW, 32, 24, noise=0.05, held_up=3), padded=True)
    for n, mean in ((1, 20), (6, 9), (12, 30)):
        work = Drawn(4, mean, 0.7, 80, prompt=7, seed=99)
        made = [
            generate(Engine(t, 32, 64), Scorers(0, 1), [Group(i, *work.group(i)) for i in range(n)], 0.0) for t in (LAW, found)
        ]
        assert made[1][1] == pytest.approx(made[0][1], rel=0.03)


def test_the_fit_of_the_learners_finds_the_law_behind_the_steps():
    law, random, rows = LearnerTimes(step=0.3, update=0.1, token=2e-4, square=1e-7), np.random.default_rng(0), []
    for _ in range(60):
        updates, tokens = int(random.integers(1, 5)), int(random.integers(1000, 9000))
        squares = tokens * int(random.integers(50, 900))
        rows.append((updates, tokens, squares, law.learn(tokens, squares, updates, ranks=4)))
    found = fit_learner(rows, ranks=4)
    assert dataclasses.astuple(found)[:4] == pytest.approx(dataclasses.astuple(law)[:4], rel=1e-3)
    assert found.learn(5000, 10**6, 2, ranks=8) == pytest.approx(law.learn(5000, 10**6, 2, ranks=8))


def test_no_coefficient_is_negative():
    random = np.random.default_rng(1)
    columns, x = random.random((50, 4)), np.array([1.0, 0.0, 2.0, 0.0])
    found = nonnegative(columns, columns @ x - 0.2 * columns[:, 1] + 0.01 * random.standard_normal(50))
    assert found.min() >= 0 and found[1] == 0 and nonnegative(columns, columns @ x) == pytest.approx(x, abs=1e-9)


# ------------------------------------------------------------------------------------------------------- roofline


def qwen(layers=4, **more):
    from transformers import Qwen2Config

    shape = dict(vocab_size=1000, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    return Qwen2Config(num_hidden_layers=layers, tie_word_embeddings=False, **shape | more)


def test_the_roofline_is_bytes_or_arithmetic():
    config, h100 = qwen(), device("H100-80GB")
    shape = roofline.Shape.of(config, roofline.count_parameters(config))
    assert shape.kv == 4 * 2 * 2 * 64 * 2, "layers, key and value, heads, head dimension, bytes"
    matrices = 4 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 512) + 256 * 1000
    assert shape.forward == 2 * matrices
    times = roofline.engine_times(shape, h100, 1, 4096)
    bandwidth, peak = 3.35e12 * roofline.BANDWIDTH_SHARE, 989e12 * roofline.DECODE_SHARE
    few, many = times.rows(4096)[1], times.rows(4096)[4096]
    assert few - roofline.STEP_OVERHEAD == pytest.approx(2 * matrices / bandwidth), "one response reads each matrix once"
    assert many - roofline.STEP_OVERHEAD == pytest.approx(max(2 * shape.parameters / bandwidth, 4096 * 2 * matrices / peak))
    assert times.context_token == pytest.approx(shape.kv / bandwidth)
    two = roofline.engine_times(shape, h100, 2, 4096)
    assert two.context_token == pytest.approx(times.context_token / 2)
    learners = [roofline.learner_times(shape, h100, n, passes=4) for n in (1, 8)]
    assert learners[0].token == learners[1].token == pytest.approx(4 * 2 * matrices / (989e12 * roofline.TRAIN_SHARE))
    assert learners[0].update > 0 and learners[1].update > 0


def test_slots_are_what_the_keys_and_values_leave_room_for():
    config = qwen(layers=28, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944)
    shape, args = roofline.Shape.of(config, 7 * 10**9), flags.read(train_async.Args, args=["--dtype", "bfloat16"])
    assert roofline.slots_that_fit(shape, device("H100-80GB"), 1, args, 10_000) == (40 * 10**9 - 14 * 10**9) // (57344 * 10_000)
    assert roofline.slots_that_fit(shape, device("H100-80GB"), 1, args, 10) == args.max_num_seqs


def test_devices_are_found_by_name():
    assert device("h100").name == "H100-80GB" and device("A100-40GB").memory == 40e9 and len(DEVICES) >= 8
    for name in ("A100", "TPU", ""):
        with pytest.raises(UserError, match="choose one of H200-141GB"):
            device(name)


# --------------------------------------------------------------------------------------------- files, runs and lengths


def test_service_times_are_saved_and_read(tmp_path):
    times = {
        "split": ServiceTimes(LAW, LearnerTimes(step=1.0), "here"),
        "colocated": ServiceTimes(LAW, LearnerTimes(), "there", 0.5),
    }
    service_times.save(times, tmp_path / "times.json")
    assert service_times.load(tmp_path / "times.json") == times
    for content in (None, "no json", "{}[", '{"split": {"engine": 3}}', "[]"):
        if content is not None:
            (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=r"bad\.json holds no service times"):
            service_times.load(tmp_path / "bad.json")


def test_lengths_have_the_mean_and_the_longest_that_were_asked_for(tmp_path):
    assert lengths_like("budget", 4, 512, 30).group(7) == (30, [512] * 4, True)
    assert lengths_like("100", 2, 512, 30).group(0)[1] == [100, 100]
    drawn = lengths_like("100:0.8", 8, 10_000, 30)
    lengths = np.concatenate([drawn.group(t)[1] for t in range(2000)])
    assert lengths.mean() == pytest.approx(100, rel=0.05) and np.log(lengths).std() == pytest.approx(0.8, rel=0.03)
    assert drawn.group(5) == lengths_like("100:0.8", 8, 10_000, 30).group(5), "the same at every call"
    for bad in ("long", "1:2:3", "-5", "100:9"):
        with pytest.raises(UserError, match=f"--response-lengths {bad}"):
            lengths_like(bad, 2, 512, 30)
    flat = dataclasses.replace(drawn, flat=0.3)
    assert np.mean([not flat.group(t)[2] for t in range(2000)]) == pytest.approx(0.3, abs=0.05)
    # a run of 64 responses a step: drawn again, their mean and the longest of 64 are the run's
    source = Drawn(8, 100, 0.7, 100_000, prompt=12, seed=5)
    rows = []
    for step in range(40):
        of = np.concatenate([source.group(8 * step + i)[1] for i in range(8)])
        rows.append({"response_length/mean": of.mean(), "response_length/max": int(of.max()), "prompt_length/mean": 12.0})
    write_run(tmp_path, rows, {"rollout_n": 8, "train_batch_size": 8})
    like = lengths_like(str(tmp_path), 8, 100_000, 99)
    assert like.prompt == 12 and like.mean == pytest.approx(100, rel=0.1) and like.sigma == pytest.approx(0.7, abs=0.1)


def write_run(path, rows: list[dict], flags: dict, world_size: int = 1) -> None:
    config = {"script": "train_sync", "flags": flags, "hardware": {"world_size": world_size}}
    (path / "config.json").write_text(json.dumps(config))
    lines = [json.dumps({"step": i, "time": 1000.0 + i, **row}) for i, row in enumerate(rows, 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_finished_run_tells_its_service_times(tmp_path):
    """A run's record made by simulating a known law: the fitted times predict other lengths of the same machine."""
    law = ServiceTimes(EngineTimes((1, 64), (0.01 + 1e-4, 0.01 + 64e-4)), LearnerTimes(step=0.5, token=1e-4), "law")
    ranks, load, rows = Ranks(2, 2, colocated=True), Load(16, 1, slots=64), []
    for step in range(12):  # each of lengths of its own, as over a training
        work = Drawn(8, 40 + 10 * step, 0.6, 2000, prompt=20, seed=step)
        out, of = sync(law, load, ranks, work, 1), np.concatenate([work.group(t)[1] for t in range(16)])
        row = {"response_length/mean": of.mean(), "response_length/max": int(of.max()), "prompt_length/mean": 20.0}
        row |= {"timing_s/gen": out.generated[0], "timing_s/update_actor": out.learned[0], "timing_s/step": out.ends[0]}
        rows.append(row)
    write_run(tmp_path, rows, {"rollout_n": 8, "train_batch_size": 16, "max_num_seqs": 64}, world_size=2)
    found, work = times_of_run(tmp_path), Drawn(8, 120, 0.6, 2000, prompt=20, seed=77)
    real, plan = (sync(t, load, ranks, work, 6).step_seconds for t in (law, found))
    assert plan == pytest.approx(real, rel=0.1) and found.learner.token == pytest.approx(1e-4, rel=0.01)
    write_run(tmp_path, rows[:3], {"rollout_n": 8})
    with pytest.raises(UserError, match=r"steps with timings after the first are too few"):
        times_of_run(tmp_path)


# ------------------------------------------------------------------------------------------------------------ settings


def job(times: ServiceTimes, per_node=8, nodes=1, workload=None, **given) -> choices.Job:
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    args = flags.read(train_async.Args, args=words)
    machine = choices.Machine(nodes, per_node)
    return choices.Job(args, machine, lambda _: times, workload or Drawn(8, 50, 0.6, 400, 10), lambda _: 64)


def test_more_ranks_go_where_the_work_is():
    slow_learner = ServiceTimes(EngineTimes((1,), (0.001,)), LearnerTimes(token=0.01), "hand")
    slow_engine = ServiceTimes(EngineTimes((1, 64), (0.01, 2.0)), LearnerTimes(token=1e-4), "hand")
    chosen = [choices.best(choices.compare(job(times))).setting for times in (slow_learner, slow_engine)]
    assert chosen[0].script == "train_sync" or chosen[0].generators == 1, "all can learn, or all but one"
    assert chosen[1].script == "train_sync" or chosen[1].generators >= 6


def test_over_sampling_is_part_of_train_sync_alone():
    """It does not wait for long tails; in the other modes nothing changes."""
    times, work, rates = ServiceTimes(LAW, LearnerTimes(token=1e-3), "hand"), Drawn(8, 50, 1.2, 2000, 10), []
    for over in (0.0, 1.0):
        args = train_sync.Args(over_sample=over)
        rows = choices.compare(choices.Job(args, choices.Machine(1, 2), lambda _: times, work, lambda _: 256))
        rates.append({row.setting.script: row.rate for row in rows[:2]})
    assert rates[1]["train_sync"] > 1.1 * rates[0]["train_sync"]
    assert rates[1]["train_one_step_off"] == rates[0]["train_one_step_off"]


def test_the_flags_are_among_the_settings_and_every_setting_is_a_command_that_runs():
    rows = choices.compare(job(ServiceTimes(LAW, LearnerTimes(token=1e-3), "hand"), staleness_threshold=0.7, per_node=4))
    settings = [row.setting for row in rows]
    assert len(set(settings)) == len(settings) and {s.script for s in settings} == set(choices.SCRIPTS)
    assert {s.generators for s in settings if (s.threshold, s.period) == (0.7, 1)} == {1, 2, 3}
    scripts = {"train_sync": train_sync, "train_one_step_off": train_one_step_off, "train_async": train_async}
    for setting in {s.script: s for s in settings}.values():  # the last of each script
        args = flags.read(scripts[setting.script].Args, args=setting.flags.split())
        if setting.script == "train_async":
            assert (args.generators, args.staleness_threshold) == (setting.generators, setting.threshold)
            assert args.publish_every == setting.period


def test_a_staler_setting_must_be_worth_it():
    balanced = ServiceTimes(EngineTimes((1,), (0.01,)), LearnerTimes(step=20.0), "hand")  # training decides: nothing else helps
    rows = choices.compare(job(balanced, per_node=2))
    fastest, chosen = max(rows, key=lambda row: row.rate), choices.best(rows)
    assert chosen.rate * choices.WORTH >= fastest.rate and chosen.lag == min(
        r.lag for r in rows if r.rate * choices.WORTH >= fastest.rate
    )
    assert choices.hours(chosen, 3600)[1] == pytest.approx(chosen.steps.step_seconds * 2)


def test_splits_that_cannot_be_are_refused():
    for generators, per_engine in ((0, 1), (4, 1), (3, 2)):
        with pytest.raises(UserError, match=f"--generators {generators} of 4 ranks a node"):
            choices.Machine(2, 4).split(generators, per_engine)
    ranks = choices.Machine(2, 8).split(4, 2)
    assert (ranks.engines, ranks.learners, ranks.total) == (4, 8, 16)


@pytest.mark.parametrize("script", ["train_sync", "train_one_step_off", "train_async"])
def test_another_script_is_given_the_same_work(script):
    words = "--ppo-mini-batch-size 4 --train-batch-size 12 --rollout-n 4 --no-shuffle --lr 1e-5"
    words += " --generators 2 --max-num-seqs 32"
    args = flags.read(train_async.Args, args=words.split())
    modules = {"train_sync": train_sync, "train_one_step_off": train_one_step_off, "train_async": train_async}
    other = flags.read(modules[script].Args, args=flags_for(script, args))
    assert (other.prompts_per_step, other.prompts_per_update) == (12, 4)
    assert (other.rollout_n, other.shuffle, other.lr, other.max_num_seqs) == (4, False, 1e-5, 32)
    assert script == "train_sync" or other.generators == 2


def test_the_page_names_the_best_and_its_hours(tmp_path, capsys):
    service_times.save({"split": ServiceTimes(LAW, LearnerTimes(token=1e-3), "a measurement")}, tmp_path / "t.json")
    args = flags.read(train_async.Args, args=["--total-training-steps", "360", "--max-response-length", "100"])
    plan = TimeArgs(service_times=str(tmp_path / "t.json"), plot=str(tmp_path / "plan.png"))
    plan_time("train_async", args, plan, choices.Machine(1, 4), "50:0.5", None)
    said = capsys.readouterr().out
    assert "best: train_" in said and "360 steps: " in said and "service times: a measurement" in said
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="give a --device"):
        make_job("train_async", args, TimeArgs(), choices.Machine(1, 4), Drawn(8, 50, 0.5, 100), None)


def test_the_page_holds_the_benchmarks_own_table():
    found = (ROOT / "benchmarks" / "results" / "plan_published.md").read_text()
    page = (ROOT / "docs" / "plan.md").read_text()
    assert found.partition("\n\n")[0] in page, "put the table of python benchmarks/plan_published.py into docs/plan.md"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_sync", "train_async"])
def test_a_calibration_measures_the_demo(script, demo_model):
    times = calibrate(script, ["--max-response-length", "32", "--max-num-seqs", "32"], Drawn(8, 16, 0.5, 32), 2, seconds=2.0)
    rows = times.engine.rows(32)
    assert all(seconds >= 0 for seconds in rows) and max(rows) > 0  # no more: a busy machine measures what it likes
    assert times.learner.learn(2000, 40_000, 1, 1) > 0 and times.engine.receive > 0


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.5, 2.0])
def test_the_staleness_of_a_real_run_is_that_of_its_simulation(threshold, demo_model, tmp_path):
    """The run's own record gives the service times; what the schedule makes of them is compared. The model answers in some
    three tokens and each batch is passed over four times, so that generation is far ahead as soon as it may."""
    words = ["--staleness-threshold", str(threshold), "--total-training-steps", "24", "--test-freq", "0"]
    words += ["--ppo-epochs", "4", "--logger"]
    real, run, _ = train("train_async.py", *words, out=tmp_path, ranks=2)
    args, machine = flags.read(train_async.Args, args=words[:-1]), choices.Machine(1, 2)
    times, work = times_of_run(run), lengths_like(str(run), args.rollout_n, args.max_response_length, 8)
    job = choices.Job(args, machine, lambda _: times, work, lambda _: args.max_num_seqs)
    simulated = job.run(choices.Setting("train_async", machine.split(1, 1), 1, threshold, 1), 24).steps
    steady = [real[step] for step in range(9, 25)]
    ages = np.mean([row["staleness/mean"] for row in steady])
    assert simulated.mean(simulated.mean_age) == pytest.approx(ages, abs=0.1) and ages == pytest.approx(threshold, abs=0.1)
    assert max(simulated.max_age) == max(row["staleness/max"] for row in steady)
    assert simulated.dropped.total() == steady[-1]["fully_async/count/dropped_stale_samples"] == 0
