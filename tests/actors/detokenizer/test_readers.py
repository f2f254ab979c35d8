"""Requests that are read at several ingresses: each is sent the same."""

from __future__ import annotations

from pagebus.actors.detokenizer.sequences import Sequences
from pagebus.actors.settings import Settings
from pagebus.bus.messages import END_GRAMMAR, END_LENGTH, PromptReply, ReplyBatch, RequestFailed
from tests.actors.detokenizer.test_scores import ints
from tests.actors.detokenizer.test_sequences import DECODER, rows_of, run, started, step
from tests.actors.detokenizer.world import NAMES, TEXT, TOKENS, World, joined, running, steps
from tests.actors.detokenizer.world import started as announced


def test_text_is_taken_once_and_sent_to_each() -> None:
    """Beside what one of them reads alone."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, others=("in-1", "in-2")))
    sequences.start(started(2))
    output = run(sequences, [*rows_of("ab", END_LENGTH), *rows_of("xy", sequence_id=2)])

    batches = {ingress: message for ingress, message in output.copies if isinstance(message, ReplyBatch)}
    assert list(batches) == ["in-0", "in-1", "in-2"]
    assert {(each.texts, each.finish_reasons) for each in batches.values()} == {(("ab",), ("length",))}
    assert {ingress: batch.texts for ingress, batch in output.replies.items()} == {"in-0": ("xy",)}


def test_the_prompt_comes_before_the_text_everywhere() -> None:
    """An ingress has no use for an end without it."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, others=("in-1",), prompt_token_ids=ints(97, 98)))
    output = run(sequences, rows_of("ab", END_LENGTH))

    assert [(ingress, reply.text) for ingress, reply in output.prompts] == [("in-0", "ab")]
    assert [(ingress, type(message)) for ingress, message in output.copies] == [
        ("in-1", PromptReply),
        ("in-0", ReplyBatch),
        ("in-1", ReplyBatch),
    ]


def test_a_failure_is_told_to_each_once() -> None:
    """And to the scheduler once. A sequence that cannot even begin fails the same way."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, others=("in-1",)))
    sequences.apply(step((1, 65, 0, END_GRAMMAR)))
    sequences.refuse(started(2, others=("in-1",)))
    output = sequences.take()

    assert [(ingress, failure.request_id) for ingress, failure in output.failures] == [("in-0", "r1"), ("in-0", "r2")]
    copies = [(ingress, message.status) for ingress, message in output.copies if isinstance(message, RequestFailed)]
    assert copies == [("in-1", 400), ("in-1", 500)]
    assert len(output.controls) == 2


async def test_each_mailbox_gets_all_of_it(world: World, settings: Settings) -> None:
    """Over the bus."""
    await world.executor("gpu-0")
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), announced(1, others=("in-1",)))
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
        told = [joined(await world.replies(ingress)) for ingress in ("in-0", "in-1")]

    assert told == [(TEXT, "length", len(TOKENS))] * 2
