"""Queued jobs and their results, which other programs write and read."""

from __future__ import annotations

from pagebus.bus.messages.record import Record


class Job(Record, frozen=True, kw_only=True):
    """Queued work, as any Redis client adds it: the fields of the entry are these, as plain text.

    ``request`` is one line of OpenAI's batch format. ``reply_to``: the stream for the result, "" for the usual one.
    ``priority``: an integer. ``batch``: a name under which progress is counted, "" for none. ``traceparent``: the
    parent span of its trace (W3C Trace Context).
    """

    request: str
    reply_to: str = ""
    priority: str = ""
    batch: str = ""
    traceparent: str = ""


class JobResult(Record, frozen=True, kw_only=True):
    """The result of a job, as plain text: ``result`` is one line of OpenAI's batch output format. ``job`` is the id of
    the job's entry."""

    result: str
    custom_id: str = ""
    batch: str = ""
    job: str = ""


class BatchQueued(Record, frozen=True, kw_only=True):
    """A batch of ``/v1/batches`` in the stream of jobs; its record and files are in the deployment's store.
    ``traceparent`` is the parent span of its lines' traces."""

    batch_id: str
    traceparent: str = ""


PLAIN_MESSAGES = (Job, JobResult, BatchQueued)
"""Messages that other programs write or read: their fields are the fields of the entry, without a header."""
