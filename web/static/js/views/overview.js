// An operator's home: the figures of now against their targets, errors, what has happened, and each actor. The sentence
// above them is the banner, which stands on this view also when all is well.

import { fill, h, say } from "../dom.js";
import { age, count, NONE, percent, short, span } from "../format.js";
import { actorRows } from "../parts/actors.js";
import { Figures } from "../parts/figures.js";
import { incidentList } from "../parts/incidents.js";

const NAMES = ["First token, p50", "First token, p99", "Between tokens, p50", "Between tokens, p99", "Output",
  "Running", "Waiting", "Cache in use", "Prefix hits", "Finished"];
const ERRORS = [["refused", "Refused, no room (429)"], ["timeouts", "Time limit (408)"], ["others", "Other mistakes of clients (4xx)"],
  ["server", "Errors of the server (5xx)"]];

export function overviewView({ world, view, signal }) {
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const figures = new Figures(NAMES), errors = new Errors();
  const streams = h("ul", { class: "streams" });
  const card = (title, ...content) => h("section", { class: "card", "aria-label": title }, h("header", {}, h("h2", {}, title)), content);
  view.classList.add("overview");
  view.append(figures.element, problem, h("div", { class: "overview-body" },
    h("div", { class: "overview-side" }, errors.element, card("Last events", incidentList(world, signal))),
    h("div", { class: "view" },
      h("section", { class: "card", id: "actors", "aria-label": "Actors" }, h("header", {}, h("h2", {}, "Actors")), actorRows(world, problem, signal)),
      h("section", { class: "card", "aria-label": "Streams" }, h("header", {}, h("h2", {}, "Streams"), h("span", { class: "small quiet" }, "pending entries")), streams))));
  const showFigures = () => {
    showVitals(figures, world);
    showLoad(figures, world);
    errors.show(world);
  };
  const showStreams = () => fill(streams, world.streams.map(({ name, length }) => h("li", {}, h("code", { class: "clip", title: name }, name),
    h("span", { class: `num ${length ? "" : "faint"}` }, count(length)))));
  for (const change of ["state", "vitals", "failures", "status", "health"]) world.on(change, showFigures, signal);
  world.on("actors", showStreams, signal);
  const timer = setInterval(showFigures, 1000); // figures of which no more are told grow old
  signal.addEventListener("abort", () => clearInterval(timer));
  showFigures();
  showStreams();
}

/** Latencies and rates, and latencies against the deployment's targets. */
function showVitals(figures, world) {
  const now = world.figures() ?? {}, { ttft_ms: ttftMs, itl_ms: itlMs } = world.hello.targets ?? {};
  figures.set("First token, p50", span(now.ttft_p50_s));
  figures.set("First token, p99", span(now.ttft_p99_s));
  figures.set("Between tokens, p50", span(now.itl_p50_s));
  figures.set("Between tokens, p99", span(now.itl_p99_s));
  figures.note("First token, p99", ...against(now.ttft_p99_s, ttftMs));
  figures.note("Between tokens, p99", ...against(now.itl_p99_s, itlMs));
  figures.set("Output", short(now.output_tokens_per_s), now.at_s ? "tokens/s" : "");
  figures.set("Finished", short(now.requests_per_s), now.at_s ? "requests/s" : "");
  figures.set("Prefix hits", percent(now.hit_rate));
}

/** What is said of a latency (s) beside its target (ms), and its colour. */
function against(seconds, targetMs) {
  if (!targetMs) return ["", ""];
  const target = span(targetMs / 1000);
  if (seconds === null || seconds === undefined) return [`target ${target}`, ""];
  return seconds * 1000 <= targetMs ? [`within target ${target}`, "good"] : [`above target ${target}`, "bad"];
}

/** What all executors hold together. */
function showLoad(figures, world) {
  const replicas = world.isCurrent ? [...world.replicas.values()] : [];
  const sum = (of) => replicas.reduce((total, each) => total + of(each), 0);
  const blocks = sum((each) => each.num_blocks), held = sum((each) => each.num_blocks - each.num_free);
  figures.set("Running", replicas.length ? count(sum((each) => each.num_running)) : NONE, replicas.length ? `of ${count(sum((each) => each.num_slots))}` : "");
  figures.set("Waiting", world.isCurrent ? count(world.numWaiting) : NONE);
  figures.set("Cache in use", blocks ? percent(held / blocks) : NONE);
  figures.note("Cache in use", blocks ? `${short(held)} of ${short(blocks)} blocks` : "");
}

/** What clients were told, by status. */
class Errors {
  constructor() {
    this.values = new Map(ERRORS.map(([name]) => [name, h("dd", {}, NONE)]));
    this.time = h("span", { class: "small quiet" });
    this.element = h("section", { class: "card", "aria-label": "Errors" }, h("header", {}, h("h2", {}, "Errors"), this.time),
      h("dl", { class: "errors" }, ERRORS.map(([name, title]) => h("div", {}, h("dt", {}, title), this.values.get(name)))));
  }

  show(world) {
    const told = world.connected && !world.missing.includes("bus") ? world.failures : null;
    say(this.time, told ? `last ${age(told.over_s)}` : "");
    for (const [name, value] of this.values) {
      say(value, count(told?.[name]));
      value.className = told?.[name] ? (name === "server" ? "bad" : "") : "faint";
    }
  }
}
