// What is known of the request that is followed, and a way to cancel it.

import { request as call } from "../api.js";
import { fill, h, say } from "../dom.js";
import { count, percent, span } from "../format.js";
import { pairs } from "./tip.js";
import { phasesOf, stateOf } from "./waterfall.js";

export class Drawer {
  constructor(world) {
    this.world = world;
    this.element = h("section", { class: "card drawer", hidden: true, "aria-label": "Followed request" });
    this.id = h("code", {});
    this.note = h("p", { class: "error", role: "alert", hidden: true });
    this.unknown = h("p", { class: "quiet", hidden: true },
      "Nothing is known of this request any more: it ended before this page looked, or too many have ended since.");
    this.times = h("div", { class: "drawer-facts" });
    this.blocks = h("a", { class: "button small", href: "#/memory" }, "Show its blocks");
    this.cancel = h("button", { class: "button danger small", type: "button", onclick: () => this.#cancel() }, "Cancel request");
    this.element.append(h("header", { class: "turn-head scrub" }, h("h2", { class: "clip grow" }, this.id),
      this.blocks, this.cancel, h("button", { class: "button small ghost", type: "button", onclick: () => world.follow(null) }, "Close")),
    this.note, this.unknown, this.times);
  }

  async #cancel() {
    this.cancel.disabled = true;
    try {
      await call(`/api/requests/${encodeURIComponent(this.shown)}/cancel`, { json: {} });
    } catch (error) {
      this.note.hidden = false;
      this.note.textContent = error.message;
      this.cancel.disabled = false;
    }
  }

  update(nowS) {
    const { followed } = this.world, request = followed && this.world.find(followed);
    this.element.hidden = !followed;
    if (!followed) return;
    if (this.shown !== followed) {
      this.shown = followed;
      this.note.hidden = true;
      this.cancel.disabled = false;
    }
    say(this.id, followed);
    this.id.title = followed;
    this.unknown.hidden = Boolean(request);
    this.times.hidden = !request;
    const isOver = !request || Boolean(request.over_s);
    this.cancel.hidden = isOver;
    this.blocks.hidden = isOver;
    if (request) fill(this.times, facts(request, nowS));
  }
}

function facts(request, nowS) {
  const phases = phasesOf(request, nowS).map(([name, from, to]) => [name, to - from]);
  const whole = Math.max(1e-9, phases.reduce((sum, [, spanS]) => sum + spanS, 0));
  const longest = phases.reduce((most, each) => (each[1] > (most?.[1] ?? -1) ? each : most), null);
  const many = request.sequences.length > 1;
  return [
    pairs(phases.map(([name, spanS]) => [name, span(spanS)])),
    pairs([
      ["State", stateOf(request)],
      ["Took longest", longest ? `${longest[0]}, ${percent(longest[1] / whole)} of ${span(whole)}` : null],
      ["Key", request.client || null],
      ["Prompt", `${count(request.num_prompt)} tokens, ${percent(request.num_cached / Math.max(1, request.num_prompt))} from the cache`],
      ["Output", `${count(request.num_output)}${request.max_tokens >= 0 ? ` of at most ${count(request.max_tokens)}` : ""} tokens${request.num_choices > 1 ? `, ${request.num_choices} choices` : ""}`],
      ...(request.num_drafted ? [["Drafts", draftsText(request)]] : []),
      ["Priority", [request.is_job && "job: behind all others", request.priority || (!request.is_job && "normal")].filter(Boolean).join(", ")],
      ["Preempted", request.num_preemptions ? `${request.num_preemptions} times` : "never"],
      ...request.sequences.map((each, index) => [many ? `Choice ${index + 1}` : "Sequence", sequenceText(each, request)]),
    ]),
  ];
}

/** How many drafts were verified for it, and what became of them. */
function draftsText({ num_drafted: drafted, num_accepted: accepted }) {
  return `${count(drafted)}: ${count(accepted)} accepted (${percent(accepted / drafted)}), ${count(drafted - accepted)} wasted`;
}

function sequenceText(sequence, request) {
  const where = sequence.replica ? `on ${sequence.replica}` : "on no executor";
  if (request.over_s) return `over; was last ${where} with ${count(sequence.num_blocks)} blocks`;
  const host = sequence.num_host_blocks ? `, ${sequence.num_host_blocks} on the host` : "";
  return `${sequence.state}${sequence.replica ? ` ${where}` : ""}, ${count(sequence.num_blocks)} blocks${host}`;
}
