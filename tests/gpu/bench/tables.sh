#!/usr/bin/env bash
# Everything that the tables of docs/performance.md show, in parts of half a minute to four minutes each on an H200:
#   tests/gpu/bench/tables.sh all|PART[,PART...] FOLDER [options of pagebus serve...]
# with PART one of llama8b qwen06b start-llama8b start-qwen06b long llama8b-fp8 qwen06b-fp8 swap deterministic-llama8b
# deterministic-qwen06b, and of one server in the order given: single chat chat256 shared-prefix long4k. It writes JSON into
# FOLDER, for `pagebus bench tables FOLDER/*.json --into docs/performance.md`.
# REPEATS (3) is the number of runs, PORT (8790) the server's; SIZES adds options that make workloads smaller, for a try on
# a CPU.
set -u
parts=$1 out=$2 began=$(date +%s)
shift 2
options=("$@")
read -ra sizes <<<"${SIZES:-}"
repeats=${REPEATS:-3} port=${PORT:-8790}
mkdir -p "$out"

measure() { # NAME COMMAND...: run it, its figures go to NAME.json
  local name=$1
  shift
  echo "== $name after $(($(date +%s) - began)) s"
  python3 -m pagebus.actors.commands.cli bench "$@" --repeats "$repeats" --json "$out/$name.json" 2>"$out/$name.err" || cat "$out/$name.err"
  rm -f "$out/$name.err"
}

engine() { # NAME MODEL OPTIONS...
  local name=$1 model=$2
  shift 2
  measure "$name" engine --model "$model" "${sizes[@]}" "${options[@]}" "$@"
}

start() { # MODEL
  python3 -m pagebus.actors.commands.cli compile-kernels "$shapes/$1" "${options[@]}" >"$out/compile.log" 2>&1 || cat "$out/compile.log"
  rm -f "$out/compile.log"
  measure "start-$1" start --model "$1" "${options[@]}"
}

online() { # WORKLOAD: of a server of llama8b that is started for the first
  if [ -z "${server:-}" ]; then
    python3 -m pagebus.actors.commands.cli serve "$shapes/llama8b" --load-format dummy --served-model-name llama8b --port "$port" \
      --itl-target-ms 40 \
      "${options[@]}" >"$out/serve.log" 2>&1 &
    server=$!
    for _ in $(seq 600); do
      python3 -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null && break
      sleep 0.2
    done
  fi
  measure "serve-$1" serve --base-url "http://127.0.0.1:$port" --model llama8b --workload "$1" --disable-tqdm \
    --continuous-usage-stats ${SERVE_SIZES:-}
}

stop_server() {
  [ -z "${server:-}" ] || { kill "$server" && wait "$server"; }
  server=
}

shapes=$(mktemp -d)
trap 'rm -rf "$shapes"; stop_server' EXIT
for model in llama8b qwen06b; do python3 -m pagebus.actors.commands.cli bench shape "$model" "$shapes" >/dev/null; done

measure_part() { # PART
  case $1 in
    llama8b) engine llama8b llama8b --workloads decode mixed256 chat1000 ;;
    qwen06b) engine qwen06b qwen06b --workloads decode mixed256 chat1000 prefill ;;
    start-*) start "${1#start-}" ;;
    long) engine llama8b-long llama8b --workloads prefill prefix longctx ;;
    *-fp8) engine "$1" "${1%-fp8}" --workloads decode mixed256 --batches 256 --kv-cache-dtype fp8 ;;
    swap) engine llama8b-swap llama8b --workloads swap ;;
    deterministic-*)
      local model=${1#deterministic-}
      engine "$model-deterministic" "$model" --workloads decode mixed256 --batches 1 32 256 --deterministic
      ;;
    single | chat | chat256 | shared-prefix | long4k) online "$1" ;;
    *) echo "there is no part $1" >&2 && exit 2 ;;
  esac
}

everything=llama8b,qwen06b,start-llama8b,start-qwen06b,long,llama8b-fp8,qwen06b-fp8,swap,deterministic-llama8b
everything+=,deterministic-qwen06b,single,chat,chat256,shared-prefix,long4k
[ "$parts" != all ] || parts=$everything
for part in ${parts//,/ }; do
  case $part in single | chat | chat256 | shared-prefix | long4k) ;; *) stop_server ;; esac # it has the GPU's memory
  measure_part "$part"
done
echo "== done after $(($(date +%s) - began)) s"
