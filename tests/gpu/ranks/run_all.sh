#!/usr/bin/env bash
# Everything that docs/scale.md says of two GPUs of one host, in parts of one or two minutes each:
#   bash tests/gpu/ranks/run_all.sh all|PART[,PART...] FOLDER
# with PART one of, in this order: exchange (sums by size: ours, NCCL's, torch's), right (tokens and sums of tiny models),
# batches (steps in pieces, and answers that no batch changes), stages (tokens of `-pp 2`), adapters (tokens of a tiny model
# with three of them), drafts (tokens with drafts of heads, MTP layers and small models), tests, llama8b, llama70b,
# qwen30b-a3b (`-tp 2`), llama8b-pp2, llama70b-pp2 (`-pp 2`), replicas (one executor and two, over HTTP; MODELS are measured).
# Each part's output goes to FOLDER/PART.txt too. What takes longer than LIMIT (150) seconds is ended.
set -u
parts=$1 out=$2 began=$(date +%s)
limit=${LIMIT:-150} port=${PORT:-8790}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
pagebus="python3 -m pagebus.actors.commands.cli"

wanted() { [[ ",$parts," == *",all,"* || ",$parts," == *",$1,"* ]]; }

part() { # NAME COMMAND...: run it if it is wanted
  local name=$1
  shift
  wanted "$name" || return 0
  echo "== $name after $(($(date +%s) - began)) s"
  timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$out/$name.txt"
  local status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || echo "$name ended with $status" | tee -a "$out/$name.txt"
}

engine() { # PART OPTIONS...: with MODEL-pp2 two stages, with MODEL two ranks
  local model=${1%-pp2} flag=--tensor-parallel-size
  [ "$model" = "$1" ] || flag=--pipeline-parallel-size
  part "$1" $pagebus bench engine --model "$model" $flag 2 --spec-method none --repeats 1 "${@:2}"
}

replicas() { # MODEL COUNT: the throughput of so many executors, with 256 clients each
  $pagebus bench shape "$1" "$out/shapes"
  $pagebus serve "$out/shapes/$1" --load-format dummy --executors "$2" --port "$port" >"$out/serve-$1-$2.log" 2>&1 &
  local server=$!
  for _ in $(seq 300); do
    python3 -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null && break
    sleep 0.2
  done
  echo "$1, $2 executors"
  timeout "$limit" $pagebus bench serve --base-url "http://127.0.0.1:$port" --workload chat256 --processes 8 --disable-tqdm \
    --num-prompts $((1000 * $2)) --max-concurrency $((256 * $2)) --repeats "${REPEATS:-1}"
  kill "$server" && wait "$server"
}

part exchange python3 -m tests.gpu.ranks.bench_exchange --seconds 60
part right python3 -m tests.gpu.ranks.check --families ${FAMILIES:-qwen2 gpt-oss gemma3 deepseek-v2-lite}
part batches python3 -m tests.gpu.ranks.check_batches --cases ${CASES:-pieces-llama3 pieces-olmo2 pieces-gpt-oss alone-llama3 alone-olmo2}
part stages python3 -m tests.gpu.ranks.check_stages --families ${FAMILIES:-qwen2 gpt-oss gemma3} --wide
part adapters python3 -m tests.gpu.ranks.check_adapters
part drafts python3 -m tests.gpu.ranks.check_drafts
part tests python3 -m pytest -v -c /dev/null --rootdir . --noconftest --import-mode=importlib -p no:cacheprovider \
  tests/gpu/ranks/test_exchange.py
engine llama8b --workloads decode mixed256 prefill --batches 1 32 256
engine llama70b --workloads decode prefill --batches 1 32 128
engine qwen30b-a3b --workloads decode --batches 1 32 256
engine llama8b-pp2 --workloads decode mixed256 prefill --batches 1 32 256
engine llama70b-pp2 --workloads decode prefill --batches 1 32 128
if wanted replicas; then
  echo "== replicas after $(($(date +%s) - began)) s"
  for model in ${MODELS:-qwen06b llama8b}; do
    for count in 1 2; do replicas "$model" "$count"; done
  done 2>&1 | tee -a "$out/replicas.txt"
  rm -rf "$out/shapes"
fi
echo "== done after $(($(date +%s) - began)) s"
