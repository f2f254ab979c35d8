// Latency, throughput, failures and memory over a minute to a day.

import { getJson } from "../api.js";
import { fill, h, say, segmented } from "../dom.js";
import { percent, short, span } from "../format.js";
import { Chart, clock, Readout } from "../parts/chart.js";

const SPANS = [[60, "1 min"], [600, "10 min"], [3600, "1 h"], [10800, "3 h"], [86400, "24 h"]];
const LIVE_S = 600;
const EVERY_MS = 2000;
const both = (name) => [[`${name}_p50_s`, "p50", "decode"], [`${name}_p99_s`, "p99", "prefill"]];
const rate = (value) => (value === null || value === undefined ? "–" : value > 0 && value < 9.95 ? value.toFixed(2) : short(value));
const CHARTS = [
  { title: "Time to first token", format: span, lines: both("ttft") },
  { title: "Time between tokens", format: span, lines: both("itl") },
  { title: "Whole request", format: span, lines: both("e2e") },
  { title: "Queue time", format: span, lines: both("queue") },
  { title: "Output", format: short, lines: [["output_tokens_per_s", "tokens/s", "decode"]] },
  { title: "Prompts", format: short, lines: [["prompt_tokens_per_s", "tokens/s", "prefill"]] },
  { title: "Finished requests", format: rate, lines: [["requests_per_s", "done/s", "good"], ["cancelled_per_s", "cancelled/s", "wasted"]] },
  { title: "Errors", format: rate, lines: [["refused_per_s", "429/s", "prefill"], ["timeouts_per_s", "timeouts/s", "decode"],
    ["client_errors_per_s", "all 4xx/s", "wasted"], ["server_errors_per_s", "5xx/s", "bad"]] },
  { title: "Requests", format: short, lines: [["running", "running", "decode"], ["waiting", "waiting", "prefill"]] },
  { title: "Key-value cache", format: percent, top: 1, lines: [["kv_usage", "device tier", "decode"], ["host_usage", "host tier", "prefill"]] },
  { title: "Cache hits and device use", format: percent, top: 1, lines: [["hit_rate", "prefix hits", "good"], ["device_busy", "device busy", "decode"]] },
  { title: "Preemptions", format: rate, lines: [["swaps_per_s", "swapped/s", "decode"], ["recomputes_per_s", "recomputed/s", "prefill"], ["parked_per_s", "parked/s", "wasted"]] },
];

/** Columns of the grid, as the style sheet has them. */
function columns() {
  return innerWidth >= 2200 ? 4 : innerWidth >= 1500 ? 3 : innerWidth >= 1000 ? 2 : 1;
}

export function chartsView({ world, view, tools, signal }) {
  if (signal.aborted) return;
  let spanS = 600;
  const grid = h("div", { class: "charts" });
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const time = h("span", { class: "chip num reading-time", hidden: true });
  tools.append(time, segmented("Time shown", SPANS, spanS, (seconds) => { spanS = seconds; readout.point(null); load(); }));
  view.append(problem, grid);
  const readout = new Readout((atS) => {
    time.hidden = atS === null;
    if (atS !== null) say(time, clock(atS));
  });
  const charts = CHARTS.map((each) => new Chart(each, { readout, rows: () => Math.min(3, Math.ceil(CHARTS.length / columns())), signal }));
  fill(grid, charts.map((chart) => chart.element));
  const load = async () => {
    if (world.access !== "ok") return; // the banner says so
    try {
      const history = await getJson(`/api/history?span_s=${spanS}`, { signal });
      problem.hidden = true;
      const endS = world.connected && world.atS ? world.nowS() : Date.now() / 1000;
      for (const chart of charts) chart.show(history, endS - spanS, endS);
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      problem.hidden = false;
      problem.textContent = error.message;
    }
  };
  const aim = () => { // the deployment's targets come with the feed, perhaps later than this view
    const { ttft_ms: ttftMs, itl_ms: itlMs } = world.hello.targets ?? {};
    const targets = { ttft_p99_s: ttftMs && ttftMs / 1000, itl_p99_s: itlMs && itlMs / 1000 };
    for (const chart of charts) chart.aim(chart.lines.map(([name]) => targets[name]).find(Boolean) ?? null);
  };
  world.on("status", aim, signal);
  aim();
  world.on("theme", () => { charts.forEach((chart) => chart.forget()); load(); }, signal);
  const timer = setInterval(() => (spanS <= LIVE_S || Date.now() % 10_000 < EVERY_MS) && load(), EVERY_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  load();
}
