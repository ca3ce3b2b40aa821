"""verl's supervised trainers: keys.yaml has their keys by their names in training by reward, sft_keys.yaml the others."""

from tools.from_verl.command import Command
from tools.from_verl.verl_run import Run

CONFIGS = {"sft_trainer", "sft_trainer_engine"}


def is_supervised(command: Command) -> bool:
    """Return whether the command is one of verl's supervised trainers; its keys decide if it names no program."""
    if command.module or command.config_name:
        return "sft_trainer" in command.program
    own = ("model.", "optim.", "engine.", "data.max_length", "data.messages_key", "data.multiturn.")
    return any(key.startswith(own) for key in command.values)


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
