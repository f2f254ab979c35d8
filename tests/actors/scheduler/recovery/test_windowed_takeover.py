"""Models with windows in some layers: a successor gives their sequences pages of both kinds anew, and loses none."""

from __future__ import annotations

import random

import pytest

from tests.actors.scheduler.recovery.test_successors import Succession
from tests.actors.scheduler.world import prompt, request


def send_some(world: Succession, rng: random.Random, number: int) -> None:
    """A request: alone, with choices, or a beam search."""
    width = rng.choice([0, 0, 0, 2, 3])
    n = rng.randint(1, width) if width else rng.choice([1, 1, 2, 3])
    tokens, seed = prompt(rng.randint(1, 40), number // 2), {"max_tokens": rng.randint(1, 30)}
    world.send(request(f"r{number}", tokens, n=n, beam_width=width, ignore_eos=number % 2 == 0, **seed))


def some_steps(world: Succession, rng: random.Random, most: int) -> None:
    for _ in range(rng.randint(0, most)):
        if busy := [name for name, executor in world.executors.items() if executor.queue]:
            world.step(rng.choice(busy))


def lose(world: Succession, name: str, **options: int) -> None:
    """An executor dies with its cache, and another takes its name."""
    world.kill(name)
    world.join(name=name, scheduler_epoch=world.core.config.epoch, **options)


def what_there_is(world: Succession) -> set[str]:
    """Of sequences that are under way, and of those that wait."""
    found = set()
    for sequence in world.core.lifecycle.sequences.values():
        preempted = sequence.is_queued and sequence.request.num_preemptions > 0
        found.add("preempted, " + sequence.state.value if preempted else sequence.state.value)
        if sequence.entered and sequence.first_windowed:
            found.add("pages given back")
        if sequence.entered and sequence.choice_index:
            found.add("choices")
        if sequence.entered and sequence.beam_group is not None:
            found.add("beams")
    return found


@pytest.mark.parametrize("event", ["takeover", "loss"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_wherever_sequences_are(mode: str, event: str) -> None:
    """Running with pages behind the window given back, preempted, waiting; choices and beams: at one moment, all."""
    world = Succession(preemption_mode=mode)
    sizes = {"windowed_pages": 2, "windowed_tokens": 10, "num_blocks": 110, "num_host_blocks": 300, "max_num_seqs": 7}
    world.join(budget=16, **sizes)
    world.send(
        request("choices", prompt(30, 1), max_tokens=40, n=2),
        request("beams", prompt(20), max_tokens=24, beam_width=2),
        *(request(name, prompt(30, seed), max_tokens=50) for seed, name in enumerate("abcdef", 2)),
    )
    wanted = {"entered", "waiting", "pages given back", "choices", "beams"}
    wanted.add("preempted, swapped" if mode == "swap" else "preempted, waiting")
    for _ in range(60):
        if wanted <= what_there_is(world):
            break
        world.step()
    assert wanted <= what_there_is(world)
    before = len(world.plans)
    if event == "takeover":
        world.replace()
    else:
        lose(world, "gpu-0", epoch=9, budget=16, **sizes)
    world.run()

    world.check_end()
    assert world.failed == {}
    first = next(plan for _, plan in world.plans[before:] if plan.new_sequences)
    assert [new.num_computed_tokens for new in first.new_sequences][:1] == [0]
    assert len(first.new_windowed)


@pytest.mark.parametrize("seed", range(12))
def test_a_successor_goes_on_where_the_old_scheduler_was(seed: int) -> None:
    """Replaced at random moments, executors lost at others: every token is right, and no page is left."""
    rng = random.Random(seed)
    config = {"preemption_mode": rng.choice(["auto", "swap", "recompute"]), "eos_token_ids": (5,)}
    world = Succession(pipeline_depth=rng.randint(1, 3), enable_prefix_caching=rng.random() < 0.7, **config)
    pages, window = rng.choice([1, 2, 3]), rng.choice([1, 3, 6, 13])
    sizes = {"num_blocks": rng.choice([36, 60]) * (1 + pages), "windowed_pages": pages, "windowed_tokens": window}
    sizes |= {"num_host_blocks": rng.choice([0, 8, 100]), "budget": rng.choice([8, 64]), "max_num_seqs": 6}
    for name in ("gpu-0", "gpu-1"):
        world.join(name=name, **sizes)
    for number in range(7):
        send_some(world, rng, number)
        some_steps(world, rng, 10)
        if rng.random() < 0.4:
            world.sum_up()
        if rng.random() < 0.2:
            lose(world, "gpu-1", epoch=10 + number, **sizes)
        if rng.random() < 0.5:
            world.replace()
    world.run()
    world.check_end()
    assert world.failed == {}
