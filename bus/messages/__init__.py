"""Every message that crosses a process boundary: one immutable record per event.

Rules: a field is a JSON scalar, an optional, a tuple, a dict with string or integer keys, another record of this
package, or an :data:`Int32Array`. Arrays are sent as raw little-endian int32 beside the JSON header (see
:mod:`pagebus.bus.codec`); all other fields are in the header. New fields go last, with defaults, so that two
versions can read each other.

Messages in the order of a request's life, with the stream that carries each (:mod:`pagebus.bus.streams`) and the file
that defines it:

==========================  =====================  =========================================  ===========
message                     stream                 from -> to                                 file
==========================  =====================  =========================================  ===========
GenerateRequest             requests (work)        ingress -> any tokenizer                   requests
TokenizedRequest            tokenized (work)       tokenizer -> scheduler                     requests
AbortRequest, StopSequence, control (work)         ingress, detokenizer -> scheduler          control
RequestsDone, CancelRequest
AdapterRead                 control (work)         executor -> scheduler                      steps
DiskReport                  control (work)         executor -> scheduler                      steps
PullReport                  control (work)         executor -> scheduler                      moves
StateRequested,             control (work)         ingress -> scheduler                       observation
BlockRequested
SequenceStarted/Ended,      sequences:<detok>      scheduler -> that detokenizer              sequences
SchedulerLeads
StepPlan                    steps:<replica>        scheduler -> every rank of the replica     steps
StepResult, ReplicaFenced   results:<replica>      executor rank 0 -> scheduler, detokenizers steps
ReplyBatch, PromptReply,    replies:<ingress>      detokenizer, tokenizer, scheduler ->       replies
RequestFailed, RequestTimed                        ingress
AbortCalls                  replies:<ingress>      another ingress -> ingress                 control
SchedulerState, BlockState  replies:<ingress>      scheduler -> ingress                       observation
HoldRequested,              control (work)         ingress -> scheduler                       steering
CacheResetRequested
HoldState                   replies:<ingress>      scheduler -> ingress                       steering
SequencesNamed,             journal                scheduler -> its successor                 journal
RequestMoved, RequestBlamed, Checkpoint
Job, BatchQueued            {name}:jobs (work)     any client, ingress -> any jobs actor      jobs
JobResult                   {name}:results         jobs actor -> sender of the job            jobs
ResponseQueued              responses (work)       ingress -> any ingress                     requests
==========================  =====================  =========================================  ===========
"""

from __future__ import annotations

from pagebus.bus.messages.control import AbortCalls, AbortRequest, CancelRequest, RequestsDone, StopSequence
from pagebus.bus.messages.field_types import FinishReason, Int32Array, JsonValue
from pagebus.bus.messages.jobs import PLAIN_MESSAGES, BatchQueued, Job, JobResult
from pagebus.bus.messages.journal import AlsoReads, Checkpoint, RequestBlamed, RequestMoved, SequencesNamed
from pagebus.bus.messages.moves import BlockPull, PullReport
from pagebus.bus.messages.observation import (
    FLASH_COPIED,
    FLASH_PULLED,
    FLASH_SWAPPED_IN,
    FLASH_SWAPPED_OUT,
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_NONE,
    REQUEST_COLUMNS,
    REQUEST_MARKS,
    SEQUENCE_COLUMNS,
    SEQUENCE_IN_FLIGHT,
    SEQUENCE_RUNNING,
    SEQUENCE_WAITING,
    STEP_COLUMNS,
    STEP_MARKS,
    BlockRequested,
    BlockState,
    ReplicaState,
    SchedulerState,
    StateRequested,
)
from pagebus.bus.messages.replies import PromptReply, ReplyBatch, RequestFailed, RequestTimed
from pagebus.bus.messages.requests import AdapterSource, GenerateRequest, ResponseQueued, TokenizedRequest
from pagebus.bus.messages.sampling import RepetitionDetection, SamplingParams, StructuredOutput
from pagebus.bus.messages.sequences import PROMPT_TAIL_TOKENS, SchedulerLeads, SequenceEnded, SequenceStarted
from pagebus.bus.messages.steering import (
    HOLD_ABORT,
    HOLD_KEEP,
    HOLD_NONE,
    HOLD_STATE,
    HOLD_WAIT,
    HOLDS,
    SLEEP_STATE,
    CacheResetRequested,
    HoldRequested,
    HoldState,
)
from pagebus.bus.messages.steps import (
    DISK_FORGET,
    DISK_TELL,
    END_GRAMMAR,
    END_LENGTH,
    END_NONE,
    END_STOP,
    AdapterPlaced,
    AdapterRead,
    DiskReport,
    FromExecutor,
    NewSequence,
    ReplicaFenced,
    StepPlan,
    StepResult,
)

Message = (
    GenerateRequest
    | TokenizedRequest
    | AbortRequest
    | StopSequence
    | RequestsDone
    | SequenceStarted
    | SequenceEnded
    | SchedulerLeads
    | StepPlan
    | StepResult
    | ReplicaFenced
    | ReplyBatch
    | PromptReply
    | RequestFailed
    | RequestTimed
    | SequencesNamed
    | RequestMoved
    | RequestBlamed
    | Checkpoint
    | Job
    | JobResult
    | BatchQueued
    | ResponseQueued
    | CancelRequest
    | AbortCalls
    | StateRequested
    | SchedulerState
    | BlockRequested
    | BlockState
    | HoldRequested
    | CacheResetRequested
    | HoldState
    | AdapterRead
    | DiskReport
    | PullReport
)

__all__ = [
    "DISK_FORGET", "DISK_TELL", "END_GRAMMAR", "END_LENGTH", "END_NONE", "END_STOP", "FLASH_COPIED", "FLASH_PULLED",
    "FLASH_SWAPPED_IN", "FLASH_SWAPPED_OUT", "HOLDS", "HOLD_ABORT", "HOLD_KEEP", "HOLD_NONE", "HOLD_STATE",
    "HOLD_WAIT", "OUTCOME_ABORTED", "OUTCOME_DONE", "OUTCOME_NONE", "PLAIN_MESSAGES", "PROMPT_TAIL_TOKENS",
    "REQUEST_COLUMNS", "REQUEST_MARKS", "SEQUENCE_COLUMNS", "SEQUENCE_IN_FLIGHT", "SEQUENCE_RUNNING",
    "SEQUENCE_WAITING", "SLEEP_STATE", "STEP_COLUMNS", "STEP_MARKS", "AbortCalls", "AbortRequest", "AdapterPlaced",
    "AdapterRead", "AdapterSource", "AlsoReads", "BatchQueued", "BlockPull", "BlockRequested", "BlockState",
    "CacheResetRequested", "CancelRequest", "Checkpoint", "DiskReport", "FinishReason", "FromExecutor",
    "GenerateRequest", "HoldRequested", "HoldState", "Int32Array", "Job", "JobResult", "JsonValue", "Message",
    "NewSequence", "PromptReply",
    "PullReport", "RepetitionDetection", "ReplicaFenced", "ReplicaState", "ReplyBatch", "RequestBlamed",
    "RequestFailed", "RequestMoved", "RequestTimed", "RequestsDone", "ResponseQueued", "SamplingParams",
    "SchedulerLeads", "SchedulerState", "SequenceEnded", "SequenceStarted", "SequencesNamed", "StateRequested",
    "StepPlan", "StepResult", "StopSequence", "StructuredOutput", "TokenizedRequest",
]  # fmt: skip
