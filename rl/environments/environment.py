"""The environment variables of an episode's process: the rank's, without secrets and without those of the training job."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

SECRETS = re.compile(  # in a name, or at its end
    r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|JWT|CERT|WEBHOOK|(^|_)(PAT|AK|SK|DSN)$|_PWD$", re.IGNORECASE
)
SERVICES = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "HF_", "HUGGING_FACE_", "WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "SWANLAB_")
SERVICES += ("OPENAI_", "ANTHROPIC_", "GITHUB_", "GITLAB_", "DATABRICKS_", "CLEARML_", "VAULT_")
JOB = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
JOB_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
HARMLESS = {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_MODULES_CACHE"}
PASSWORD_IN_URL = re.compile(r"://[^\s@]+@|AccountKey=")


def reward_environment(environment: Mapping[str, str], passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that it gets. passed: names or patterns such as MY_*, from RL_PASS_ENV."""
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in passed) or not _is_removed(name, value)
    }


def _is_removed(name: str, value: str) -> bool:
    if name in HARMLESS:
        return False
    prefixed = name.upper().startswith((*SERVICES, *JOB))
    return prefixed or name in JOB_NAMES or bool(SECRETS.search(name) or PASSWORD_IN_URL.search(value))
