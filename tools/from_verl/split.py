"""The meaning of verl's keys for devices, for the schedule of asynchronous training and for verl's newer trainer (see
meanings.py)."""

from tools.from_verl.verl_run import SFT, SYNC, Run

RANKS_ON_A_NODE = 8  # a split that needs no more is taken to be on one node, whatever verl's pools say


def off_policy(run: Run) -> dict[str, object]:
    versions, strategy = run["V1.sampler.max_off_policy_threshold"], run["V1.sampler.max_off_policy_strategy"]
    if not run.is_v1 or versions is None:
        why = "null: no bound of the age" if run.is_v1 else "only trainer_mode=separate_async bounds the age"
        run.skips("V1.sampler.max_off_policy_threshold V1.sampler.max_off_policy_strategy", why)
        return {}
    run.note(
        f"max_off_policy_threshold {versions} counts the versions that a response spans, --max-staleness the age of its "
        f"oldest token: {max(0, versions - 1)}."
    )
    if strategy != "drop":
        run.lacks(
            "V1.sampler.max_off_policy_strategy",
            "groups that are too old are dropped and replaced; a lower --staleness-threshold drops fewer",
        )
    return {"--max-staleness": max(0, versions - 1)}


def devices(run: Run) -> dict[str, object]:
    nodes, ranks = run["trainer.nnodes"], run["trainer.n_gpus_per_node"]
    if run.script in (SYNC, SFT):
        run.launch = {"--nnodes": nodes, "--nproc-per-node": ranks}
        run.skips("rollout.nnodes rollout.n_gpus_per_node A.rollout.n_gpus", "every rank generates, then learns")
        return {}
    learn = nodes * ranks
    generate = _generating(run)
    if is_part := _is_part(run):
        learn -= generate
        run.note(
            f"rollout.n_gpus={generate} is taken as {generate} of the {learn + generate} devices of trainer.nnodes x "
            f"trainer.n_gpus_per_node, as in verl's first one-step-off trainer: {learn} learn. If they are further devices, "
            f"start {learn + 2 * generate} ranks."
        )
    elif learn + generate <= RANKS_ON_A_NODE:
        nodes = 1
    else:
        nodes += run["rollout.nnodes"]
    if learn % nodes or generate % nodes:
        run.lacks(
            "A.rollout.n_gpus" if is_part else "rollout.n_gpus_per_node",
            f"{generate} generators and {learn} learners cannot be divided over {nodes} nodes alike: give each node its own "
            "--generators (docs/nodes.md)",
        )
    per_node = {"learn": max(1, learn // nodes), "generate": max(1, generate // nodes)}
    run.launch = {"--nnodes": nodes, "--nproc-per-node": sum(per_node.values())}
    if nodes > 1:
        run.note(
            f"{nodes} nodes of {per_node['generate']} generators and {per_node['learn']} learners each, where verl has nodes "
            "that only generate and nodes that only learn: docs/nodes.md has that, too."
        )
    return {"--generators": per_node["generate"]}


def _generating(run: Run) -> int:
    """Return the number of devices that generate."""
    each = run["A.rollout.n_gpus"] or run["rollout.n_gpus_per_node"]
    if run.is_v1 and not run.has("rollout.n_gpus_per_node"):
        each = run["trainer.n_gpus_per_node"]
    return each if _is_part(run) else each * run["rollout.nnodes"]


def _is_part(run: Run) -> bool:
    """Return whether the generating devices are among the trainer's. verl's first one-step-off trainer only had n_gpus, a part
    of them; later ones give the pool its own nodes, and the trainer the rest."""
    some = run["A.rollout.n_gpus"]
    if not some or run.has("rollout.nnodes") or run.has("rollout.n_gpus_per_node"):
        return False
    return some < run["trainer.nnodes"] * run["trainer.n_gpus_per_node"]
