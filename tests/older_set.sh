#!/usr/bin/env bash
# What runs on a CPU, tested with the older torch and transformers of requirements-npu.txt, less what wants an NPU:
#   tests/older_set.sh [DIRECTORY] [pytest's own arguments]     # of the virtual environment; made, and filled, if it is not there
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-$(mktemp -d)}
if [[ ! -x $venv/bin/pytest ]]; then
  "$(command -v python3.11 || command -v python3)" -m venv "$venv"
  # PyPI's torch is the CUDA one, some gigabytes; the smaller one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
  "$venv/bin/pip" install --quiet \
    -r <(grep -vE '^(torch-npu|vllm-ascend)' requirements-npu.txt; grep -E '^(pytest|hypothesis)' requirements-dev.txt)
fi
"$venv/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
exec "$venv/bin/python" -m pytest tests/test_{losses,losses_policy,losses_rollout,batch,engine,learner,ring,train_sync,split}.py "${@:2}"
