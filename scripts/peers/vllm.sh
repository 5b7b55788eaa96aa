#!/usr/bin/env bash
# vLLM's CPU build on SmolLM2-135M. Usage: vllm.sh PORT [further options of vllm serve]
set -euo pipefail
peers=${PEERS:-$HOME/peers}
port=$1
shift
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=${KV_GIB:-2} VLLM_CPU_OMP_THREADS_BIND=auto VLLM_CPU_NUM_OF_RESERVED_CPU=0
exec "$peers/vllm/bin/vllm" serve "${MODEL:-$peers/models/smollm2-135m}" --served-model-name smollm2-135m --host 127.0.0.1 --port "$port" \
  --dtype "${DTYPE:-bfloat16}" --max-model-len 2048 --max-num-seqs 64 "$@"
