"""Makes requests of the messages in which they arrive."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from pagebus.actors.model.block_hash import hash_blocks, hashes_from_array
from pagebus.actors.scheduler.order import INTERACTIVE, JOB, Order, arrival
from pagebus.actors.scheduler.readers import Reader, Readers
from pagebus.actors.scheduler.request import Request
from pagebus.bus.messages import AlsoReads, SamplingParams, TokenizedRequest


def seed_of(request_id: str, sampling: SamplingParams, choice_index: int) -> int:
    """The sampling seed of one sequence: the client's, or one derived from the request id, plus the choice index;
    a signed 64-bit number."""
    seed = sampling.seed
    if seed is None:
        seed = int.from_bytes(blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "little")
    return (seed + choice_index + 2**63) % 2**64 - 2**63


def make_request(
    message: TokenizedRequest, eos_token_ids: tuple[int, ...], order: Order, others: Iterable[AlsoReads] = ()
) -> Request:
    """The request without its sequences. End tokens are the client's and, unless ignored, the model's."""
    sampling = message.sampling
    ends = dict.fromkeys(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(dict.fromkeys(eos_token_ids))
    return Request(
        id=message.request_id,
        readers=Readers(
            *(Reader(each.ingress, each.attempt, each.asked) for each in others),
            Reader(message.ingress, message.attempt, message.asked),
        ),
        sampling=sampling,
        priority_class=JOB if message.is_job else INTERACTIVE,
        deadline_s=order.deadline_s(message.arrived_s, message.priority, is_job=message.is_job),
        salt=message.cache_salt,
        arrived_s=message.arrived_s,
        prompt=array("i", message.prompt_token_ids.tobytes()),
        end_token_ids=tuple(ends),
        priority=message.priority,
        taken_s=message.taken_s,
        tokenized_s=message.tokenized_s,
        client=message.client,
        weight=message.weight,
        start_s=arrival(message.arrived_s),
        traced=message.traced,
        prediction=array("i", message.prediction_token_ids.tobytes()),
        adapter=message.adapter,
    )


def prompt_hashes(message: TokenizedRequest, block_size: int) -> list[bytes]:
    """Hashes of the prompt's full blocks: the tokenizer's, or recomputed here if its block size differs."""
    prompt = message.prompt_token_ids
    if len(message.block_hashes) == len(prompt) // block_size * 4:
        return hashes_from_array(message.block_hashes)
    digest = "" if message.adapter is None else message.adapter.digest
    return hash_blocks(prompt, block_size, salt=message.cache_salt, adapter=digest)
