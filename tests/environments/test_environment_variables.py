"""The environment variables of an episode's process: without secrets, and without those of the training job."""

import pytest

from rl.environments.environment import reward_environment

SECRETS = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
    "MY_PASSWORD",
    "db_passwd",
    "SERVICE_CREDENTIALS",
]
SECRETS += [
    "OPENAI_API_KEY",
    "SSH_AUTH_SOCK",
    "github_token",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_CLIENT_ID",
    "Some_Secret_Thing",
]
OF_THE_JOB = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "GROUP_RANK",
]
KEPT = [
    "PATH",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "MY_SETTING",
]


def test_secrets_and_the_job_are_kept_back_by_name():
    environment = dict.fromkeys([*SECRETS, *OF_THE_JOB, *KEPT], "value")
    assert reward_environment(environment).keys() == set(KEPT)
    assert reward_environment(environment, ["HF_TOKEN", "AWS_*"]).keys() == {
        *KEPT,
        "HF_TOKEN",
        "AWS_PROFILE",
        "AWS_SECRET_ACCESS_KEY",
    }
    assert reward_environment(environment, ["*"]) == environment


def test_a_url_with_a_password_is_kept_back():
    environment = {
        "https_proxy": "http://me:word@proxy:1",
        "STORE": "postgres://u:p@host/db",
        "http_proxy": "http://proxy:1",
        "X": "a:b@c",
    }
    assert reward_environment(environment).keys() == {"http_proxy", "X"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "x") for name in ("DB_PASS", "SSHPASS", "MYSQL_PWD", "GH_PAT", "HUAWEICLOUD_SDK_AK", "OBS_SK", "SENTRY_DSN")),
        *((name, "x") for name in ("SLACK_WEBHOOK_URL", "SMTP_PASSWORD")),
        ("PIP_EXTRA_INDEX_URL", "https://ghp_x@host/simple"),
        ("STORE", "postgres://me:a/b@host/db"),
        ("STORE", "DefaultEndpointsProtocol=https;AccountKey=abc"),
    ],
)
def test_further_secrets_are_kept_back(name, value):
    plain = {"PWD": "/here", "OLDPWD": "/there", "PATH": "/bin", "LANG": "C", "PAGE": "https://host/a"}
    assert reward_environment({name: value, **plain}) == plain
