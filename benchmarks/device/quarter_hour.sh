#!/usr/bin/env bash
# On a machine without a network, in a copy of the checkout with what pack.sh made:
#   bash .kit/quarter_hour.sh PART [SECONDS] [flags of drive.py]
set -u
limits=(0 340 140 160)
part=$1
seconds=${2:-${limits[$part]}}
started=$(date +%s)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
export OUT=${OUT:-$PWD/out} KIT_WORK=${KIT_WORK:-${TMPDIR:-/tmp}/kit}
mkdir -p "$OUT" "$KIT_WORK"
site=$KIT_WORK/site
if [[ ! -e $site/.done ]]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl \
    && touch "$site/.done" || { echo "the wheels could not be installed"; exit 1; }
fi
# In front, because the machine has an older transformers
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=disabled
export RL_CACHE=$KIT_WORK/cache
for kit in .kit .kit4; do
  [[ ! -d $kit/cache ]] || cp -rn "$kit/cache" "$KIT_WORK"
done
if [[ -f .kit2/piece && -f .kit3/piece && ! -f $KIT_WORK/smollm2.gguf ]]; then
  cat .kit2/piece .kit3/piece > "$KIT_WORK/smollm2.whl"
  if [[ $(sha256sum < "$KIT_WORK/smollm2.whl") == $(< .kit/smollm2.sha256) ]]; then
    python3 -m zipfile -e "$KIT_WORK/smollm2.whl" "$KIT_WORK/smollm2" && mv "$KIT_WORK"/smollm2/*/*.gguf "$KIT_WORK/smollm2.gguf"
  else
    echo "the pieces of SmolLM2 are damaged"
  fi
fi
echo "ready after $(($(date +%s) - started)) s"
python3 benchmarks/device/drive.py "$part" --seconds $((seconds - $(date +%s) + started)) "${@:3}"
