// The conversation: what was said, with which settings, and the answers that are under way. It is kept in this tab with
// the id of each answer's last event, so that after a reload an answer goes on where it was.

import { ApiError, events, request } from "../api.js";

const STORE = "pagebus.talk";
const SAVE_MS = 200;
const RETRY_MS = [300, 1000, 2000, 4000, 8000];

export function emptyTalk() {
  return { system: "", turns: [] };
}

export class Talk extends EventTarget {
  constructor() {
    super();
    this.running = new Map();
    try {
      this.state = { ...emptyTalk(), ...JSON.parse(sessionStorage.getItem(STORE) ?? "{}") };
    } catch {
      this.state = emptyTalk();
    }
    addEventListener("pagehide", () => this.save());
  }

  /** Tell of a change: `turns` when some came or went, `answer` (detail: the side) when one has grown. */
  #tell(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  save() {
    clearTimeout(this.timer);
    this.timer = null;
    try {
      sessionStorage.setItem(STORE, JSON.stringify(this.state));
    } catch { /* more than the browser keeps: then a reload forgets it */ }
  }

  #saveSoon() {
    this.timer ??= setTimeout(() => this.save(), SAVE_MS);
  }

  get isRunning() {
    return this.running.size > 0;
  }

  clear() {
    this.stop();
    this.state = { ...emptyTalk(), system: this.state.system };
    this.save();
    this.#tell("turns");
  }

  /** Say something; each of `settings` answers it. */
  send(content, settings) {
    this.state.turns.push({ role: "user", content });
    this.#answer(settings);
  }

  /** Say something else at a place where something was said: what came after is gone. */
  edit(index, content, settings) {
    this.stop();
    this.state.turns.length = index;
    this.send(content, settings);
  }

  /** Have the last thing answered again. */
  regenerate(settings) {
    this.stop();
    if (this.state.turns.at(-1)?.role === "assistant") this.state.turns.pop();
    if (this.state.turns.length) this.#answer(settings);
  }

  #answer(settings) {
    const sides = settings.map(({ label, fields }) => ({
      label,
      body: { messages: this.#messages(), ...fields, ...(fields.use_beam_search ? {} : { stream: true, stream_options: { include_usage: true } }) },
      key: randomKey(), lastId: null, id: null, status: "running", error: null, choices: [], usage: null,
      startedMs: Date.now(), firstMs: null, endedMs: null,
    }));
    this.state.turns.push({ role: "assistant", sides });
    this.save();
    for (const side of sides) this.#run(side); // first, so that they are never shown as if they were over
    this.#tell("turns");
  }

  #messages() {
    const messages = this.state.system.trim() ? [{ role: "system", content: this.state.system }] : [];
    for (const turn of this.state.turns) {
      if (turn.role === "user") messages.push({ role: "user", content: turn.content });
      else if (turn.sides[0].choices[0]?.text) messages.push({ role: "assistant", content: turn.sides[0].choices[0].text });
    }
    return messages;
  }

  /** Answers that were under way when the page went go on. */
  resume() {
    for (const turn of this.state.turns) {
      for (const side of turn.sides ?? []) if (side.status === "running") this.#run(side);
    }
  }

  async #run(side) {
    const controller = new AbortController();
    this.running.set(side, controller);
    this.#tell("answer", side);
    for (let attempt = 0; side.status === "running"; attempt++) {
      try {
        await this.#read(side, controller.signal);
        if (side.status === "running") side.status = side.error ? "failed" : "done";
      } catch (error) {
        if (side.status === "stopped" || error.name === "AbortError") side.status = "stopped";
        else if (attempt < RETRY_MS.length && mayReturn(error)) await sleep(RETRY_MS[attempt]);
        else Object.assign(side, { status: "failed", error: error.message });
      }
    }
    side.endedMs = Date.now();
    this.running.delete(side);
    this.save();
    this.#tell("answer", side);
  }

  /** Ask, or ask for the rest, and take in what comes. */
  async #read(side, signal) {
    const headers = { "Idempotency-Key": side.key };
    if (side.lastId) headers["Last-Event-ID"] = side.lastId;
    else side.choices = [];
    const response = await request("/v1/chat/completions", { json: side.body, headers, signal });
    if (!side.body.stream) { // which beams win is known at the end only
      const { choices, ...rest } = await response.json();
      this.#take(side, { ...rest, choices: choices.map(({ message, ...choice }) => ({ ...choice, delta: message })) });
      return;
    }
    for await (const { data, id } of events(response)) {
      if (data === "[DONE]") return;
      this.#take(side, JSON.parse(data));
      if (id) side.lastId = id;
      this.#tell("answer", side);
      this.#saveSoon();
    }
    throw new TypeError("The connection broke in the middle of the answer.");
  }

  #take(side, chunk) {
    if (chunk.error) {
      if (side.status === "running") side.error = chunk.error.message;
      return;
    }
    side.id = chunk.id ?? side.id;
    if (chunk.usage) side.usage = chunk.usage;
    for (const part of chunk.choices ?? []) {
      const choice = (side.choices[part.index] ??= { text: "", reasoning: "", tokens: [], calls: [], finish: null });
      const { content, reasoning_content: reasoning, reasoning: other, tool_calls: calls } = part.delta ?? {};
      if (content || reasoning || other || calls) side.firstMs ??= Date.now();
      choice.text += content ?? "";
      choice.reasoning += reasoning ?? other ?? "";
      for (const call of calls ?? []) {
        const known = (choice.calls[call.index ?? 0] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      for (const token of part.logprobs?.content ?? []) {
        choice.tokens.push({ text: token.token, logprob: token.logprob, top: token.top_logprobs.map((each) => [each.token, each.logprob]) });
      }
      if (part.finish_reason) choice.finish = part.finish_reason;
    }
    for (let index = 0; index < side.choices.length; index++) {
      side.choices[index] ??= { text: "", reasoning: "", tokens: [], calls: [], finish: null };
    }
  }

  /** Stop what is being written: at the server first, where an answer that is only left goes on for a while. */
  stop() {
    for (const [side, controller] of this.running) {
      side.status = "stopped";
      const ended = side.id ? request("/abort_requests", { json: { request_ids: [side.id] } }) : Promise.resolve();
      ended.catch(() => {}).then(() => controller.abort());
    }
  }
}

/** Whether a broken connection, or a server that is not there yet, is worth another try: the request may go on. */
function mayReturn(error) {
  return !(error instanceof ApiError) || error.status === 0 || error.status === 503;
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
