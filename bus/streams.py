"""Names on the bus: streams, groups, keys. No other module spells one.

Every key carries the deployment's hash tag, ``pb:{name}:...``, so that Redis Cluster keeps a deployment in one slot and
multi-key commands work. Keys that other programs use begin with the tag itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BATCH_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Names of batches of jobs."""
MAX_JOB_PRIORITY = 10**9 - 1
"""In either direction."""


def address_of(ingress: str, epoch: int) -> str:
    """The address for replies to one life of an ingress; its next life knows nothing of earlier requests."""
    return f"{ingress}@{epoch}"


def is_address(text: str) -> bool:
    """Whether this is the address of an actor that holds a lease, not of a test or a benchmark."""
    return "@" in text


TOKENIZER_GROUP = "tokenizers"
SCHEDULER_GROUP = "schedulers"
JOBS_GROUP = "jobs"
RESPONSES_GROUP = "responses"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one deployment (``--name``, default ``pagebus``)."""

    deployment: str = "pagebus"

    def key(self, *parts: str) -> str:
        """``pb:{deployment}:part:part``."""
        return ":".join((f"pb:{{{self.deployment}}}", *parts))

    # Work streams: consumer groups, many writers, acked after the effect, deleted once acked.
    @property
    def requests(self) -> str:
        return self.key("requests")

    @property
    def tokenized(self) -> str:
        return self.key("tokenized")

    @property
    def control(self) -> str:
        return self.key("control")

    @property
    def responses(self) -> str:
        """Responses that are computed in the background."""
        return self.key("responses")

    # Log streams: one writer, explicit ids <epoch>-<index>, no groups.
    def steps(self, replica: str) -> str:
        return self.key("steps", replica)

    def results(self, replica: str) -> str:
        return self.key("results", replica)

    def sequences(self, detokenizer: str) -> str:
        return self.key("sequences", detokenizer)

    @property
    def journal(self) -> str:
        """The journal of the scheduler, for its successor."""
        return self.key("journal")

    # Mailboxes: many writers, one reader, which remembers its position and trims what it has passed.
    def replies(self, ingress: str) -> str:
        return self.key("replies", ingress)

    def is_kept(self, stream: str) -> bool:
        """Whether a stream is the mailbox of an actor, which alone creates and renews it."""
        prefix = self.replies("")
        return stream.startswith(prefix) and is_address(stream[len(prefix) :])

    def dead_letters(self, stage: str) -> str:
        return self.key("dead", stage)

    # Jobs: keys that other programs use, so they carry nothing but the hash tag.
    @property
    def jobs(self) -> str:
        """Work stream of queued jobs, written by any program."""
        return f"{{{self.deployment}}}:jobs"

    @property
    def job_results(self) -> str:
        """The default stream of results; its reader trims it."""
        return f"{{{self.deployment}}}:results"

    def batch(self, name: str) -> str:
        """Counters of the jobs that share the batch ``name``."""
        return f"{{{self.deployment}}}:batch:{name}"

    def batch_results(self, name: str) -> str:
        """The stream of results of the batch ``name``, submitted from a file."""
        return f"{{{self.deployment}}}:batch:{name}:results"

    # State.
    def lease(self, kind: str, actor: str) -> str:
        return self.key("lease", kind, actor)

    @property
    def leases(self) -> str:
        """Index (a set) of lease keys, which avoids scans of the key space."""
        return self.key("leases")

    @property
    def epochs(self) -> str:
        """Counter that gives every lease its epoch."""
        return self.key("epochs")

    def state(self, name: str) -> str:
        return self.key("state", name)

    def table(self, name: str) -> str:
        """A table of small objects by name (a hash), which many actors may change row by row."""
        return self.key("table", name)
