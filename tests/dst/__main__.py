"""``python -m tests.dst --seeds 1000 --from 0``: find a seed that breaks a promise. ``-v`` tells its story."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.dst.run import Outcome, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dst", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell what happened in each run")
    options = parser.parse_args()
    began_s, failed, faults, answers, jobs, virtual_s = time.perf_counter(), [], Counter[str](), 0, 0, 0.0
    windowed = pulling = split = pulls = failed_pulls = 0
    for seed in range(options.first, options.first + options.seeds):
        outcome = run_seed(seed)
        faults.update(outcome.faults)
        answers += outcome.answers
        jobs += outcome.jobs
        virtual_s += outcome.virtual_s
        windowed += outcome.windowed_pages > 0
        pulling += outcome.num_pulls > 0
        split += outcome.roles is not None
        pulls, failed_pulls = pulls + outcome.num_pulls, failed_pulls + outcome.num_failed_pulls
        if (seed + 1 - options.first) % 50 == 0:
            print(f"{seed + 1 - options.first} seeds, {answers} answers, {len(failed)} failed", flush=True)
        if options.verbose:
            print("\n".join(outcome.log))
        if outcome.problems:
            failed.append(seed)
            print(told(outcome), flush=True)
            if not options.keep_going:
                break
    seconds = time.perf_counter() - began_s
    print(
        f"{seed + 1 - options.first} seeds ({windowed} with windowed pages, {pulling} with pulls, "
        f"{split} with roles), {len(failed)} failed {failed[:20]}; "
        f"{answers} answers, {jobs} jobs, {pulls} pulls, {failed_pulls} failed ones, "
        f"{virtual_s:.0f} virtual seconds in {seconds:.1f} s; faults: {dict(faults)}"
    )
    return 1 if failed else 0


def told(outcome: Outcome) -> str:
    problems = "\n  ".join(outcome.problems[:10])
    return f"seed {outcome.seed} failed (again: python -m tests.dst --seeds 1 --from {outcome.seed} -v):\n  {problems}"


if __name__ == "__main__":
    sys.exit(main())
