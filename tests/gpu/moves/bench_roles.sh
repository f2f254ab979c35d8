#!/usr/bin/env bash
# Pauses of streams beside long prompts on two GPUs, with roles and without: tests/gpu/moves/bench_roles.sh FOLDER [CLIENTS]
# CASES chooses some of: mixed roles roles-target mixed-target auto auto-target; PROMPTS: so many, not all; TARGET: ms;
# OPTIONS: of the server, for all cases
set -u
folder=$1 clients=${2:-32} address=http://127.0.0.1:8700
pagebus="python3 -m pagebus.actors.commands.cli"
get() { python3 -c "import sys, urllib.request as r; print(r.urlopen('$address$1').read().decode())" 2>/dev/null; }
shapes=$(mktemp -d)
trap 'rm -rf "$shapes"' EXIT
mkdir -p "$folder"
$pagebus bench shape llama8b "$shapes" >/dev/null

measure() { # NAME [OPTIONS of pagebus serve...]
  local name=$1
  shift
  $pagebus serve "$shapes/llama8b" --load-format dummy --executors 2 --port 8700 --spec-method none "$@" ${OPTIONS:-} >"$folder/$name.log" 2>&1 &
  local server=$!
  for _ in $(seq 400); do
    get /health | grep -q '"executor-0":"ready","executor-1":"ready"' && break
    sleep 0.2
  done
  echo "== long4k, $clients clients, $name"
  timeout 100 $pagebus bench serve --base-url "$address" --workload long4k \
    --max-concurrency "$clients" ${PROMPTS:+--num-prompts "$PROMPTS"} --continuous-usage-stats --disable-tqdm --json "$folder/$name.json" 2>&1
  get /metrics | grep -E '^pagebus:(pulled|lent|failed_pull)_blocks'
  kill $server
  wait $server
}

for name in ${CASES:-mixed roles roles-target mixed-target}; do
  case $name in
    mixed) measure "$name" ;;
    roles) measure "$name" --roles prefill=1,decode=1 ;;
    mixed-target) measure "$name" --itl-target-ms "${TARGET:-15}" ;;
    roles-target) measure "$name" --roles prefill=1,decode=1 --itl-target-ms "${TARGET:-15}" ;;
    auto) measure "$name" --roles auto ;;
    auto-target) measure "$name" --roles auto --itl-target-ms "${TARGET:-15}" ;;
  esac
done
