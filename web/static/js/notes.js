// What each view shows and which mechanism it is: enough to understand an LLM server by watching one.

export const NOTES = {
  chat: {
    title: "From words to tokens and back",
    text: [
      "A model reads and writes *tokens*, pieces of words. For each next one it gives odds to its whole vocabulary, and *sampling* draws from them: *temperature* flattens or sharpens the odds, *top p*, *top k* and *min p* cut the unlikely ones off, penalties make what was said already less likely. Temperature 0 always takes the likeliest.",
      "*Show tokens and their odds* colours an answer by how sure the model was; point at a token for what else it could have been.",
      "The answer is a *stream*: each piece is sent as soon as its step is computed. Reload the page in the middle, and the same request goes on where it was. *Chats* are kept in this browser; an edit keeps what was there as another version.",
      "A *seed* makes draws repeatable, also on another executor. Several *choices* of one prompt share its blocks in the cache.",
    ],
    more: "The small map is the key-value cache of the first executor, live. Follow an answer to see its own blocks and its way through the engine.",
  },
  batches: {
    title: "Work that can wait",
    text: [
      "A *batch* is a file of requests, one a line. They are *jobs*: they stand behind every interactive request, fill what is left of each step, and are the first to be preempted. So a machine that answers people all day can compute through the night's work meanwhile.",
      "Jobs lie on a stream until each has its answer. Whatever process dies, none is lost and none is answered twice.",
    ],
    more: "Any Redis client can queue work too: see Copy as… Redis job in the playground.",
  },
  overview: {
    title: "Is all well?",
    text: [
      "The sentence says what works, what does not, since when, and what was lost. *Time to first token* and *time between tokens* are of the last half minute, beside the targets that the deployment has (`--ttft-target-ms`, `--itl-target-ms`). A dash is a figure that nobody knows now.",
      "Six kinds of process speak over streams in Redis, and nothing else. Each holds a *lease*, a key with a time limit that proves it lives. Kill any of them: its lease ends, its work goes to another or to its next life, and requests go on with the same tokens. *Last events* tells of each.",
      "*Drain* lets an actor finish what it has and end; *stop* ends it at once. `pagebus serve` starts it again in both cases, which you can watch here.",
      "*Streams* hold what has been said and is not done with: when nothing runs, all of them are empty. One that grows shows where the work piles up.",
    ],
    more: "Errors are what clients were told. Point at an actor's time for its process, and at its attention path for all of them.",
  },
  memory: {
    title: "Paged attention",
    text: [
      "While it writes, a model needs the keys and values of every token before. They are kept in *blocks* of 16 tokens; each square is one. A sequence's *block table* lists its blocks in order, and they may lie anywhere, so no memory is lost to gaps.",
      "A *colour* is one sequence. A square with a bright core is *shared*: two prompts that begin alike, or several choices of one prompt, use the same block until they differ, and then the last one is *copied on write*.",
      "*Cached* blocks are free, but what was in them can still be found by the hash of their tokens and of all tokens before. A prompt that begins the same way skips that work: a *prefix hit*. The block that was used longest ago is given away first.",
      "When blocks run out, the newest sequence is *preempted*: its blocks move to the *host tier* (they flash) and come back later, or are computed again, whichever is faster. *Parked* ones leave the batch for another reason: whoever listened to them has gone, and may come back.",
      "What another executor has computed already can be *pulled*: its blocks are copied from its map into this one, where they flash. So a prompt finds its prefix wherever it runs, and when an executor drains, its sequences go on elsewhere with their blocks.",
    ],
    more: "Point at a square, or move with the arrow keys, for its block table and its chain of hashes. This is the scheduler's own book, not an estimate.",
  },
  steps: {
    title: "Continuous batching",
    text: [
      "A *step* is one pass of the model over everything that runs: each sequence that writes adds one *decode* token, with drafts some more, and what is left of the token budget goes to prompts, the *prefill*. New requests join at the next step; nobody waits for a batch to end.",
      "A long prompt is cut into *chunks*, so that the others keep writing meanwhile. That is the rhythm in the bars: blue without end, orange in pieces.",
      "*Wasted* tokens were computed for a sequence whose end was not known yet. The next step is planned before the last one's tokens are back, so that the device never waits for the bus; this is the price, and it is small.",
      "The lower lane is the device: filled while it computes. Gaps are time nobody used. The thin marks are the way over the bus, from plan to executor and from result to scheduler.",
    ],
  },
  requests: {
    title: "The way of a request",
    text: [
      "*Queued*: on the stream of requests. *Tokenize*: text becomes token ids. *Waiting for blocks*: at the scheduler, until there is a slot and there are blocks. *Prefill*: the prompt is read, which ends with the first token; that is the time a user notices most. *Decode*: one token a step. *Detokenize*: the last text is made and goes to the client.",
      "*Prefix hits* shorten the prefill: the cached part of the prompt is not computed again. *Preemptions* lengthen the decode: the sequence had to give its blocks up for a while.",
      "Choose a request to follow it: its blocks stand out in the map, with those that it shares with others, until you press Escape. Rows stay where they are while you point at them; *Hold* stops them all.",
    ],
  },
  charts: {
    title: "What users feel, and why",
    text: [
      "*Time to first token* is waiting plus prefill. *Time between tokens* is the step time as a client sees it. p50 is the usual case, p99 the bad one; a p99 far above the p50 means that something gets in the way now and then: long prompts, preemptions, a full queue.",
      "Percentiles are of half a minute; where nothing happened for so long there is a gap. *Errors* are what clients were told: refused for want of room (429), their own time limit, their mistakes, the server's. Point at a chart, or move with the arrow keys, to read all of them at that time.",
      "*Output* grows with the number that run at once, and every step gets a little longer: the basic trade of a batch. When the queue grows while the cache is full, memory is the limit.",
    ],
    more: "A day is kept, whether or not anybody looks: every 2 s for 10 minutes, 30 s for 3 hours, 4 min for 24 hours.",
  },
  replay: {
    title: "A recording",
    text: [
      "`pagebus record --out run.jsonl` writes down what a running deployment does: each step, and each change of the block tables. `pagebus simulate --record run.jsonl` writes the same of a simulated one. Load such a file, or look at the one that is here, and move through it.",
      "The map shows who owned which block at the end of a step. That a free block can still be found is inferred: it was held before, or pulled.",
      "Blocks that one executor *pulls* from another are marked in both maps while they are copied, and flash where they arrive. *Pulls* on the time axis shows how long each took; point at one for where it came from.",
    ],
  },
};
