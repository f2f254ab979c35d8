"""How good the scheduler's choices are between pulling blocks and computing them, over links of several rates.

    python -m tests.actors.simulator.bench_links

Prints, for each workload, all times to first tokens in seconds: as the scheduler chooses, without pulls, and with all
that are possible; and how much worse than the better of these two the first is.
"""

from __future__ import annotations

from tests.actors.simulator.test_moves import RATES, others_s, shared_prefixes, total_ttft_s


def main() -> None:
    """Nine workloads."""
    print(f"{'prompts/s':>9} {'seed':>4} {'Gb/s':>6} {'chosen':>8} {'never':>8} {'always':>8}")
    for rate in (4.0, 12.0, 24.0):
        for seed in range(3):
            trace = shared_prefixes(seed, rate)
            for gbps in RATES:
                chosen, (never, always) = total_ttft_s(trace, gbps), others_s(trace, gbps)
                off = chosen / min(never, always) - 1
                print(f"{rate:9} {seed:4} {gbps:6} {chosen:8.3f} {never:8.3f} {always:8.3f} {off:+.1%}", flush=True)


if __name__ == "__main__":
    main()
