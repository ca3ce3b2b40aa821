"""The variables that a verl script exports, and what each of them means here."""

import re
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from tools.from_verl.command import Command

KEEP, NOT_NEEDED, HARMFUL = "needed here too", "not needed", "harmful, unset it"
SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD)(_|S?$)", re.IGNORECASE)
OF_A_KEY = re.compile(r".*env_vars\.(\w+)")  # ray_kwargs.ray_init.runtime_env.env_vars.NAME
OFF = ("", "0", "false")


class Variable(NamedTuple):
    names: str  # * stands for any rest
    verdict: Literal["needed here too", "not needed", "harmful, unset it"]
    why: str
    harmless: tuple[str, ...] = ()  # values with which a harmful variable does nothing
    part: str = ""  # of the values that the row is about, in small letters


# The first row that has the name, and a part of the value, counts.
VARIABLES = [
    Variable("CUDA_DEVICE_MAX_CONNECTIONS", HARMFUL, "1 is for Megatron: with FSDP2 communication then waits for computation",
             ("", "8", "32")),
    Variable("CUDA_LAUNCH_BLOCKING ASCEND_LAUNCH_BLOCKING NCCL_BLOCKING_WAIT TORCH_NCCL_BLOCKING_WAIT", HARMFUL,
             "every kernel waits for the one before it; set it only to find a fault", OFF),
    Variable("VLLM_ASCEND_ENABLE_NZ", HARMFUL, "vllm-ascend cannot take new weights with it; 0 is set here by itself", OFF),
    Variable("PYTORCH_NPU_ALLOC_CONF", HARMFUL, "vllm-ascend's sleep mode does not start with expandable segments (ascend.md)",
             part="expandable_segments:true"),
    Variable("HYDRA_*", NOT_NEEDED, "there is no Hydra"),
    Variable("RAY_*", NOT_NEEDED, "there is no Ray"),
    Variable("VERL_USE_MODELSCOPE VLLM_USE_MODELSCOPE", NOT_NEEDED,
             "models come from Hugging Face's hub, or are a directory: --model"),
    Variable("VERL_*", NOT_NEEDED, "only verl reads it"),
    Variable("NVTE_* TE_* MEGATRON_*", NOT_NEEDED, "there is no Megatron and no Transformer Engine"),
    Variable("SGLANG_* SGL_*", NOT_NEEDED, "there is no SGLang"),
    Variable("SWANLAB_* MLFLOW_* TENSORBOARD_DIR WANDB_PROJECT WANDB_NAME WANDB_DIR WANDB_EXP", NOT_NEEDED,
             "the flags --logger, --project-name, --experiment-name and --output-dir say it"),
    Variable("MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK", NOT_NEEDED,
             "torchrun sets it for its ranks"),
    Variable("VLLM_USE_V1", NOT_NEEDED, "vLLM has only this engine now"),
    Variable("VLLM_ATTENTION_BACKEND", NOT_NEEDED, "vLLM chooses by the device, and does not read it any more"),
    Variable("VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD VLLM_RPC_* VLLM_ENGINE_ITERATION_TIMEOUT_S "
             "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_DP_* VLLM_HOST_IP VLLM_PORT", NOT_NEEDED,
             "the engine runs within its ranks"),
    Variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING", NOT_NEEDED,
             "the learners send the weights with their adapters in them"),
    Variable("TOKENIZERS_PARALLELISM", NOT_NEEDED, "prompts are tokenised at the start"),
    Variable("PYTHONUNBUFFERED", NOT_NEEDED, "every line is flushed"),
    Variable("RUST_BACKTRACE PYTHONFAULTHANDLER", NOT_NEEDED, "it only changes what a crash prints"),
    Variable("PYTHONPATH", NOT_NEEDED,
             "neither verl nor Megatron-LM is imported; keep what your own --reward function imports"),
    Variable("PYTHONHASHSEED", NOT_NEEDED, "no order depends on hashes: --seed"),
    Variable("UCX_* NIXL_*", NOT_NEEDED, "weights go over NCCL, HCCL or gloo"),
    Variable("CUDA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES", KEEP, "it must leave a device to every rank of the node"),
    Variable("WANDB_*", KEEP, "with --logger wandb"),
    Variable("HF_* HUGGING_FACE_* HUGGINGFACE_* TRANSFORMERS_* DATASETS_*", KEEP, "the hub's libraries are the same"),
    Variable("http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY", KEEP,
             "for the hub and W&B; leave the nodes themselves out of it"),
    Variable("NCCL_* TORCH_NCCL_*", KEEP, "NCCL is the same"),
    Variable("GLOO_* TP_SOCKET_IFNAME", KEEP, "gloo is the same (nodes.md)"),
    Variable("HCCL_* HCOM_* RANK_TABLE_FILE P2P_HCCL_BUFFSIZE", KEEP, "HCCL is the same (ascend.md)"),
    Variable("ASCEND_* TASK_QUEUE_ENABLE CPU_AFFINITY_CONF ATB_* LCCL_* ACL_* ACLNN_* MULTI_STREAM_MEMORY_REUSE "
             "COMBINED_ENABLE INF_NAN_MODE_* NPU_ASD_* STREAMS_PER_DEVICE CLOSE_MATMUL_K_SHIFT", KEEP,
             "CANN and torch_npu are the same"),
    Variable("PYTORCH_CUDA_ALLOC_CONF PYTORCH_NPU_ALLOC_CONF PYTORCH_ALLOC_CONF", KEEP, "torch's allocator is the same"),
    Variable("VLLM_* FLASHINFER_* FLASH_ATTENTION_*", KEEP, "vLLM is the same, at its own version"),
    Variable("TORCH_* TORCHINDUCTOR_* TORCHDYNAMO_* TRITON_* CUBLAS_* CUDNN_*", KEEP,
             "torch is the same, at its own version"),
    Variable("OMP_* MKL_* KMP_* MALLOC_* GLIBC_TUNABLES LD_PRELOAD", KEEP, "threads and memory of the host"),
    Variable("PATH LD_LIBRARY_PATH LIBRARY_PATH CPATH CUDA_HOME CUDA_PATH CUDA_CACHE_PATH TMPDIR HOME LANG LC_* TZ "
             "NVIDIA_VISIBLE_DEVICES", KEEP, "the machine's own"),
]  # fmt: skip


def lines(command: Command) -> list[str]:
    """Return the section on the environment: a line for each variable that the script exports to verl, and for each file that
    was not read."""
    of_keys = {match[1]: value for key, value in command.values.items() if (match := OF_A_KEY.fullmatch(key))}
    of_keys |= {name: str(value).lower() for name, value in of_keys.items() if isinstance(value, bool)}
    given = command.environment | of_keys
    found = [f"{name}={_shown(name, str(value))}: {_word(name, str(value), command.text)}" for name, value in given.items()]
    found += [f"{file}: not read; check its variables as well{_of_cann(file)}" for file in command.unseen]
    return [f"# the environment ({len(found)})", *(f"#   {line}" for line in found)] if found else []


def _word(name: str, value: str, text: str) -> str:
    for variable in VARIABLES:
        named = any(fnmatchcase(name, pattern) for pattern in variable.names.split())
        if named and variable.part in value.lower():
            if value.lower() in variable.harmless:
                return f"{NOT_NEEDED}: harmless with this value"
            return f"{variable.verdict}: {variable.why}"
    if re.search(rf"\$\{{?{name}\b", text):
        return f"{NOT_NEEDED}: only the script itself reads it, and that has been evaluated"
    return "not known here: check what reads it"


def _shown(name: str, value: str) -> str:
    """Return the value; keys to accounts are not shown."""
    if name == "PATH" or (SECRET.search(name) and value):
        return "..."
    return value.replace("\n", "\\n")


def _of_cann(file: str) -> str:
    return ". CANN's are needed here too: source it before" if file.endswith("set_env.sh") else ""
