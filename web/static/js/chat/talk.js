// The conversation: what was said, with which settings, and the answers that are under way. It is kept in this browser
// with the id of each answer's last event, so that after a reload an answer goes on where it was.

import { ApiError, events, request } from "../api.js";
import { load, newId, store } from "./chats.js";

const CURRENT = "pagebus.talk";
const SAVE_MS = 400;
const RETRY_MS = [300, 1000, 2000, 4000, 8000];

function emptyTalk(system = "") {
  return { id: newId(), system, turns: [] };
}

function emptyChoice() {
  return { text: "", reasoning: "", tokens: [], calls: [], finish: null };
}

export class Talk extends EventTarget {
  constructor() {
    super();
    this.running = new Map();
    this.state = load(sessionStorage.getItem(CURRENT) ?? "") ?? emptyTalk();
    addEventListener("pagehide", () => this.save());
  }

  /** Tell of a change: `turns` when some came or went, `answer` (detail: the side) when one has grown. */
  #tell(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  save() {
    clearTimeout(this.timer);
    this.timer = null;
    sessionStorage.setItem(CURRENT, this.state.id);
    this.isKept = store(this.state);
  }

  #saveSoon() {
    this.timer ??= setTimeout(() => this.save(), SAVE_MS);
  }

  get isRunning() {
    return this.running.size > 0;
  }

  /** Begin anew; what was said is kept among the chats. */
  begin() {
    this.open(emptyTalk(this.state.system));
  }

  /** Go on with another chat. */
  open(state) {
    this.stop();
    this.save();
    this.state = state;
    this.save();
    this.resume();
    this.#tell("turns");
  }

  /** Begin anew, and keep nothing of this chat. */
  drop() {
    this.stop();
    this.state = emptyTalk(this.state.system);
    this.save();
    this.#tell("turns");
  }

  /** Say something; each of `settings` answers it. */
  send(content, settings) {
    this.state.turns.push({ role: "user", content });
    this.#answer(settings);
  }

  /** Give the results of the tools that the last answer called: [{ id, name, content }]. */
  sendResults(results, settings) {
    this.state.turns.push({ role: "tool", results });
    this.#answer(settings);
  }

  /** Say something else at a place where something was said. What came after stays: as another version of the turn. */
  edit(index, content, settings) {
    this.stop();
    const { turns } = this.state;
    const old = turns.splice(index);
    const versions = old[0].versions ?? { all: [null], at: 0 };
    delete old[0].versions;
    versions.all[versions.at] = old;
    versions.all.push(null);
    versions.at = versions.all.length - 1;
    turns.push({ role: "user", content, versions });
    this.#answer(settings);
  }

  /** Show another version of a turn, with all that followed it. */
  show(index, version) {
    this.stop();
    const { turns } = this.state;
    const { versions } = turns[index];
    const old = turns.splice(index);
    delete old[0].versions;
    versions.all[versions.at] = old;
    const wanted = versions.all[version];
    versions.all[version] = null;
    versions.at = version;
    wanted[0].versions = versions;
    turns.push(...wanted);
    this.save();
    this.#tell("turns");
  }

  /** Later turns go on from this side of an answer. */
  choose(turn, side) {
    turn.pick = turn.sides.indexOf(side);
    this.save();
    this.#tell("turns");
  }

  /** Have the last thing answered again: by all settings, or one side only by its own. */
  regenerate(settings, side = null) {
    const last = this.state.turns.at(-1);
    if (last?.role !== "assistant") return;
    if (side && last.sides.length > 1) {
      const own = settings.find(({ label }) => label === side.label);
      if (!own || this.running.has(side)) return;
      const again = this.#newSide(own, this.#messages(this.state.turns.length - 1));
      last.sides[last.sides.indexOf(side)] = again;
      this.save();
      this.#run(again);
      this.#tell("turns");
      return;
    }
    this.stop();
    this.state.turns.pop();
    if (this.state.turns.length) this.#answer(settings);
  }

  #answer(settings) {
    const messages = this.#messages(this.state.turns.length);
    const sides = settings.map((each) => this.#newSide(each, messages));
    this.state.turns.push({ role: "assistant", sides });
    this.save();
    for (const side of sides) this.#run(side); // first, so that they are never shown as if they were over
    this.#tell("turns");
  }

  #newSide({ label, name = "", fields }, messages) {
    const body = { messages, ...fields, ...(fields.use_beam_search ? {} : { stream: true, stream_options: { include_usage: true } }) };
    return { label, name, body, key: randomKey(), lastId: null, id: null, status: "running", error: null, choices: [], usage: null,
      startedMs: Date.now(), firstMs: null, endedMs: null };
  }

  /** The first `count` turns as messages of the API. */
  #messages(count) {
    const messages = this.state.system.trim() ? [{ role: "system", content: this.state.system }] : [];
    for (const turn of this.state.turns.slice(0, count)) {
      if (turn.role === "user") messages.push({ role: "user", content: turn.content });
      else if (turn.role === "tool") messages.push(...turn.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content })));
      else messages.push(...spoken(turn));
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
      const choice = (side.choices[part.index] ??= emptyChoice());
      const { content, reasoning_content: reasoning, reasoning: other, tool_calls: calls } = part.delta ?? {};
      if (content || reasoning || other || calls) side.firstMs ??= Date.now();
      choice.text += content ?? "";
      choice.reasoning += reasoning ?? other ?? "";
      for (const call of calls ?? []) takeCall(choice, call);
      for (const token of part.logprobs?.content ?? []) {
        choice.tokens.push({ text: token.token, logprob: token.logprob, top: token.top_logprobs.map((each) => [each.token, each.logprob]) });
      }
      if (part.finish_reason) choice.finish = part.finish_reason;
    }
    for (let index = 0; index < side.choices.length; index++) side.choices[index] ??= emptyChoice();
  }

  /** Stop what is being written: at the server first, where an answer that is only left goes on for a while. By its key,
   *  as nothing may have come of it yet. */
  stop() {
    for (const [side, controller] of this.running) {
      side.status = "stopped";
      const ended = request("/abort_requests", { json: { idempotency_keys: [side.key] } });
      ended.catch(() => {}).then(() => controller.abort());
    }
  }
}

function takeCall(choice, call) {
  const known = (choice.calls[call.index ?? choice.calls.length] ??= { id: "", name: "", arguments: "" });
  known.id ||= call.id ?? "";
  known.name += call.function?.name ?? "";
  known.arguments += call.function?.arguments ?? "";
}

/** What the assistant has said in a turn, with its calls of tools. */
function spoken({ sides, pick = 0 }) {
  const choice = (sides[pick] ?? sides[0]).choices[0];
  const calls = (choice?.calls ?? []).filter(Boolean);
  if (!choice?.text && !calls.length) return [];
  const told = calls.map((call, index) => ({ id: callId(call, index), type: "function", function: { name: call.name, arguments: call.arguments } }));
  return [{ role: "assistant", content: choice.text, ...(told.length ? { tool_calls: told } : {}) }];
}

/** By what a call of a tool is known. */
export function callId(call, index) {
  return call.id || `call_${index + 1}`;
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
