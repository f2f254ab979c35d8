"""The states of sequences, and the owners of their fields: what the docs say is what the code does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from pagebus.actors.scheduler.events import DetokenizerLost, DetokenizersLive, ReplicaLost
from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.actors.scheduler.request import Request, Sequence
from pagebus.actors.scheduler.states import TRANSITIONS, State
from tests.actors.scheduler.replica.test_host_tier import A, B, tight
from tests.actors.scheduler.world import World, prompt, request
from tests.actors.simulator.random_schedule import run_schedule

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "scheduling.md").read_text()
RARE_SEEDS, MOST_SEEDS = (84, 59, 11, 6, 1), 1000
"""Schedules that take rare transitions come first; should they not do so any more, others are tried."""
CHANGES = {"append", "extend", "frombytes", "insert", "pop", "clear", "remove", "add"}
CLASSES = {"Sequence": Sequence, "HeldBlocks": Sequence, "Request": Request, "RequestProgress": Request}
OWN = {"become", "begin_again", "extend_hashes", "note_loss"}
"""Methods by which a sequence changes itself, whoever asks it to."""

Transition = tuple[State, State]


# -- transitions ------------------------------------------------------------------------------------------------------
def test_the_docs_show_every_transition_with_its_owner() -> None:
    """Their table and the code's are the same."""
    lines = re.findall(r"^\| ([a-z ]+) \| ([a-z ]+) \| `(\w+)` \| .+ \|$", DOCS, re.MULTILINE)
    shown = {(State(before), State(after)): owner for before, after, owner in lines}
    assert len(shown) == len(lines)
    assert shown == TRANSITIONS


def test_only_owners_make_transitions() -> None:
    """A module calls ``become`` with a state exactly if the table makes it the owner of a transition to it."""
    made = set()
    for owner, node in walk():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "become":
            made |= {(owner, state) for state in targets(node.args[0])}
    assert made == {(owner, after) for (_, after), owner in TRANSITIONS.items()}


def targets(argument: ast.expr) -> set[State]:
    assert isinstance(argument, ast.Attribute), ast.unparse(argument)
    return {State.WAITING, State.SWAPPED} if argument.attr == "at_rest" else {State[argument.attr]}


def test_another_transition_is_an_error() -> None:
    """A sequence that has ended gets no slot."""
    world = World()
    world.send(request("a", [1, 2]))
    (sequence,) = world.core.waiting
    sequence.become(State.ENDED)
    with pytest.raises(AssertionError, match="cannot be bound: it is ended"):
        sequence.become(State.BOUND)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[Transition]:
    """Transitions that sequences have made."""
    seen: set[Transition] = set()
    become = Sequence.become

    def watched(self: Sequence, state: State) -> None:
        seen.add((self.state, state))
        become(self, state)

    monkeypatch.setattr(Sequence, "become", watched)
    return seen


def test_schedules_take_every_transition(taken: set[Transition]) -> None:
    """None of them stands in the table only."""
    score_a_prompt_again()
    lose_a_replica_that_loads()
    for seed in (*RARE_SEEDS, *range(MOST_SEEDS)):
        run_schedule(seed, ("auto", "recompute", "swap")[seed % 3])
        if len(taken) == len(TRANSITIONS):
            break
    assert taken == set(TRANSITIONS)


def score_a_prompt_again() -> None:
    """Its detokenizer is lost when it has ended."""
    world = World()
    world.join(budget=4)
    done, world._done = world._done, lambda name: []  # type: ignore[method-assign]
    world.send(request("a", prompt(5), max_tokens=1, prompt_logprobs=0))
    world.run()
    world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
    world._done = done  # type: ignore[method-assign]
    world.run()


def lose_a_replica_that_loads() -> None:
    """A swapped sequence has a slot again, and does not come to enter beside one that fills the steps meanwhile."""
    world, executor = tight(num_blocks=30, copy_lag=1000)
    world.send(request("a", A[:16], max_tokens=40), request("b", B[:16], max_tokens=30))
    for _ in range(6):
        world.step()
    replica = world.core.replicas["gpu-0"]
    preempt(replica, next(each for each in replica.slots.occupied() if each.request.id == "b"))
    world.core.planner.requeue(replica)
    while not executor.num_copied[1]:
        world.step()
    del world.executors["gpu-0"]
    world.send(ReplicaLost("gpu-0", "killed"))


# -- owners of fields -------------------------------------------------------------------------------------------------
def owned() -> dict[tuple[type, str], set[str]]:
    """Who may change each field, by the docs: names of modules."""
    table = re.search(r"### Who changes what.*?\n\n(?=\|)(.*?)\n\n", DOCS, re.DOTALL)
    assert table is not None
    owners: dict[tuple[type, str], set[str]] = {}
    for line in re.findall(r"^\| .* \|$", table[1], re.MULTILINE)[2:]:
        who, *columns = line.strip("| ").split(" | ")
        for cls, column in zip((Sequence, Request), columns, strict=True):
            for name in re.findall(r"`(\w+)`", column):
                assert (cls, name) not in owners, f"{name} has two rows"
                owners[cls, name] = set(re.findall(r"`(\w+)`", who))
    return owners


def test_every_field_has_an_owner() -> None:
    """The table names each field of both classes once."""
    assert set(owned()) == {(cls, each.name) for cls in (Sequence, Request) for each in fields(cls)}


def test_only_owners_change_fields() -> None:
    """Nobody else in the scheduler does so, or calls a method that does; and all who stand in the table do."""
    owners, changed = owned(), set()
    for who, target in (*written(), *told()):
        cls = Request if target.endswith((".request", "request")) else Sequence
        name = target.field
        if (cls, name) in owners:
            assert who in owners[cls, name], f"{who} changes {target}.{name}"
            changed.add((cls, name))
    assert {key for key, who in owners.items() if who} == changed


class Target(str):
    """What an attribute is changed of, as it stands in the code; ``field`` is the attribute."""

    field: str


def written() -> Iterator[tuple[str, Target]]:
    """Every change of another object's attribute in the scheduler, and who makes it."""
    for who, node in walk():
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            targets = [node.func.value]
        else:
            continue
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                of = each.value if isinstance(each, ast.Subscript) else each
                if isinstance(of, ast.Attribute) and ast.unparse(of.value) not in ("self", "output"):
                    found = Target(ast.unparse(of.value))
                    found.field = of.attr
                    yield who, found


def told() -> Iterator[tuple[str, Target]]:
    """Every change by a method of the sequence or request, and who calls it."""
    methods = changing_methods()
    for who, node in walk():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver, method = ast.unparse(node.func.value), node.func.attr
            cls = Request if receiver.endswith("request") else Sequence
            if cls is Request or receiver in ("sequence", "member", "leader", "first"):
                for name in methods.get((cls, method), ()):
                    found = Target(receiver)
                    found.field = name
                    yield who, found


def changing_methods() -> dict[tuple[type, str], set[str]]:
    """The fields that each method of the two classes assigns."""
    methods: dict[tuple[type, str], set[str]] = {}
    for _, node in walk():
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name not in OWN:
                    methods[CLASSES[node.name], function.name] = {
                        each.attr
                        for each in ast.walk(function)
                        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                    }
    return methods


def walk() -> Iterator[tuple[str, ast.AST]]:
    """All that stands in the scheduler's code, with the module in which it does."""
    for path in sorted((ROOT / "actors" / "scheduler").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.stem, node
