#!/usr/bin/env bash
# What runs on a CPU, tested with the older versions of requirements-npu.txt, less what wants an NPU:
#   tests/tools/older_set.sh [DIRECTORY] [pytest's own arguments]     # of the virtual environment; made, and filled, if it is not there
#   tests/tools/older_set.sh --this-torch [DIRECTORY] [...]           # with the torch and all else that python has; transformers is older
# The second takes a minute to fill, and runs the tests of models, images, engines and experts (tests/project/test_requirements.py does it).
# It exits with 77 where pip cannot install.
set -euo pipefail
cd "$(dirname "$0")/../.."
tests=(delta_net forward_check grouped_experts router sharded_weights)
tests+=(vision vision_engine vision_experts images engine experts demo_vl)
if [[ ${1:-} == --this-torch ]]; then
  shift
  venv=${1:-$(mktemp -d)}
  if [[ ! -e $venv/filled ]]; then
    python -m venv --without-pip "$venv"
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$(echo "$venv"/lib/python*/site-packages)/present.pth"
    python -m pip --quiet --python "$venv/bin/python" install --no-compile "$(grep '^transformers==' requirements-npu.txt)" || exit 77
    touch "$venv/filled"
  fi
else
  venv=${1:-$(mktemp -d)}
  tests+=(losses losses_policy losses_rollout batch learner ring train_sync split)
  if [[ ! -x $venv/bin/pytest ]]; then
    "$(command -v python3.11 || command -v python3)" -m venv "$venv"
    # PyPI's torch is the CUDA one, some gigabytes; the smaller one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
    "$venv/bin/pip" install --quiet \
      -r <(grep -vE '^(torch-npu|vllm-ascend)' requirements-npu.txt; grep -E '^(pytest|hypothesis)' requirements-dev.txt)
  fi
fi
"$venv/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
mapfile -t files < <(for name in "${tests[@]}"; do ls tests/*/"test_$name.py"; done)
exec "$venv/bin/python" -m pytest "${files[@]}" "${@:2}"
