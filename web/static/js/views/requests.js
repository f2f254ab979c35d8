// What runs, what waits, and what has just ended: each request on its way.

import { fill, h, icon, labelled, say, segmented } from "../dom.js";
import { count, short, span } from "../format.js";
import { Drawer } from "../parts/drawer.js";
import { Figures } from "../parts/figures.js";
import { showFollowed } from "../parts/following.js";
import { phaseKey, stateOf, Waterfall } from "../parts/waterfall.js";
import { KEPT_OVER } from "../world.js";

const SHOWN = 80;
const UPDATE_MS = 250;
const NAMES = ["Running", "Waiting", "First token, p50", "Between tokens, p50", "Output", "Ended just now"];
const RUNNING = new Set(["prefill", "decoding"]);
const KINDS = {
  all: ["All", () => true],
  running: ["Running", (request) => !request.over_s && RUNNING.has(request.state)],
  waiting: ["Waiting", (request) => !request.over_s && !RUNNING.has(request.state)],
  ended: ["Ended", (request) => Boolean(request.over_s)],
  failed: ["Failed", (request) => stateOf(request) === "ended early"],
};
const ORDERS = {
  newest: ["Newest first", (a, b) => b.arrived_s - a.arrived_s],
  oldest: ["Oldest first", (a, b) => a.arrived_s - b.arrived_s],
  longest: ["Longest first", (a, b, nowS) => took(b, nowS) - took(a, nowS)],
  tokens: ["Most tokens first", (a, b) => tokensOf(b) - tokensOf(a)],
};

const took = (request, nowS) => (request.over_s ?? nowS) - request.arrived_s;
const tokensOf = (request) => (request.num_prompt ?? 0) + (request.num_output ?? 0);
const nameOf = (request) => `${request.id} ${request.arrived_s}`;

export function requestsView({ world, view, tools, signal }) {
  const figures = new Figures(NAMES);
  const drawer = new Drawer(world);
  const waterfall = new Waterfall({ choose: (id) => world.follow(id) });
  const chosen = { kind: "all", order: "newest", key: "", text: "", windowS: 30, most: SHOWN, heldS: null };
  const list = new Order();
  const empty = h("div", { class: "empty" });
  const more = h("button", { class: "button small", type: "button", onclick: () => change({ most: chosen.most + SHOWN }) }, `Show ${SHOWN} more`);
  const told = h("span", { class: "small quiet num" });
  const change = (what) => {
    Object.assign(chosen, what);
    list.forget();
    update();
  };
  const filters = makeFilters(change);
  const hold = h("button", { class: "button", type: "button", "aria-pressed": "false", onclick: () => {
    change({ heldS: chosen.heldS === null ? world.nowS() : null });
    hold.setAttribute("aria-pressed", String(chosen.heldS !== null));
    fill(hold, icon(chosen.heldS === null ? "pause" : "play"), labelled(chosen.heldS === null ? "Hold" : "Go on"));
  } }, icon("pause"), labelled("Hold"));
  const followed = h("div", {});
  tools.append(followed, segmented("Time shown", [[5, "5 s"], [30, "30 s"], [120, "2 min"]], chosen.windowS, (windowS) => change({ windowS })), hold);
  showFollowed(world, followed, signal);
  view.append(figures.element, h("div", { class: "requests" },
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Requests"), phaseKey()), filters.element, waterfall.element, empty,
      h("footer", { class: "list-end" }, told, more)), drawer.element));

  /** All that are asked for: living ones, and those that ended within the time shown. */
  function wanted(nowS) {
    const over = world.over.filter((request) => request.over_s > nowS - chosen.windowS);
    const text = chosen.text.trim().toLowerCase(), [, isKind] = KINDS[chosen.kind], [, compare] = ORDERS[chosen.order];
    return [...world.requests.values(), ...over]
      .filter((request) => isKind(request) && (!chosen.key || request.client === chosen.key) && request.id.toLowerCase().includes(text))
      .sort((a, b) => compare(a, b, nowS));
  }

  function update() {
    const nowS = world.nowS();
    showFigures(figures, world, nowS, chosen.windowS);
    filters.keys([...world.requests.values(), ...world.over]);
    drawer.update(nowS);
    if (chosen.heldS !== null && list.held) return waterfall.show(list.held, chosen.heldS - chosen.windowS, chosen.heldS, world.followed);
    const all = wanted(nowS), rows = list.arrange(all, waterfall.isInUse || chosen.heldS !== null).slice(0, chosen.most);
    list.held = chosen.heldS === null ? null : rows;
    waterfall.show(rows, nowS - chosen.windowS, nowS, world.followed);
    empty.hidden = rows.length > 0;
    say(empty, world.requests.size || world.over.length ? "No request fits." : "No request yet. Ask something in the playground, and watch it come by here.");
    waterfall.element.hidden = !rows.length;
    more.hidden = rows.length >= all.length;
    const kept = world.over.length >= KEPT_OVER ? ` The last ${count(KEPT_OVER)} that ended are kept.` : "";
    say(told, all.length > rows.length || kept ? `${count(rows.length)} of ${count(all.length)} shown.${kept}` : "");
  }

  world.on("follow", update, signal);
  const timer = setInterval(update, UPDATE_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  update();
}

/** Keeps rows where they are while somebody points at them; newcomers go to the end until then. */
class Order {
  constructor() {
    this.forget();
  }

  forget() {
    this.places = null;
    this.held = null;
  }

  arrange(requests, keeps) {
    if (!keeps || !this.places) {
      this.places = new Map(requests.map((request, index) => [nameOf(request), index]));
      return requests;
    }
    for (const request of requests) if (!this.places.has(nameOf(request))) this.places.set(nameOf(request), this.places.size);
    return requests.toSorted((a, b) => this.places.get(nameOf(a)) - this.places.get(nameOf(b)));
  }
}

function makeFilters(change) {
  const search = h("input", { type: "search", placeholder: "Find an id", "aria-label": "Find an id", oninput: () => change({ text: search.value }) });
  const choice = (label, options, name) => h("select", { "aria-label": label, onchange: (event) => change({ [name]: event.target.value }) },
    Object.entries(options).map(([value, [text]]) => h("option", { value }, text)));
  const keys = h("select", { "aria-label": "Key", hidden: true, onchange: () => change({ key: keys.value }) });
  let known = "";
  return {
    element: h("div", { class: "filters" }, search, segmented("Which", Object.entries(KINDS).map(([kind, [text]]) => [kind, text]), "all", (kind) => change({ kind })),
      choice("Order", ORDERS, "order"), keys),
    /** Whose requests there are: offered once there are two. */
    keys(requests) {
      const names = [...new Set(requests.map((request) => request.client).filter(Boolean))].sort();
      if (names.join() === known) return;
      known = names.join();
      const before = keys.value;
      fill(keys, h("option", { value: "" }, "All keys"), names.map((name) => h("option", { value: name }, name)));
      keys.value = names.includes(before) ? before : "";
      keys.hidden = names.length < 2;
    },
  };
}

function showFigures(figures, world, nowS, windowS) {
  const last = world.vitals.at(-1) ?? {};
  figures.set("Running", count([...world.requests.values()].filter((request) => RUNNING.has(request.state)).length));
  figures.set("Waiting", count(world.numWaiting));
  figures.set("First token, p50", span(last.ttft_p50_s));
  figures.set("Between tokens, p50", span(last.itl_p50_s));
  figures.set("Output", short(last.output_tokens_per_s ?? 0), "tokens/s");
  figures.set("Ended just now", count(world.over.filter((request) => request.over_s > nowS - windowS).length), `in ${windowS} s`);
}
