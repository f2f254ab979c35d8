#!/usr/bin/env bash
# Everything that docs/scale.md says of two GPUs of one host, in parts of one or two minutes each:
#   bash tests/gpu/ranks/run_all.sh all|PART[,PART...] FOLDER
# with PART one of, in this order:
#   exchange (sums by size: ours, NCCL's, torch's), large (sums of prompts by turns),
#   right (tokens and sums of tiny models), batches (steps in pieces, and answers that no batch changes), stages
#   (tokens of `-pp 2`), adapters (of a tiny model with three), drafts (of heads, MTP layers and small models), tokens
#   (whole experts, two stages of two ranks, models and adapters, all beside each other), tests,
#   products (on a GPU each: where a rank's decode steps spend their time, and gate and up of its prompts),
#   llama8b, llama70b, qwen30b-a3b (`-tp 2`), qwen30b-a3b-ep (with whole experts), llama8b-pp2, llama70b-pp2 (`-pp 2`),
#   replays (a million of a graph of exchanges), kills (of each rank under load), starts (of 70B),
#   replicas (one executor and two, over HTTP; MODELS are measured).
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

beside() { # NAME COMMAND...: the same in the background, without its output
  local name=$1
  shift
  OMP_NUM_THREADS=2 timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1 || echo "$name ended with $?" >>"$out/$name.txt" &
}

engine() { # PART OPTIONS...: with MODEL-pp2 two stages, with MODEL two ranks, with MODEL-ep these with whole experts
  local model=$1 flags="--tensor-parallel-size 2"
  case $1 in
  *-pp2) model=${1%-pp2} flags="--pipeline-parallel-size 2" ;;
  *-ep) model=${1%-ep} flags="--tensor-parallel-size 2 --enable-expert-parallel" ;;
  esac
  part "$1" $pagebus bench engine --model "$model" $flags --spec-method none --repeats 1 "${@:2}"
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
part large python3 -m tests.gpu.ranks.bench_exchange --large --seconds "${SECONDS_OF_LARGE:-60}"
part right python3 -m tests.gpu.ranks.check --families ${FAMILIES:-qwen2 gpt-oss gemma3 deepseek-v2-lite}
part batches python3 -m tests.gpu.ranks.check_batches --cases ${CASES:-pieces-llama3 pieces-olmo2 pieces-gpt-oss alone-llama3 alone-olmo2}
part stages python3 -m tests.gpu.ranks.check_stages --families ${FAMILIES:-qwen2 gpt-oss gemma3} --wide
part adapters python3 -m tests.gpu.ranks.check_adapters
part drafts python3 -m tests.gpu.ranks.check_drafts
if wanted tokens; then
  echo "== tokens after $(($(date +%s) - began)) s"
  for family in ${EXPERTS:-qwen3-moe gpt-oss deepseek-v2-lite}; do
    beside "tokens-experts-$family" python3 -m tests.gpu.ranks.check --expert-parallel --families "$family"
  done
  for family in ${FAMILIES:-gemma3 deepseek-v2-lite}; do
    beside "tokens-$family" python3 -m tests.gpu.ranks.check --families "$family"
  done
  beside tokens-adapters python3 -m tests.gpu.ranks.check_adapters
  beside tokens-stages python3 -m tests.gpu.ranks.check_stages --width 2 --families ${STAGES:-qwen2}
  wait
  tail -n 20 "$out"/tokens-*.txt
fi
if wanted products; then
  echo "== products after $(($(date +%s) - began)) s"
  CUDA_VISIBLE_DEVICES=0 beside products-decode python3 -m tests.gpu.bench.profile_decode llama8b --ranks 2 \
    --shapes 256x400 32x400 1x400
  CUDA_VISIBLE_DEVICES=1 beside products-prompts python3 -m tests.gpu.kernels.bench_prompt_products \
    --models llama8b-tp2 llama70b-tp2 --tokens 4096 8192 --configs 8 16 --rounds 4
  wait
  tail -n 60 "$out"/products-*.txt
fi
part tests python3 -m pytest -v -c /dev/null --rootdir . --noconftest --import-mode=importlib -p no:cacheprovider \
  tests/gpu/ranks/test_exchange.py
engine llama8b --workloads decode mixed256 prefill --batches 1 32 256
engine llama70b --workloads decode prefill --batches 1 32 128
engine qwen30b-a3b --workloads decode --batches 1 32 256
engine qwen30b-a3b-ep --workloads decode --batches 1 32 256
engine llama8b-pp2 --workloads decode mixed256 prefill --batches 1 32 256
engine llama70b-pp2 --workloads decode prefill --batches 1 32 128
part replays env RANK_REPLAYS="${REPLAYS:-1000000}" python3 -m pytest -v -c /dev/null --rootdir . --noconftest \
  --import-mode=importlib -p no:cacheprovider tests/gpu/ranks/test_exchange.py -k test_replays
part kills python3 -m tests.gpu.kill_actors --model "${KILLED:-qwen06b}" --tensor-parallel-size 2 \
  --spec-method none --deterministic --workload chat1000 --scale "${SCALE:-0.3}" --kill executor rank
part starts $pagebus bench start --model llama70b --tensor-parallel-size 2 --repeats 1
if wanted replicas; then
  echo "== replicas after $(($(date +%s) - began)) s"
  for model in ${MODELS:-qwen06b llama8b}; do
    for count in 1 2; do replicas "$model" "$count"; done
  done 2>&1 | tee -a "$out/replicas.txt"
  rm -rf "$out/shapes"
fi
echo "== done after $(($(date +%s) - began)) s"
