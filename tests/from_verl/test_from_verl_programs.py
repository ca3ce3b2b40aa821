"""tools.from_verl tells verl's programs apart: supervised trainers become train_sft.py, other programs are refused by name,
and a command that would not train what was meant says so in its first line."""

import pytest
from helpers import ROOT

from rl import parts
from rl.errors import UserError
from tools.from_verl import table, translate
from tools.from_verl.__main__ import read_text, report
from tools.from_verl.command import read_script

FIXTURES = ROOT / "tests" / "fixtures" / "verl"  # the words are those of verl's examples; the scripts are our own
OLD, NEW, MULTITURN = ((FIXTURES / "supervised" / f"{name}.sh").read_text() for name in ("old", "new", "multiturn"))
BACKENDS = {
    "fsdp": "engine.ulysses_sequence_parallel_size=2 engine.strategy=fsdp2 engine.fsdp_size=-1 engine.optimizer_offload=True",
    "veomni": "engine.ulysses_parallel_size=2 engine.optimizer_offload=True engine.fsdp_size=-1",
    "megatron": "engine.tensor_model_parallel_size=2 engine.optimizer_offload=True engine.use_mbridge=True",
}


def sft(text: str, *words: str):
    found = translate.translate(read_script(text, words))
    assert found.script == "train_sft.py" and not found.refusal
    return found, translate.parse(found)


def test_the_older_supervised_trainer():
    """What it leaves out are its own defaults: a mini-batch of 256, betas, cosine."""
    found, args = sft(OLD, "4", "/save")
    assert found.launcher == ["torchrun", "--standalone", "--nproc-per-node", "4"] and not found.gaps
    wanted = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "prompt_key": "question", "response_key": "answer", "max_length": 2048}
    wanted |= {"lr": 1e-4, "adam_beta2": 0.95, "lr_scheduler_type": "cosine", "train_batch_size": 256}
    wanted |= {"lora_rank": 32, "lora_alpha": 16, "lora_target": ("all-linear",), "sequence_parallel": 2, "total_epochs": 3}
    wanted |= {"max_tokens_per_micro_batch": 4 * 2048 // 2, "gradient_checkpointing": True, "dtype": "bfloat16"}
    wanted |= {"output_dir": "/save", "experiment_name": "mine", "param_offload": True, "seed": 1, "val_before_train": False}
    assert {name: parts.get(args, name) for name in wanted} == wanted and args.test_freq > 1000
    assert any("warms up over 0.1 of the steps" in note for note in found.notes), "verl's default; the data decide the steps"
    assert any("chat template" in note for note in found.notes)
    assert {kind for kind, _ in found.verdicts.values()} == {table.TRANSLATED, table.NOT_NEEDED}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_newer_supervised_trainer(backend):
    found, args = sft(NEW.replace("BACKEND", backend).replace("SIZES", BACKENDS[backend]))
    wanted = {"model": "Qwen/Qwen3-8B", "messages_key": "chat", "max_length": 4096, "filter_overlong_prompts": True}
    wanted |= {"lr": 1e-5, "adam_beta2": 0.95, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1, "weight_decay": 0.1}
    wanted |= {"grad_clip": 0.5, "lr_warmup_steps": 20, "total_training_steps": 100, "train_batch_size": 96, "seed": 7}
    wanted |= {"max_ckpt_to_keep": 2, "save_freq": 50, "test_freq": 0, "optimizer_offload": True, "val_files": ()}
    wanted |= {"sequence_parallel": 1 if backend == "megatron" else 2, "max_tokens_per_micro_batch": 8000}
    assert {name: parts.get(args, name) for name in wanted} == wanted and not found.gaps
    missing = {key for key, (kind, _) in found.verdicts.items() if kind == table.NOT_HERE}
    assert missing == {"data.truncation", "trainer.test_freq"} | (
        {"engine.tensor_model_parallel_size"} if backend == "megatron" else set()
    )
    assert "unknown" not in {kind for kind, _ in found.verdicts.values()}


def test_conversations_of_the_older_trainer():
    found, args = sft(MULTITURN)
    assert (args.data.messages_key, args.learner.lr, args.learner.lr_warmup_steps, args.learner.max_tokens_per_micro_batch) == (
        "messages",
        1e-5,
        20,
        8192,
    )
    assert "--prompt-key" not in found.flags and args.test_freq == 200, "verl validates after the last step"
    assert found.launcher[-1] == "4"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (MULTITURN.replace("-m verl.trainer.fsdp_sft_trainer", "verl/trainer/fsdp_sft_trainer.py"), "train_sft.py"),
        (MULTITURN.replace("fsdp_sft_trainer", "sft_trainer_ray"), "train_sft.py"),
        (f"docker run -m 32g img bash -c '{MULTITURN}'", "train_sft.py"),
        (f"python3 -m verl.model_merger merge --local_dir ckpt/main_ppo\n{MULTITURN}", "train_sft.py"),
        ("model.path=x optim.lr=1e-5 data.train_files=a.parquet", "train_sft.py"),
        ("model.partial_pretrain=x data.max_length=9", "train_sft.py"),
        ("actor_rollout_ref.model.path=x data.train_files=a.parquet", "train_sync.py"),
        ("python3 /home/me/convert/verl/trainer/main_ppo.py data.train_files=a.parquet", "train_sync.py"),
        ("python3 -m recipe.dapo.main_dapo data.train_files=a.parquet", "train_sync.py"),
        ("async_training.staleness_threshold=0.5", "train_async.py"),
        ("actor_rollout_ref.hybrid_engine=False", "train_one_step_off.py"),
        ("data.shuffle=False trainer.nnodes=2", "train_sync.py"),
    ],
)
def test_the_script_of_a_program(text, script):
    command = read_text(text)
    assert translate.translate(command).script == script


def test_a_number_of_ranks_that_is_not_set_is_one():
    found = translate.translate(read_script(OLD))
    assert found.launcher[-1] == "1" and any("nproc-per-node is ''" in note for note in found.notes)


def test_text_within_a_column_is_a_gap():
    nested = "data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer']"
    printed = report(read_script(OLD.replace("data.response_key=answer", f"data.response_key=extra_info {nested}"), ["8", "x"]))
    assert printed.startswith("# INCOMPLETE\n#   the text is within the columns") and "train_sft.py" in printed


OTHERS = [line.split("\t") for line in (FIXTURES / "other_programs.tsv").read_text().splitlines()[1:]]
OTHERS.append(["verl\0 a=1", "NUL byte"])


@pytest.mark.parametrize(("text", "message"), OTHERS)
def test_a_program_that_is_no_trainer_is_refused_by_its_name(text, message):
    with pytest.raises(UserError, match=message):
        report(read_text(text))


PPO = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
GIVEN = f"{PPO} actor_rollout_ref.model.path=x data.train_files=a.parquet"


@pytest.mark.parametrize(
    ("text", "gaps"),
    [
        (GIVEN, []),
        (PPO, ["actor_rollout_ref.model.path names no model", "data.train_files names no data"]),
        (f"{GIVEN} actor_rollout_ref.model.path=$MODEL", ["actor_rollout_ref.model.path names no model"]),
        (MULTITURN.replace("model.partial_pretrain", "model.other"), ["model.path names no model"]),
        (f"{GIVEN} actor_rollout_ref.model.lora_rank=$RANK", ["lora_rank cannot be read"]),
        (f"{GIVEN} actor_rollout_ref.model.lora.rank=many", ["lora.rank cannot be read"]),
        (f"{GIVEN} reward_model.enable=True reward_model.model.path=y", ["a model scores in verl"]),
        (f"{GIVEN} distillation.enabled=True", ["names no teacher"]),
    ],
)
def test_what_a_command_lacks_is_said_before_it(text, gaps):
    printed = report(read_script(text)).splitlines()
    assert printed[0].startswith("# INCOMPLETE" if gaps else "torchrun")
    for line, gap in zip(printed[1:], gaps, strict=False):
        assert line.startswith("#   ") and gap in line


@pytest.mark.parametrize(
    ("prompts", "ranks", "shared", "waits"), [(16, 16, 1, 0), (16, 64, 4, 0), (4, 8, 1, 4), (8, 128, 4, 24), (1, 2, 2, 0)]
)
def test_fewer_prompts_than_ranks_are_taken_as_they_are(prompts, ranks, shared, waits):
    """A note counts the engines that have none."""
    words = f"data.train_batch_size={prompts} actor_rollout_ref.actor.ppo_mini_batch_size={prompts} trainer.n_gpus_per_node="
    words += f"{min(ranks, 8)} trainer.nnodes={-(-ranks // 8)} actor_rollout_ref.rollout.tensor_model_parallel_size={shared}"
    found = translate.translate(read_script(f"{GIVEN} {words}"))
    assert not found.refusal and translate.parse(found).schedule.train_batch_size == prompts
    notes = [note for note in found.notes if "engines a prompt" in note]
    assert len(notes) == bool(waits)
    if waits:
        assert f"{prompts} of the {prompts + waits} engines" in notes[0]
