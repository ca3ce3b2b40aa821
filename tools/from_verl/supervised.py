"""verl's supervised trainers: keys.yaml has their keys by their names in training by reward, sft_keys.yaml the others."""

from tools.from_verl.command import Command
from tools.from_verl.verl_run import Run

HEADS = {  # of keys
    "model.fsdp_config.": "actor_rollout_ref.actor.fsdp_config.",
    "model.": "actor_rollout_ref.model.",
    "optim.": "actor_rollout_ref.actor.optim.",
    "checkpoint.": "actor_rollout_ref.actor.checkpoint.",
    "trainer.checkpoint.": "actor_rollout_ref.actor.checkpoint.",
    "profiler.": "global_profiler.",
}
NAMES = {
    "model.partial_pretrain": "actor_rollout_ref.model.path",
    "model.strategy": "actor_rollout_ref.actor.strategy",
    "model.fsdp_config.cpu_offload": "actor_rollout_ref.actor.fsdp_config.offload_policy",
    "data.micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size",
    "data.micro_batch_size_per_gpu": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "data.max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": "actor_rollout_ref.actor.use_dynamic_bsz",
    "optim.lr_scheduler": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
    "ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "use_remove_padding": "actor_rollout_ref.model.use_remove_padding",
    "trainer.seed": "data.seed",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
}
ENGINES = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config"}  # verl's `engine=`, if its section has another name than the word
CONFIGS = {"sft_trainer", "sft_trainer_engine"}


def is_supervised(command: Command) -> bool:
    """Return whether the command is one of verl's supervised trainers; its keys decide if it names no program."""
    if command.module or command.config_name:
        return "sft_trainer" in command.program
    own = ("model.", "optim.", "engine.", "data.max_length", "data.messages_key", "data.multiturn.")
    return any(key.startswith(own) for key in command.values)


def name_in_table(key: str, engine: object) -> str:
    """Return the name that the table has for a key of a supervised trainer. engine: the value of `engine`."""
    if key.startswith("engine."):
        return f"actor_rollout_ref.actor.{ENGINES.get(engine, engine)}.{key.removeprefix('engine.')}"
    head = next((head for head in HEADS if key.startswith(head)), "")
    return NAMES.get(key) or HEADS.get(head, "") + key.removeprefix(head)


def defaults(program: str) -> dict[str, object]:
    """Return verl's defaults: those of sft_trainer, or of the older fsdp_sft_trainer."""
    of = "actor_rollout_ref.actor."
    both = {"data.train_batch_size": 256, "data.seed": 1, "data.max_length": 1024, "data.truncation": "error"}
    both |= {"data.messages_key": "messages", "trainer.total_epochs": 4, "trainer.val_before_train": False}
    both |= {of + "ppo_micro_batch_size_per_gpu": 4, of + "ppo_max_token_len_per_gpu": 8192, "trainer.n_gpus_per_node": 1}
    if "fsdp_sft_trainer" not in program:
        return both | {of + "use_dynamic_bsz": True, of + "optim.lr": 1e-3}
    both |= {"data.multiturn.enable": False, "data.prompt_key": "question", "data.response_key": "answer"}
    both |= {of + "optim.lr": 1e-5, of + "optim.betas": [0.9, 0.95]}
    return both | {of + "optim.lr_scheduler_type": "cosine", of + "optim.lr_warmup_steps_ratio": 0.1}


def ranks(command: Command) -> dict[str, object]:
    """Return the numbers that torchrun is given, under the names of verl's keys."""
    names = {"nnodes": "trainer.nnodes", "nproc-per-node": "trainer.n_gpus_per_node"}
    return {names[word]: int(value) for word, value in command.ranks.items() if value.isdigit() and int(value)}


def unclear_ranks(command: Command) -> list[str]:
    found = [f"torchrun's --{word} is {value!r}" for word, value in command.ranks.items() if not value.isdigit()]
    return [f"{text}: 1 is taken. Is it an argument of the script, which follows its name here?" for text in found]


def columns(run: Run) -> dict[str, object]:
    if run["data.multiturn.enable"] is not False:
        return {"--messages-key": run["data.messages_key"]}
    nested = [key for key in ("data.prompt_dict_keys", "data.response_dict_keys") if run[key]]
    for key in nested:
        run.lacks(key, "columns within a column are not read")
    if nested:
        run.gaps.append(
            f"the text is within the columns {run['data.prompt_key']} and {run['data.response_key']} ({', '.join(nested)}): "
            "write a column `messages`, and leave out --prompt-key and --response-key."
        )
    else:
        run.note(
            "verl's fsdp_sft_trainer puts the prompt into the chat template. A prompt that is a string is used as it is here: "
            "write chat messages, or a column `messages`."
        )
    return {"--prompt-key": run["data.prompt_key"], "--response-key": run["data.response_key"]}


def truncation(run: Run) -> dict[str, object]:
    if run["data.truncation"] == "error":
        return {"--filter-overlong-prompts": False}
    run.lacks("data.truncation", "conversations are not cut: --filter-overlong-prompts leaves out those that are too long")
    return {"--filter-overlong-prompts": True}


def test_freq(run: Run) -> dict[str, object]:
    every = max(0, run["trainer.test_freq"])
    if not every and run["data.val_files"]:
        run.note("verl also validates after its last step, whatever test_freq says: --test-freq above all steps does that.")
        every = run.steps or 10**6
    return {"--test-freq": every}
