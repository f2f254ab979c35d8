"""How good the scheduler's choices are between pulling blocks and computing them, over links of several rates.

    python -m tests.actors.simulator.bench_links

Prints, for each workload, all times to first tokens in seconds: as the scheduler chooses, without pulls, and with all
that are possible; and how much worse than the better of these two the first is.
"""

from __future__ import annotations

from tests.actors.simulator.test_moves import shared_prefixes, total_ttft_s, with_all_pulls_s, without_pulls_s

RATES = (1.0, 2.5, 5.0, 10.0, 25.0, 100.0, 2000.0)
"""Of links, in Gb/s."""


def main() -> None:
    """Nine workloads."""
    print(f"{'prompts/s':>9} {'seed':>4} {'Gb/s':>6} {'chosen':>8} {'never':>8} {'always':>8}")
    for rate in (4.0, 12.0, 24.0):
        for seed in range(3):
            trace = shared_prefixes(seed, rate)
            for gbps in RATES:
                chosen, never = total_ttft_s(trace, gbps), without_pulls_s(seed, rate)
                always = with_all_pulls_s(trace, gbps)
                off = chosen / min(never, always) - 1
                print(f"{rate:9} {seed:4} {gbps:6} {chosen:8.3f} {never:8.3f} {always:8.3f} {off:+.1%}", flush=True)


if __name__ == "__main__":
    main()
