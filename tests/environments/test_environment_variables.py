"""The environment variables of an episode's process: without secrets, and without those of the training job."""

import pytest

from user_code.server import without_secrets

SECRETS = """
HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_PROFILE MY_PASSWORD db_passwd SERVICE_CREDENTIALS OPENAI_API_KEY
SSH_AUTH_SOCK github_token GOOGLE_APPLICATION_CREDENTIALS AZURE_CLIENT_ID Some_Secret_Thing DB_PASS SSHPASS MYSQL_PWD
GH_PAT HUAWEICLOUD_SDK_AK OBS_SK SENTRY_DSN SLACK_WEBHOOK_URL SMTP_PASSWORD
"""
OF_THE_JOB = "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID GROUP_RANK"
KEPT = "PATH HOME LANG PWD OLDPWD LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES PYTHONPATH OMP_NUM_THREADS HF_HOME MY_SETTING"


def test_secrets_and_the_job_are_kept_back_by_name():
    environment = dict.fromkeys(f"{SECRETS} {OF_THE_JOB} {KEPT}".split(), "value")
    assert without_secrets(environment).keys() == {*KEPT.split()}
    named = {"HF_TOKEN", "AWS_PROFILE", "AWS_SECRET_ACCESS_KEY"}
    assert without_secrets(environment, ["HF_TOKEN", "AWS_*"]).keys() == {*KEPT.split(), *named}
    assert without_secrets(environment, ["*"]) == environment


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("https_proxy", "http://me:word@proxy:1"),
        ("STORE", "postgres://u:p@host/db"),
        ("STORE", "postgres://me:a/b@host/db"),
        ("STORE", "DefaultEndpointsProtocol=https;AccountKey=abc"),
        ("PIP_EXTRA_INDEX_URL", "https://ghp_x@host/simple"),
    ],
)
def test_a_value_with_a_password_is_kept_back(name, value):
    plain = {"http_proxy": "http://proxy:1", "X": "a:b@c", "PAGE": "https://host/a"}
    assert without_secrets({name: value, **plain}) == plain
