#!/usr/bin/env bash
# The figures of docs/benchmarking.md in one go: jaxserve, vLLM and llama.cpp in turn at 1, 8 and 32 requests at once, then jaxserve over a range of rates.
# Usage: compare.sh OUTPUT_FOLDER [ROUNDS]; about 20 minutes for 5 rounds on two cores. Wants a quiet machine: it waits for one before each run and says how
# quiet it was.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
out=$1
rounds=${2:-5}
jaxserve=${JAXSERVE:-$root/.venv/bin/jaxserve}
mkdir -p "$out"
"$jaxserve" bench compare --rounds "$rounds" --concurrency 1,8,32 --duration 10 --input-len 128 --output-len 64 --settle 60 --log-folder "$out" \
  --server "jaxserve=$jaxserve run smollm2-135m --port {port} --grpc-port 0 --max-model-len 2048" \
  --server "vllm=$here/vllm.sh {port}" \
  --server "llamacpp=$here/llamacpp.sh {port}" \
  --json "$out/compare.json" --html "$out/compare.html" | tee "$out/compare.txt"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$jaxserve" run smollm2-135m --port "$port" --grpc-port 0 --max-model-len 2048 >"$out/sweep-server.log" 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl -sf "http://127.0.0.1:$port/ready" >/dev/null; do
  kill -0 $server
  sleep 0.5
done
"$jaxserve" bench serve --url "http://127.0.0.1:$port" --sweep-rate 1,2,3,4,5 --duration 25 --input-len 128 --output-len 64 \
  --goodput ttft:1000,tpot:100 --json "$out/sweep.json" --html "$out/sweep.html" | tee "$out/sweep.txt"
