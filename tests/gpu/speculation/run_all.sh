#!/usr/bin/env bash
# Everything that docs/speculation.md says of a GPU, in parts of half a minute to a minute and a half each on an H200:
#   bash tests/gpu/speculation/run_all.sh all|PART[,PART...] FOLDER
# with PART one of, in this order: right (hand-made plans: all drafts right, or wrong), wrong (the scheduler's plans: no
# speculation, nothing found, all wrong), heads (an EAGLE-3 head with acceptance as published), engine (chat1000 and
# mixed256 with default flags and with --spec-method none), new (all families, ties in bfloat16), tests (all other tests).
# Each part's output goes to FOLDER/PART.txt too. A part that takes longer than LIMIT (150) seconds is ended.
# MODEL (llama8b) is what is measured; SIZES adds options to `pagebus bench engine`, whose WORKLOADS are the two above.
set -u
parts=$1 out=$2 began=$(date +%s)
model=${MODEL:-llama8b} limit=${LIMIT:-150}
read -ra sizes <<<"${SIZES:-}"
read -ra workloads <<<"${WORKLOADS:-chat1000 mixed256}"
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

part() { # NAME COMMAND...: run it if it is wanted
  local name=$1
  shift
  [[ ",$parts," == *",all,"* || ",$parts," == *",$name,"* ]] || return 0
  echo "== $name after $(($(date +%s) - began)) s"
  timeout "$limit" "$@" 2>&1 | tee -a "$out/$name.txt"
  local status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || echo "$name ended with $status" | tee -a "$out/$name.txt"
}

engine() { # OPTIONS...
  part engine python3 -m pagebus.actors.commands.cli bench engine --model "$model" --workloads "${workloads[@]}" \
    --repeats 1 "${sizes[@]}" "$@"
}

tests() { # NAME FILES...
  local name=$1
  shift
  part "$name" python3 -m pytest -q -c /dev/null --rootdir . --noconftest --import-mode=importlib -p no:cacheprovider \
    --durations 5 "$@"
}

here=tests/gpu/speculation
part right python3 -m tests.gpu.speculation.bench_drafts "$model" --batches 1 8 32 64 128 --modes off none full --tokens 65
part wrong python3 -m tests.gpu.speculation.bench_drafts "$model" --core --batches 1 8 32 128 256 --modes off idle none --tokens 257
part heads python3 -m tests.gpu.speculation.bench_heads "$model" --drafts 3 5 --batches 1 8 32 --tokens 129
engine
engine --spec-method none
tests new $here/test_families.py $here/test_ties.py
tests tests $here/test_heads.py $here/test_grammars.py $here/test_speculation.py $here/test_draft_model.py \
  $here/test_mtp.py
echo "== done after $(($(date +%s) - began)) s"
