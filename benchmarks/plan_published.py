"""The plan on paper: published async runs, predicted from the published synchronous ones and the split alone.

    python benchmarks/plan_published.py          # a minute on one core; writes benchmarks/results/plan_published.{json,md}

Source: verl, docs/advance/fully_async.md, read in November 2026: Qwen2.5-Math-7B, DAPO, H20, responses of up to 28k tokens, 16
for each of 512 prompts a step. Seconds a step. Fitted, to the synchronous rows of 64 and 128 devices only:
 - training: a + b / devices, from the two "update" entries; a is divided among the step's 16 optimizer steps;
 - lengths: the mean is what H20s compute in the old log-probs' seconds at the roofline's share of their peak, and the spread
   that with which generation takes the two rows' mean time.
Everything else is the roofline's (rl/plan/roofline.py) and the schedule's. The synchronous row of 32 devices is left out: its
update takes 2.35 times that of 64 devices, more than twice the devices can explain, and its generation 2.37 times.

The last column is given each row's own published update, too: what is left to predict then is how long the learners wait.

Synchronous rows fetch once a step, so that they cannot tell what a fetch costs, and require_batches is how many updates share
one. That cost is therefore fitted to the updates of two rows of that ablation, and the third row's step is predicted from it.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from common import RESULTS, table, write
from transformers import Qwen2Config

from rl.plan.devices import device
from rl.plan.roofline import TRAIN_SHARE, Shape, count_parameters, engine_times
from rl.plan.service_times import LearnerTimes, ServiceTimes
from rl.plan.simulation import Load, Ranks, sync
from rl.plan.stream import asynchronous
from rl.plan.workload import Drawn
from rl.samples.schedule import ScheduleArgs

PROMPTS, N, LONGEST, PROMPT = 512, 16, 28 * 1024, 150
SYNC = {  # devices: step, gen, old_log_prob, update
    32: (790.1, 357.4, 107.7, 313.8),
    64: (365.3, 150.7, 70.3, 133.4),
    128: (356.3, 177.9, 53.9, 113.8),
}
ASYNC = {32: (294.8, 21.3, 269.8), 64: (189.3, 28.5, 157.0), 128: (150.6, 33.1, 113.2)}  # step, wait, update; threshold 0.5
STALENESS = {0.0: (231.3, 128.5, 98.8), 0.1: (171.3, 58.2, 109.1), 0.3: (146.1, 38.9, 103.2), 0.5: (150.6, 33.1, 113.2)}
REQUIRE_BATCHES = {1: (203.5, 30.9, 181.1), 2: (158.7, 26.3, 128.1), 4: (124.6, 25.6, 95.1)}
FITTED = (64, 128)  # the synchronous rows used
QWEN_7B = dict(vocab_size=152_064, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4)


@dataclass
class Args:
    publishes: int = 9
    """Publishes of each simulated run; the first third is not counted."""
    out: str = str(RESULTS)
    """Directory of the results."""


def line(rows: dict[int, float]) -> tuple[float, float]:
    """(a, b) of the law a + b / devices through two rows."""
    (d1, s1), (d2, s2) = rows.items()
    b = (s1 - s2) / (1 / d1 - 1 / d2)
    return s1 - b / d1, b


@dataclass(frozen=True)
class Fit:
    """What the synchronous rows say."""

    fixed: float  # seconds of an update step, whatever the devices
    work: float  # device-seconds
    mean: float  # tokens of a response
    sigma: float  # of the logarithm
    shape: Shape

    @staticmethod
    def of_sync() -> "Fit":
        config = Qwen2Config(**QWEN_7B, intermediate_size=18_944, tie_word_embeddings=False)
        shape = Shape.of(config, count_parameters(config))
        fixed, work = line({d: SYNC[d][3] for d in FITTED})
        _, forward = line({d: SYNC[d][2] for d in FITTED})
        tokens = forward * device("H20").flops * TRAIN_SHARE / shape.forward
        fit = Fit(fixed, work, tokens / (PROMPTS * N), 0.5, shape)
        wanted, low, high = statistics.mean(SYNC[d][1] for d in FITTED), 0.1, 2.0
        for _ in range(12):  # generation grows with the spread
            middle = (low + high) / 2
            found = statistics.mean(replace(fit, sigma=middle).generation(d) for d in FITTED)
            low, high = (middle, high) if found < wanted else (low, middle)
        return replace(fit, sigma=(low + high) / 2)

    def workload(self) -> Drawn:
        return Drawn(N, self.mean, self.sigma, LONGEST, PROMPT)

    def times(self, tokens: float, slower: float = 1.0) -> ServiceTimes:
        """tokens: of a step of 512 prompts, all of them trained; slower: the factor on training."""
        engine = engine_times(self.shape, device("H20"), 1, 256)
        update, token = slower * self.fixed / 16, slower * self.work / tokens
        learner = LearnerTimes(update=update, token=token, publish=engine.receive)
        return ServiceTimes(engine, learner, "the synchronous rows")

    @property
    def tokens(self) -> float:
        drawn = self.workload()
        return statistics.mean(sum(drawn.group(t)[1]) + PROMPT for t in range(1024)) * PROMPTS

    def generation(self, devices: int, steps: int = 3) -> float:
        """Seconds in which so many devices make a whole batch."""
        times, ranks = self.times(1.0), Ranks(devices, devices, colocated=True)
        return statistics.mean(sync(times, Load(PROMPTS, 16, 256), ranks, self.workload(), steps).generated)

    def stream(
        self,
        devices: int,
        threshold: float,
        publishes: int,
        batches: int = 4,
        slower: float = 1.0,
        learner: LearnerTimes | None = None,
    ) -> tuple[float, float, float]:
        """(step, wait, update) of 512 prompts, from publish to publish, on half of the devices each. learner: its times, where
        they are not the synchronous rows'."""
        period = PROMPTS // (32 * batches)
        args = ScheduleArgs(
            train_batch_size=32 * batches,
            ppo_mini_batch_size=32,
            publish_every=period,
            staleness_threshold=threshold,
            partial_rollout="recompute" if threshold else "off",
        )
        ranks = Ranks(devices // 2, devices // 2)
        load = Load(32 * batches, batches, 256)
        times = self.times(self.tokens, slower)
        times = replace(times, learner=replace(learner, publish=times.learner.publish)) if learner else times
        out = asynchronous(times, load, ranks, self.workload(), args, publishes * period)
        return tuple(period * seconds for seconds in (out.step_seconds, out.mean(out.waited), out.mean(out.learned)))


def main(args: Args) -> None:
    fit = Fit.of_sync()
    rows, cells = [], []

    def compare(what: str, published: tuple, devices: int, threshold: float, batches: int = 4) -> float:
        simulated = fit.stream(devices, threshold, args.publishes, batches)
        given = fit.stream(devices, threshold, args.publishes, batches, slower=published[2] / simulated[2])[0]
        row = {"what": what, "published": published, "plan": simulated, "error": simulated[0] / published[0] - 1}
        rows.append(row | {"update given": given, "error, update given": given / published[0] - 1})
        pairs = [f"{p:.1f} / {s:.1f}" for p, s in zip(published, simulated, strict=True)]
        cells.append([what, *pairs, f"{row['error']:+.0%}", f"{given:.1f}, {given / published[0] - 1:+.0%}"])
        return simulated[0]

    steps = {d: compare(f"async, {d // 2}:{d // 2}", of, d, 0.5) for d, of in ASYNC.items()}
    stale = {t: compare(f"64:64, threshold {t}", of, 128, t) for t, of in STALENESS.items()}
    batches = {b: compare(f"64:64, require_batches {b}", of, 128, 0.5, b) for b, of in REQUIRE_BATCHES.items()}
    fetches = {}
    for left_out, published in REQUIRE_BATCHES.items():
        own, by_fetch = line({b: of[2] for b, of in REQUIRE_BATCHES.items() if b != left_out})
        learner = LearnerTimes(step=by_fetch / 16, token=own * 64 / fit.tokens)
        found = fit.stream(128, 0.5, args.publishes, left_out, learner=learner)
        fetches[left_out] = {
            "fetch": by_fetch / 16,
            "published": published,
            "plan": found,
            "error": found[0] / published[0] - 1,
        }
    judged = [row["error"] for row in rows[: len(steps) + len(stale)]]
    falls = lambda of: list(of.values()) == sorted(of.values(), reverse=True)  # noqa: E731
    order = {
        "more devices are faster": falls(steps),
        "async is faster than sync": all(steps[d] < SYNC[d][0] for d in steps),
        "threshold 0, 0.1 and 0.3 in this order": falls({t: stale[t] for t in (0.0, 0.1, 0.3)}),
        "require_batches 1, 2, 4 in this order": falls(batches),
    }
    head = ["run", "step: published / plan", "wait", "update", "error of the step", "step with the published update"]
    right = "; ".join(f"{what}: {'yes' if yes else 'no'}" for what, yes in order.items())
    given = [row["error, update given"] for row in rows]
    law = f"update {fit.fixed:.1f} s + {fit.work:,.0f} / devices, responses of {fit.mean:,.0f} tokens on average"
    text = [
        table(head, cells),
        f"Splits and thresholds: {sum(abs(error) <= 0.2 for error in judged)} of {len(judged)} steps within 20%, worst "
        f"{max(judged, key=abs):+.0%}. With each row's own update, of all {len(given)}: worst {max(given, key=abs):+.0%}. "
        f"Order: {right}.",
        f"Fitted to the synchronous rows of {FITTED[0]} and {FITTED[1]} devices: {law} with a spread of {fit.sigma:.2f}.",
    ]
    said = "; ".join(
        f"{b}: a fetch {row['fetch']:.1f} s, step {row['published'][0]:.1f} / {row['plan'][0]:.1f}, {row['error']:+.0%}"
        for b, row in fetches.items()
    )
    text.append(f"require_batches, each predicted from the updates of the two others: {said}.")
    fitted = {name: getattr(fit, name) for name in ("fixed", "work", "mean", "sigma")}
    write(
        "plan_published",
        {"rows": rows, "order": order, "fit": fitted, "require_batches": fetches},
        "\n\n".join(text),
        Path(args.out),
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
