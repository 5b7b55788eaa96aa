#!/usr/bin/env bash
# llama.cpp's server on SmolLM2-135M. Usage: llamacpp.sh PORT [further options of llama-server]
set -euo pipefail
peers=${PEERS:-$HOME/peers}
port=$1
shift
threads=${THREADS:-$(nproc)}
exec "${LLAMA_SERVER:-$peers/llama-server}" -m "${GGUF:-$peers/models/smollm2-bf16.gguf}" -a smollm2-135m --host 127.0.0.1 --port "$port" \
  -t "$threads" -tb "$threads" -np "${SLOTS:-32}" -c 32768 -kvu -b 2048 -ub 512 --metrics "$@"
