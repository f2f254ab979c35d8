"""The clients of a simulated deployment: they send the requests of a trace and note when their tokens come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.core.lifecycle import SEQUENCE_IDS
from pagebus.actors.scheduler.replica.drafts.runs import turns
from pagebus.actors.simulator.histogram import Histogram
from pagebus.actors.simulator.recording.trace import Trace
from pagebus.actors.simulator.simulation import Observer, Simulation
from pagebus.actors.simulator.tokenizer import ModelTokenizer
from pagebus.bus.messages import (
    Int32Array,
    RequestFailed,
    RequestsDone,
    SamplingParams,
    SequenceEnded,
    SequenceStarted,
    StepResult,
    TokenizedRequest,
)

_SEVERAL = 4096
_OWN, _GROUP, _KNOWN = 1, 2, 3
"""What the last number of a made-up block hash says: whose block it is."""


class WrongTokens(AssertionError):
    """A sequence did not get exactly the tokens it should."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps, in seconds: time to its first token, and mean time per token after it."""

    ttft_s: float = float("inf")
    itl_s: float = float("inf")


class Tracks:
    """What is remembered of each living sequence: one row of every array, used again after its end."""

    def __init__(self) -> None:
        self.arrived_s = np.zeros(_SEVERAL)
        self.first_s = np.zeros(_SEVERAL)
        self.last_s = np.zeros(_SEVERAL)
        self.num_tokens = np.zeros(_SEVERAL, np.int32)
        self._free = list(range(_SEVERAL - 1, -1, -1))

    def take(self, arrived_s: float) -> int:
        """A free row."""
        if not self._free:
            size = len(self.arrived_s)
            for name in ("arrived_s", "first_s", "last_s", "num_tokens"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        self.arrived_s[row], self.num_tokens[row] = arrived_s, 0
        return row

    def give_back(self, row: int) -> None:
        """The sequence is over."""
        self._free.append(row)


class Clients(Observer):
    """Sends the requests of ``trace`` and measures. Times as in the profile."""

    def __init__(
        self,
        trace: Trace,
        block_size: int,
        *,
        request_s: float,
        reply_s: float,
        slo: Slo,
        max_model_len: int,
        tokenizer_token_s: float = 0.0,
    ) -> None:
        self.trace = trace
        self.ttft, self.itl, self.tpot, self.e2e = Histogram(), Histogram(), Histogram(), Histogram()
        self.num_sent = self.num_done = self.num_failed = self.num_good = 0
        self.output_tokens = self.prompt_tokens = 0
        self.first_arrival_s, self.last_token_s = float("inf"), 0.0
        self._block_size, self._request_s, self._reply_s, self._slo = block_size, request_s, reply_s, slo
        self._tokenizer_token_s, self._max_model_len = tokenizer_token_s, max_model_len
        self._tracks = Tracks()
        self._rows = np.full(SEQUENCE_IDS, -1, np.int32)
        """Of the living sequences, by the part of their ids that differs."""
        self._live: dict[int, list[float]] = {}
        """By request number: arrival, sequences not over, 1.0 if all were good so far."""
        self._request_of: dict[int, int] = {}
        self._sampling: dict[tuple[int, int, bool], SamplingParams] = {}
        longest = int(trace.prompt_tokens.max()) if len(trace) else 1
        self._prompt = np.zeros(longest, np.int32)
        self._simulation: Simulation | None = None
        self._tokenizer: ModelTokenizer | None = None

    # -- sending ------------------------------------------------------------------------------------------------------
    def start(self, simulation: Simulation) -> None:
        """Plan the first arrivals."""
        self._simulation = simulation
        self._tokenizer = ModelTokenizer(simulation, self._tokenizer_token_s, self._max_model_len)
        if self.trace.clients:
            for _ in range(min(self.trace.clients, len(self.trace))):
                self._send_next(0.0)
        else:
            self._plan_arrival()

    def _plan_arrival(self) -> None:
        assert self._simulation is not None
        if self.num_sent < len(self.trace):
            arrival_s = float(self.trace.arrival_s[self.num_sent])
            self._simulation.at(arrival_s + self._request_s, self._arrive)

    def _arrive(self, at_s: float) -> None:
        assert self._simulation is not None
        assert self._tokenizer is not None
        self._tokenizer.take(at_s, self._request(self.num_sent, at_s - self._request_s))
        self._plan_arrival()

    def _send_next(self, at_s: float) -> None:
        assert self._simulation is not None
        assert self._tokenizer is not None
        take = self._tokenizer.take
        if self.num_sent < len(self.trace):
            request = self._request(self.num_sent, at_s)
            self._simulation.at(at_s + self._request_s, lambda came_s: take(came_s, request))

    def _request(self, number: int, arrived_s: float) -> TokenizedRequest:
        trace = self.trace
        self.num_sent = number + 1
        prompt, choices = int(trace.prompt_tokens[number]), int(trace.choices[number])
        max_tokens, output = int(trace.max_tokens[number]), int(trace.output_tokens[number])
        self._live[number] = [arrived_s, choices, 1.0]
        self.first_arrival_s = min(self.first_arrival_s, arrived_s)
        key = (max_tokens, choices, max_tokens <= output)
        sampling = self._sampling.get(key)
        if sampling is None:
            sampling = SamplingParams(max_tokens=max_tokens, n=choices, ignore_eos=key[2], temperature=0.0)
            self._sampling[key] = sampling
        return TokenizedRequest(
            request_id=str(number),
            ingress="web",
            sampling=sampling,
            priority=int(trace.priorities[number]),
            arrived_s=arrived_s,
            tokenized_s=arrived_s + self._request_s,
            prompt_token_ids=self._prompt[:prompt],
            block_hashes=self._hashes(number, prompt),
            is_job=bool(trace.jobs[number]),
        )

    def _hashes(self, number: int, prompt: int) -> Int32Array:
        """Made-up hashes of the prompt's full blocks: equal where the trace says that the blocks are."""
        size = self._block_size
        hashes = np.empty((prompt // size, 4), np.int32)
        hashes[:, 0], hashes[:, 1], hashes[:, 2], hashes[:, 3] = number, np.arange(len(hashes)), 0, _OWN
        shared = int(self.trace.prefix_tokens[number]) // size
        if shared and self.trace.prefix_groups[number] >= 0:
            hashes[:shared, 0], hashes[:shared, 3] = self.trace.prefix_groups[number], _GROUP
        known = self.trace.blocks.get(number)
        if known and self.trace.block_size == size:
            count = min(len(known), len(hashes))
            hashes[:count, 0], hashes[:count, 1], hashes[:count, 3] = known[:count], 0, _KNOWN
        return hashes.reshape(-1)

    # -- receiving ----------------------------------------------------------------------------------------------------
    def output_tokens_of(self, sequence_id: int) -> int:
        """How many tokens the model generates for a sequence."""
        return int(self.trace.output_tokens[self._request_of[sequence_id]])

    def started(self, at_s: float, started: SequenceStarted) -> None:
        number = int(started.request_id)
        self._rows[started.sequence_id % SEQUENCE_IDS] = self._tracks.take(self._live[number][0])
        self._request_of[started.sequence_id] = number

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        ids = result.sequence_ids
        if not len(ids):
            return
        seen_s = result.done_s + self._reply_s
        rows = self._rows[(ids % SEQUENCE_IDS).astype(np.intp)].astype(np.intp)
        several = np.count_nonzero(ids[1:] == ids[:-1])  # tokens of accepted drafts come together
        for part in turns(ids) if several else [slice(None)]:
            if not self._take(rows[part], result.token_indexes[part], seen_s):
                raise WrongTokens(f"step {result.step} of {replica}: tokens were lost or came twice")
        self.output_tokens += len(ids)
        self.last_token_s = max(self.last_token_s, seen_s)
        for index in result.ends.nonzero()[0].tolist():
            self._end(int(ids[index]), seen_s)

    def _take(self, rows: NDArray[np.intp], indexes: Int32Array, seen_s: float) -> bool:
        """Measure one token of each row; whether these are the tokens due."""
        tracks = self._tracks
        counts = tracks.num_tokens[rows]
        if counts.tobytes() != indexes.tobytes():
            return False
        gaps = seen_s - tracks.last_s[rows]
        first = counts == 0
        if np.count_nonzero(first):
            new = rows[first]
            tracks.first_s[new] = seen_s
            self.ttft.add_all(seen_s - tracks.arrived_s[new])
            gaps = gaps[~first]
        self.itl.add_all(gaps)
        tracks.last_s[rows] = seen_s
        counts += 1
        tracks.num_tokens[rows] = counts
        return True

    def _end(self, sequence_id: int, at_s: float) -> None:
        row, number = self._leave(sequence_id), self._request_of.pop(sequence_id)
        tracks, live = self._tracks, self._live[number]
        tokens = int(tracks.num_tokens[row])
        if tokens != min(self.trace.output_tokens[number], self.trace.max_tokens[number]):
            raise WrongTokens(f"request {number} ended with {tokens} tokens")
        ttft_s = float(tracks.first_s[row] - tracks.arrived_s[row])
        tpot_s = (at_s - float(tracks.first_s[row])) / (tokens - 1) if tokens > 1 else 0.0
        if tokens > 1:
            self.tpot.add(tpot_s)
        if ttft_s > self._slo.ttft_s or tpot_s > self._slo.itl_s:
            live[2] = 0.0
        tracks.give_back(row)
        live[1] -= 1
        if live[1]:
            return
        del self._live[number]
        assert self._simulation is not None
        self._simulation.at(at_s + self._request_s, RequestsDone(request_ids=(str(number),), attempts=("",)))
        self.e2e.add(at_s - live[0])
        self.num_done += 1
        self.num_good += bool(live[2])
        self.prompt_tokens += int(self.trace.prompt_tokens[number])
        if self.trace.clients:
            self._send_next(at_s)

    def _leave(self, sequence_id: int) -> int:
        """The row of a sequence that is over."""
        row = int(self._rows[sequence_id % SEQUENCE_IDS])
        self._rows[sequence_id % SEQUENCE_IDS] = -1
        return row

    def ended(self, at_s: float, ended: SequenceEnded) -> None:
        self._tracks.give_back(self._leave(ended.sequence_id))
        del self._request_of[ended.sequence_id]

    def failed(self, at_s: float, failed: RequestFailed) -> None:
        self.num_failed += 1
        del self._live[int(failed.request_id)]
        if self.trace.clients:
            self._send_next(at_s)

    @property
    def num_unserved(self) -> int:
        """Requests that have neither ended nor failed."""
        return len(self._live)
