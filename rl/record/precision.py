"""The precision and place of a run's tensors: a line at its start, and a part of its config.json."""


def precisions(args) -> dict[str, str]:
    """Return kind of tensor -> precision, with "on the host" if it is not on the learners' devices. args: the script's."""
    all_on_host, on_host = (" on the host" if yes else "" for yes in (args.param_offload, args.optimizer_offload))
    samples = hasattr(args, "weights_dtype")  # a supervised run does not
    adapted = {"frozen model": args.dtype + all_on_host} if args.adapted else {}
    return {
        "master weights": "float32" + all_on_host,
        "computation": args.dtype,
        "gradients and their reduction": "float32" + all_on_host,
        "moments": {"adamw": "float32", "adamw_8bit": "8 bits"}[args.optim] + (all_on_host or on_host),
        **({"generators": str(args.weights_dtype(args.dtype)).removeprefix("torch.")} if samples else {}),
    } | adapted


def in_words(held: dict[str, str]) -> str:
    """Return one line; "" if everything is in fp32 on the device."""
    if set(held.values()) == {"float32"}:
        return ""
    return "precision: " + ", ".join(f"{what} {how}" for what, how in held.items())
