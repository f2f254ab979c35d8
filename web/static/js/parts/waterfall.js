// Requests as bars on one axis of time, a colour per phase of their way.

import { h, say } from "../dom.js";
import { count, shortId, span } from "../format.js";
import { swatch } from "./memory.js";

/** Phases by the mark that each begins with. */
export const PHASES = [
  ["Queued", "arrived_s", "var(--queue)"],
  ["Tokenize", "taken_s", "var(--tokenize)"],
  ["Waiting for blocks", "tokenized_s", "var(--wait)"],
  ["Prefill", "started_s", "var(--prefill)"],
  ["Decode", "first_token_s", "var(--decode)"],
  ["Detokenize", "ended_s", "var(--detokenize)"],
];

/** The phases a request has reached: [name, from, to, colour]; the last one goes on until `nowS`. */
export function phasesOf(request, nowS) {
  const reached = PHASES.filter(([, mark]) => request[mark]);
  return reached.map(([name, mark, colour], index) => {
    const next = reached[index + 1];
    return [name, request[mark], Math.max(request[mark], next ? request[next[1]] : request.over_s || nowS), colour];
  });
}

export function phaseKey(names = PHASES.map(([name]) => name)) {
  return h("ul", { class: "key phases" }, PHASES.filter(([name]) => names.includes(name)).map(([name, , colour]) =>
    h("li", {}, h("i", { style: { "--colour": colour } }), name)));
}

/** What a request is doing, or how it has ended. */
export function stateOf(request) {
  return request.over_s ? request.endedState : request.state;
}

export class Waterfall {
  constructor({ choose }) {
    this.choose = choose;
    this.isPointedAt = false;
    this.rows = new Map();
    this.body = h("div", { class: "phases" });
    this.element = h("div", { class: "waterfall" }, h("div", { class: "head", "aria-hidden": "true" },
      h("span", {}, "Request"), h("span", {}, "State"), h("span", {}, "Tokens"), h("span", {}, "So far"), h("span", {}, "Phases")), this.body);
    this.body.addEventListener("pointerenter", () => { this.isPointedAt = true; });
    this.body.addEventListener("pointerleave", () => { this.isPointedAt = false; });
  }

  /** Whether rows had better stay where they are: somebody points at them, or has the focus there. */
  get isInUse() {
    return this.isPointedAt || Boolean(this.body.querySelector(":focus-visible"));
  }

  /** Show these requests, in order, with the bars from `startS` to `endS`. */
  show(requests, startS, endS, chosen) {
    const before = this.rows;
    this.rows = new Map();
    for (const request of requests) {
      const key = `${request.id} ${request.arrived_s}`;
      const row = before.get(key) ?? this.#make(request);
      this.#update(row, request, startS, endS, chosen === request.id);
      this.rows.set(key, row);
    }
    const wanted = [...this.rows.values()].map((row) => row.element);
    wanted.forEach((element, index) => {
      if (this.body.children[index] !== element) this.body.insertBefore(element, this.body.children[index] ?? null);
    });
    while (this.body.children.length > wanted.length) this.body.lastChild.remove();
  }

  #make(request) {
    const row = { state: h("span", { class: "chip" }), tokens: h("span", { class: "amount" }), time: h("span", {}), bar: h("div", { class: "bar" }), parts: new Map() };
    row.mark = swatch(request.sequences[0]?.id);
    row.element = h("button", { class: "row", type: "button", onclick: () => this.choose(request.id) },
      h("span", { class: "name" }, row.mark, h("code", { class: "clip", title: request.id }, shortId(request.id))),
      row.state, row.tokens, row.time, row.bar);
    return row;
  }

  #update(row, request, startS, endS, isChosen) {
    const state = stateOf(request);
    say(row.state, state);
    row.state.className = `chip ${{ done: "good", "ended early": "bad", preempted: "warn" }[state] ?? ""}`;
    say(row.tokens, request.num_output === null ? `about ${count(request.num_prompt)}` : `${count(request.num_prompt)} → ${count(request.num_output)}`);
    say(row.time, span(Math.max(0, (request.over_s ?? endS) - request.arrived_s))); // clocks differ a little
    row.element.setAttribute("aria-pressed", String(isChosen));
    const first = request.sequences[0]?.id;
    if (first && row.first !== first) {
      row.first = first;
      const mark = swatch(first);
      row.mark.replaceWith(mark);
      row.mark = mark;
    }
    const width = Math.max(1e-6, endS - startS);
    for (const [name, from, to, colour] of phasesOf(request, endS)) {
      let part = row.parts.get(name);
      if (!part) {
        part = h("i", { style: { "--colour": colour } });
        row.parts.set(name, part);
        row.bar.append(part);
      }
      const left = Math.max(0, (from - startS) / width), right = Math.min(1, Math.max(0, (to - startS) / width));
      part.style.setProperty("left", percentage(left));
      part.style.setProperty("width", percentage(Math.max(0, right - left)));
    }
  }
}

function percentage(share) {
  return `${(share * 100).toFixed(3)}%`;
}

