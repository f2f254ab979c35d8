// Latency, throughput and memory over a minute to a day.

import { getJson } from "../api.js";
import { named } from "../colors.js";
import { fill, h, say, segmented } from "../dom.js";
import { percent, short, span } from "../format.js";
import uPlot from "../../vendor/uplot/uPlot.esm.js";

const SPANS = [[60, "1 min"], [600, "10 min"], [3600, "1 h"], [10800, "3 h"], [86400, "24 h"]];
const LIVE_S = 600;
const LEAST = 168, MOST = 400, AROUND = 110; // a card has so much beside its chart
const CHARTS = [
  { title: "Time to first token", format: span, lines: [["ttft_p50_s", "p50", "decode"], ["ttft_p99_s", "p99", "prefill"]] },
  { title: "Time between tokens", format: span, lines: [["itl_p50_s", "p50", "decode"], ["itl_p99_s", "p99", "prefill"]] },
  { title: "Throughput", format: short, lines: [["output_tokens_per_s", "output tokens/s", "decode"], ["prompt_tokens_per_s", "prompt tokens/s", "prefill"]] },
  { title: "Requests", format: short, lines: [["running", "running", "decode"], ["waiting", "waiting", "prefill"]] },
  { title: "Key-value cache", format: percent, top: 1, lines: [["kv_usage", "device tier", "decode"], ["host_usage", "host tier", "prefill"]] },
  { title: "Work saved and done", format: percent, top: 1, lines: [["hit_rate", "prefix hits", "good"], ["device_busy", "device busy", "decode"]] },
];

export function chartsView({ world, view, tools, signal }) {
  let spanS = 600;
  const grid = h("div", { class: "charts" });
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  tools.append(segmented("Time shown", SPANS, spanS, (seconds) => { spanS = seconds; load(); }));
  view.append(problem, grid);
  const charts = CHARTS.map((each) => new Chart(each, signal));
  fill(grid, charts.map((chart) => chart.element));
  const load = async () => {
    try {
      const { samples, figures } = await getJson(`/api/history?span_s=${spanS}`, { signal });
      problem.hidden = true;
      const endS = Date.now() / 1000;
      for (const chart of charts) chart.show(samples, figures, endS - spanS, endS);
    } catch (error) {
      if (signal.aborted) return;
      problem.hidden = false;
      problem.textContent = error.message;
    }
  };
  world.on("theme", () => { charts.forEach((chart) => chart.forget()); load(); }, signal);
  const timer = setInterval(() => (spanS <= LIVE_S || Date.now() % 10_000 < 2000) && load(), 2000);
  signal.addEventListener("abort", () => clearInterval(timer));
  load();
}

class Chart {
  constructor({ title, format, lines, top = null }, signal) {
    Object.assign(this, { title, format, lines, top });
    this.place = h("div", { class: "chart" });
    this.values = lines.map(() => h("span", {}));
    this.element = h("section", { class: "card", role: "group", "aria-label": title }, h("header", {}, h("h2", {}, title),
      h("ul", { class: "key" }, lines.map(([, name, colour], index) =>
        h("li", {}, h("i", { style: { "--colour": `var(--${colour})` } }), h("span", {}, name, " "), this.values[index])))), this.place);
    const fit = () => {
      this.height = heightOf();
      this.place.style.setProperty("height", `${this.height}px`);
      this.plot?.setSize({ width: this.place.clientWidth, height: this.height });
    };
    fit();
    const observer = new ResizeObserver(fit);
    observer.observe(this.place);
    addEventListener("resize", fit, { signal });
    signal.addEventListener("abort", () => { observer.disconnect(); this.forget(); });
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  show(samples, figures, startS, endS) {
    const columns = this.lines.map(([name]) => figures.indexOf(name) + 1);
    const data = [samples.map((sample) => sample[0]), ...columns.map((column) => samples.map((sample) => sample[column]))];
    this.bounds = [startS, endS];
    this.plot ??= this.#make();
    this.plot.setData(data, false);
    this.plot.setScale("x", { min: startS, max: endS });
    data.slice(1).forEach((values, index) => say(this.values[index], this.format(values.findLast((value) => value !== null))));
  }

  #make() {
    const axis = { stroke: named("ink-2"), grid: { stroke: named("line"), width: 1 }, ticks: { show: false }, font: `12px ${named("sans")}`, gap: 8 };
    return new uPlot({
      width: this.place.clientWidth || 400, height: this.height, padding: [8, 8, 0, 0],
      cursor: { points: { size: 7 }, drag: { x: false, y: false } }, legend: { show: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, this.top ?? (high > 0 ? high * 1.12 : 1)] } },
      axes: [{ ...axis, size: 26, space: 70, values: (_, ticks, __, ___, step) => ticks.map((tick) => clock(tick, step)) },
        { ...axis, size: 62, space: 40, values: (_, ticks) => ticks.map(this.format) }],
      series: [{}, ...this.lines.map(([, name, colour]) => ({
        label: name, stroke: named(colour), width: 1.75, spanGaps: true, points: { show: (plot) => plot.data[0].length < 4, size: 5 },
        fill: this.lines.length === 1 ? `${named(colour)}22` : undefined,
      }))],
    }, [[], ...this.lines.map(() => [])], this.place);
  }
}

/** Charts are as high as lets all rows of them fit the window. */
function heightOf() {
  const rows = innerWidth >= 1900 ? 2 : 3;
  return Math.min(MOST, Math.max(LEAST, Math.floor((innerHeight - 102) / rows - AROUND)));
}

function clock(seconds, step) {
  const date = new Date(seconds * 1000);
  return date.toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" });
}
