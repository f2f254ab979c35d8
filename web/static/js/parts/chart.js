// Figures over time: one chart of some lines, whose readings follow the pointer together with those of all others.

import { named } from "../colors.js";
import { announce, h, say } from "../dom.js";
import { NONE } from "../format.js";
import uPlot from "../../vendor/uplot/uPlot.esm.js";

const LEAST = 150, MOST = 420, AROUND = 110; // a card has so much beside its chart
const STALE = 2.5; // samples later than that many are no figure of now, and their lack is a gap

document.head.append(Object.assign(document.createElement("link"),
  { rel: "stylesheet", href: new URL("../../vendor/uplot/uPlot.min.css", import.meta.url).href }));

/** What all charts of a view show at the time that is pointed at; `tell(seconds or null)` when that changes. */
export class Readout {
  constructor(tell) {
    Object.assign(this, { tell, charts: [], atS: null });
  }

  point(atS) {
    if (atS === this.atS) return;
    this.atS = atS;
    for (const chart of this.charts) chart.read(atS);
    this.tell(atS);
  }
}

/** Samples [time, ...] with an empty one wherever some are missing, so that no line is drawn across. */
export function withGaps(samples, everyS) {
  const found = [];
  for (const sample of samples) {
    const before = found.at(-1);
    if (before && sample[0] - before[0] > STALE * everyS) found.push([before[0] + everyS, ...sample.slice(1).fill(null)]);
    found.push(sample);
  }
  return found;
}

export class Chart {
  constructor({ title, format, lines, top = null }, { readout, rows, signal }) {
    Object.assign(this, { title, format, lines, top, readout, rows, target: null });
    this.place = h("div", { class: "chart", tabindex: "0", role: "application", "aria-roledescription": "chart",
      "aria-label": `${title} over time. Move with the arrow keys.`, onkeydown: (event) => this.#key(event), onblur: () => readout.point(null) });
    this.values = lines.map(() => h("span", {}));
    this.aimed = h("li", { class: "target", hidden: true }, h("i", {}), h("span", {}));
    this.element = h("section", { class: "card", role: "group", "aria-label": title }, h("header", {}, h("h2", {}, title),
      h("ul", { class: "key" }, lines.map(([, name, colour], index) =>
        h("li", {}, h("i", { style: { "--colour": `var(--${colour})` } }), h("span", {}, name, " "), this.values[index])), this.aimed)), this.place);
    const fit = () => {
      this.height = heightOf(rows());
      this.place.style.setProperty("height", `${this.height}px`);
      this.plot?.setSize({ width: this.place.clientWidth, height: this.height });
    };
    fit();
    const observer = new ResizeObserver(fit);
    observer.observe(this.place);
    addEventListener("resize", fit, { signal });
    signal.addEventListener("abort", () => { observer.disconnect(); this.forget(); });
    readout.charts.push(this);
  }

  /** Draw a line at a target, in the unit of the figures; null: there is none. */
  aim(target) {
    this.target = target;
    this.aimed.hidden = target === null;
    say(this.aimed.lastChild, target === null ? "" : `target ${this.format(target)}`);
    this.plot?.redraw();
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  show({ samples, figures, every_s: everyS }, startS, endS) {
    const rows = withGaps(samples, everyS), columns = this.lines.map(([name]) => figures.indexOf(name) + 1);
    this.data = [rows.map((row) => row[0]), ...columns.map((column) => rows.map((row) => row[column] ?? null))];
    this.isFresh = rows.length > 0 && endS - rows.at(-1)[0] < STALE * everyS + 2;
    this.plot ??= this.#make();
    this.plot.setData(this.data, false);
    this.plot.setScale("x", { min: startS, max: endS });
    this.read(this.readout.atS);
  }

  /** Show the values of a time (s), or of now (null). */
  read(atS) {
    if (!this.data) return;
    const at = atS === null ? (this.isFresh ? this.data[0].length - 1 : -1) : nearest(this.data[0], atS);
    this.values.forEach((value, index) => say(value, at < 0 ? NONE : this.format(this.data[index + 1][at] ?? null)));
    this.element.classList.toggle("reading", atS !== null);
    if (this.plot && atS !== null && !this.pointing) {
      this.plot.setCursor({ left: this.plot.valToPos(this.data[0][at] ?? atS, "x"), top: -10 }, false);
    }
    if (this.plot && atS === null) this.plot.setCursor({ left: -10, top: -10 }, false);
  }

  #pointed(plot) {
    const { left, idx } = plot.cursor;
    this.pointing = true;
    this.readout.point(left >= 0 && idx !== null && idx !== undefined ? plot.data[0][idx] : null);
    this.pointing = false;
  }

  /** From one sample to the next, from the last one on. */
  #key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.readout.point(null);
    if (!by || !this.data?.[0].length) return;
    event.preventDefault();
    const times = this.data[0], { atS } = this.readout;
    const at = atS === null ? times.length - 1 : Math.min(times.length - 1, Math.max(0, nearest(times, atS) + by));
    this.readout.point(times[at]);
    announce(`${clock(times[at])}: ${this.lines.map(([, name], index) => `${name} ${this.values[index].textContent}`).join(", ")}`);
  }

  #make() {
    const axis = { stroke: named("ink-2"), grid: { stroke: named("line"), width: 1 }, ticks: { show: false }, font: `12px ${named("sans")}`, gap: 8 };
    return new uPlot({
      width: this.place.clientWidth || 400, height: this.height, padding: [8, 8, 0, 0],
      cursor: { points: { size: 7 }, drag: { x: false, y: false } }, legend: { show: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, this.top ?? (Math.max(high, this.target) * 1.12 || 1)] } },
      hooks: { setCursor: [(plot) => this.#pointed(plot)], draw: [(plot) => this.target !== null && drawTarget(plot, this.target)] },
      axes: [{ ...axis, size: 26, space: 70, values: (_, ticks, __, ___, step) => ticks.map((tick) => clock(tick, step)) },
        { ...axis, size: 62, space: 40, values: (_, ticks) => ticks.map(this.format) }],
      series: [{}, ...this.lines.map(([, name, colour]) => ({
        label: name, stroke: named(colour), width: 1.75, spanGaps: false, points: { show: true, size: 4, filter: alone },
      }))],
    }, [[], ...this.lines.map(() => [])], this.place);
  }
}

/** The samples that no line leads to or from: they are seen as points. */
function alone(plot, series, show) {
  if (show === false) return null;
  const values = plot.data[series], has = (at) => values[at] !== null && values[at] !== undefined;
  return values.map((_, at) => at).filter((at) => has(at) && !has(at - 1) && !has(at + 1));
}

function drawTarget(plot, value) {
  const { ctx, bbox } = plot, y = Math.round(plot.valToPos(value, "y", true));
  ctx.save();
  ctx.strokeStyle = named("ink-3");
  ctx.setLineDash([6, 5]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
}

/** The place of the time that is nearest; -1: there is none. */
function nearest(times, atS) {
  let best = -1;
  for (let at = 0; at < times.length; at++) if (best < 0 || Math.abs(times[at] - atS) < Math.abs(times[best] - atS)) best = at;
  return best;
}

/** Charts are as high as lets their rows fit the window, if they then can be read. */
function heightOf(rows) {
  return Math.min(MOST, Math.max(LEAST, Math.floor((innerHeight - 102) / rows - AROUND)));
}

export function clock(seconds, step = 1) {
  const date = new Date(seconds * 1000);
  return date.toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" });
}
