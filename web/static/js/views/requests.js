// What runs, what waits, and what has just ended: each request on its way.

import { request as call } from "../api.js";
import { fill, h, segmented } from "../dom.js";
import { count, percent, short, span } from "../format.js";
import { Figures } from "../parts/figures.js";
import { pairs } from "../parts/tip.js";
import { phaseKey, phasesOf, Waterfall } from "../parts/waterfall.js";

const SHOWN = 80;
const UPDATE_MS = 250;
const NAMES = ["Running", "Waiting", "First token, p50", "Between tokens, p50", "Output", "Ended just now"];

export function requestsView({ world, view, tools, signal }) {
  const figures = new Figures(NAMES);
  const drawer = h("section", { class: "card drawer", hidden: true, "aria-label": "Followed request" });
  const waterfall = new Waterfall({ choose: (id) => { world.follow(id); update(); } });
  const empty = h("div", { class: "empty" }, "No request yet. Ask something in the playground, and watch it come by here.");
  let windowS = 30;
  tools.append(segmented("Time shown", [[5, "5 s"], [30, "30 s"], [120, "2 min"]], windowS, (seconds) => { windowS = seconds; update(); }));
  view.append(figures.element, drawer, h("section", { class: "card" },
    h("header", {}, h("h2", {}, "Requests"), phaseKey()), waterfall.element, empty));
  const update = () => {
    const nowS = world.nowS(), startS = nowS - windowS;
    const over = world.over.filter((request) => request.over_s > startS);
    const living = [...world.requests.values()].sort((a, b) => b.arrived_s - a.arrived_s);
    const shown = [...living, ...over.toReversed()].slice(0, SHOWN);
    waterfall.show(shown, startS, nowS, world.followed);
    empty.hidden = shown.length > 0;
    waterfall.element.hidden = !shown.length;
    const states = [...world.requests.values()].map((request) => request.state);
    const vitals = world.vitals.findLast((each) => each.ttft_p50_s !== null) ?? world.vitals.at(-1) ?? {};
    const last = world.vitals.at(-1) ?? {};
    figures.set("Running", count(states.filter((state) => ["prefill", "decoding"].includes(state)).length));
    figures.set("Waiting", count(world.numWaiting));
    figures.set("First token, p50", span(vitals.ttft_p50_s));
    figures.set("Between tokens, p50", span(last.itl_p50_s));
    figures.set("Output", short(last.output_tokens_per_s ?? 0), "tokens/s");
    figures.set("Ended just now", count(over.length), `in ${windowS} s`);
    showDrawer(drawer, world, nowS);
  };
  world.on("follow", update, signal);
  const timer = setInterval(update, UPDATE_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  update();
}

/** What is known of the request that is followed, and a way to cancel it. */
function showDrawer(drawer, world, nowS) {
  const request = world.followed && world.find(world.followed);
  drawer.hidden = !request;
  if (!request) return;
  if (drawer.dataset.id !== request.id) {
    drawer.dataset.id = request.id;
    drawer.times = h("div", { class: "two" });
    drawer.note = h("p", { class: "error", role: "alert", hidden: true });
    drawer.cancel = h("button", { class: "button danger small", type: "button", onclick: async () => {
      drawer.cancel.disabled = true;
      try {
        await call(`/api/requests/${encodeURIComponent(request.id)}/cancel`, { json: {} });
      } catch (error) {
        drawer.note.hidden = false;
        drawer.note.textContent = error.message;
      }
    } }, "Cancel request");
    fill(drawer, h("header", { class: "turn-head scrub" }, h("h2", { class: "clip grow" }, h("code", {}, request.id)),
      h("a", { class: "button small", href: "#/memory" }, "Show its blocks"), drawer.cancel,
      h("button", { class: "button small ghost", type: "button", onclick: () => world.follow(request.id) }, "Close")),
    drawer.note, drawer.times);
  }
  drawer.cancel.hidden = Boolean(request.over_s);
  const times = phasesOf(request, nowS).map(([name, from, to]) => [name, span(to - from)]);
  const sequences = request.sequences.map((each) =>
    `${each.state}${each.replica ? ` on ${each.replica}` : ""}, ${count(each.num_blocks)} blocks${each.num_host_blocks ? `, ${each.num_host_blocks} on the host` : ""}`);
  fill(drawer.times, pairs(times), pairs([
    ["State", request.over_s ? request.endedState : request.state],
    ["Prompt", `${count(request.num_prompt)} tokens, ${percent(request.num_cached / Math.max(1, request.num_prompt))} from the cache`],
    ["Output", `${count(request.num_output)}${request.max_tokens >= 0 ? ` of at most ${count(request.max_tokens)}` : ""} tokens${request.num_choices > 1 ? `, ${request.num_choices} choices` : ""}`],
    ["Priority", request.priority ? String(request.priority) : request.is_job ? "job: behind all others" : "normal"],
    ["Preempted", request.num_preemptions ? `${request.num_preemptions} times` : "never"],
    ...sequences.map((text, index) => [sequences.length > 1 ? `Choice ${index + 1}` : "Sequence", text]),
  ]));
}
