// Steps over time: tokens of each step by kind as bars, below them when the device computed, and when the bus and blocks
// of other executors were on their way.

import { named } from "../colors.js";
import { announce, h } from "../dom.js";
import { count, span } from "../format.js";
import { hideTip, pairs, showTip } from "./tip.js";

const LANES = [
  { name: "Decode", height: 74, tall: 124, bars: ["decodes", "decode"] },
  { name: "Prefill", height: 74, tall: 124, bars: ["prefill", "prefill"] },
  { name: "Wasted", height: 34, tall: 48, bars: ["wasted", "wasted"] },
  { name: "Device", height: 24 },
  { name: "Bus", height: 20 },
  { name: "Pulls", height: 20 },
];
const GAP = 14;
const LEFT = 72;
const AXIS = 22;

export class Timeline {
  /** `steps()` are all that are known, `nowS()` the right end; `windowS` is how much of it is shown. The axis counts
   * from `zeroS`, or back from the right end. `pulls()` are those of recordings; without it they have no lane. */
  constructor({ steps, nowS, windowS = 10, lanes = LANES.map((lane) => lane.name), tall = false, zeroS = null, pulls = null, signal }) {
    Object.assign(this, { steps, nowS, windowS, zeroS, pulls });
    this.chosen = LANES.filter((lane) => lanes.includes(lane.name) && (pulls || lane.name !== "Pulls"));
    this.tall = tall;
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": "Steps over time: tokens of each step by kind, and when the device computed. Move with the arrow keys." });
    this.element = h("div", { class: "timeline" }, this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("blur", hideTip);
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    const observer = new ResizeObserver(() => this.#resize());
    observer.observe(this.element);
    const turn = () => {
      if (signal.aborted) return;
      this.draw();
      this.frame = requestAnimationFrame(turn);
    };
    this.frame = requestAnimationFrame(turn);
    signal.addEventListener("abort", () => { observer.disconnect(); cancelAnimationFrame(this.frame); hideTip(); });
  }

  /** Stand still at a time (s), or follow again (null). */
  pause(atS) {
    this.pausedS = atS;
  }

  #resize() {
    this.scale = Math.min(2, devicePixelRatio || 1);
    this.width = Math.max(260, this.element.clientWidth);
    const more = Math.min(4, Math.max(1, (innerHeight - 440) / 296)); // all lanes together fill the window
    this.lanes = this.chosen.map((lane) => ({ ...lane, height: this.tall && lane.tall ? Math.round(lane.tall * more) : lane.height }));
    this.height = this.lanes.reduce((sum, lane) => sum + lane.height + GAP, AXIS);
    this.canvas.width = this.width * this.scale;
    this.canvas.height = this.height * this.scale;
    this.canvas.style.setProperty("height", `${this.height}px`);
  }

  /** The steps in sight, with their places. */
  visible() {
    const endS = this.pausedS ?? this.nowS() - 0.25, startS = endS - this.windowS;
    const perS = (this.width - LEFT - 8) / this.windowS;
    const place = (timeS) => LEFT + (timeS - startS) * perS;
    const shown = this.steps().filter((step) => step.done_s >= startS && beganS(step) <= endS);
    return { shown, place, startS, endS, perS };
  }

  draw() {
    if (!this.width) return;
    const context = this.canvas.getContext("2d");
    const { shown, place, startS, endS, perS } = this.visible();
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `12px ${named("sans")}`;
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(0, 0, this.width - 7, this.height);
    context.clip();
    let top = 4;
    for (const lane of this.lanes) {
      context.fillStyle = named("ink");
      context.textAlign = "left";
      context.fillText(lane.name, 0, top + lane.height / 2 - (lane.bars ? 8 : 0));
      if (lane.bars) this.#bars(context, lane, shown, place, top);
      else if (lane.name === "Device") this.#device(context, lane, shown, place, top);
      else if (lane.name === "Pulls") this.#pulls(context, lane, { place, startS, endS }, top);
      else this.#bus(context, lane, shown, place, top);
      top += lane.height + GAP;
    }
    this.#axis(context, startS, endS, perS, top - 4);
    context.restore();
  }

  #bars(context, lane, shown, place, top) {
    const [field, colour] = lane.bars;
    const most = shown.reduce((max, step) => Math.max(max, step[field]), 0);
    const bottom = top + lane.height;
    context.fillStyle = named("line");
    context.fillRect(LEFT, bottom, this.width - LEFT - 8, 1);
    if (most) {
      context.fillStyle = named("ink-2");
      context.fillText(`to ${count(most)}`, 0, top + lane.height / 2 + 9);
    }
    context.fillStyle = named(colour);
    for (const step of shown) {
      if (!step[field]) continue;
      const height = Math.max(2, (step[field] / most) * (lane.height - 4));
      const left = Math.max(LEFT, place(beganS(step))), right = place(step.done_s);
      context.fillRect(left, bottom - height, Math.max(1, right - left - (right - left > 4 ? 1 : 0)), height);
    }
  }

  #device(context, lane, shown, place, top) {
    context.fillStyle = named("sunken");
    context.fillRect(LEFT, top, this.width - LEFT - 8, lane.height);
    for (const step of shown) {
      const left = Math.max(LEFT, place(beganS(step))), right = place(step.done_s);
      context.fillStyle = named(step.prefill > step.decodes ? "prefill" : "decode");
      context.globalAlpha = 0.85;
      context.fillRect(left, top, Math.max(0.6, right - left - (right - left > 3 ? 0.8 : 0)), lane.height);
    }
    context.globalAlpha = 1;
  }

  #pulls(context, lane, { place, startS, endS }, top) {
    this.pullsTop = top;
    context.fillStyle = named("sunken");
    context.fillRect(LEFT, top, this.width - LEFT - 8, lane.height);
    for (const pull of this.pulls()) {
      if (pull.ordered_s > endS || (pull.ended_s ?? endS) < startS) continue;
      const left = Math.max(LEFT, place(pull.ordered_s)), right = place(Math.min(pull.ended_s ?? endS, endS));
      context.fillStyle = named(pull.there === false ? "bad" : "accent");
      context.fillRect(left, top, Math.max(2, right - left), lane.height);
    }
  }

  #bus(context, lane, shown, place, top) {
    context.lineWidth = 2;
    for (const step of shown) {
      context.strokeStyle = named("ink-3");
      line(context, Math.max(LEFT, place(step.planned_s)), Math.max(LEFT, place(step.received_s)), top + 5);
      context.strokeStyle = named("good");
      line(context, Math.max(LEFT, place(step.done_s)), Math.max(LEFT, place(step.landed_s)), top + 14);
    }
  }

  #axis(context, startS, endS, perS, top) {
    const every = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60].find((each) => each * perS >= 70) ?? 60;
    context.fillStyle = named("ink-2");
    context.textAlign = "center";
    const zeroS = this.zeroS ?? endS, digits = every < 0.1 ? 2 : every < 1 ? 1 : 0;
    for (let number = Math.ceil((startS - zeroS) / every - 1e-6); number * every <= endS - zeroS + 1e-6; number++) {
      const x = LEFT + (number * every + zeroS - startS) * perS, isNow = this.zeroS === null && number === 0;
      if (x < LEFT + 8) continue;
      const text = isNow ? (this.pausedS ? "0 s" : "now") : `${(number * every).toFixed(digits).replace("-", "−")} s`;
      context.textAlign = x > this.width - 24 ? "right" : "center";
      context.fillText(text, Math.min(x, this.width - 8), top + 8);
    }
  }

  #point(event) {
    const { shown, place } = this.visible();
    const x = event.offsetX;
    const pull = event.offsetY >= this.pullsTop && this.pulls().findLast((each) => x >= place(each.ordered_s) - 1 && x <= place(each.ended_s ?? Infinity) + 2);
    if (pull) return showTip(event.clientX, event.clientY, h("h3", {}, `Pull ${pull.pull}`), pairs([["Blocks", told(pull)]]));
    const step = shown.findLast((each) => x >= place(beganS(each)) - 1 && x <= place(each.done_s) + 1);
    if (step) this.#tell(step, shown, event.clientX, event.clientY);
    else hideTip();
  }

  /** From one step in sight to the next, from the last one on. */
  #key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const { shown, place } = this.visible();
    if (!shown.length) return;
    const at = shown.findIndex((step) => step.step === this.step);
    const step = shown[at < 0 ? shown.length - 1 : Math.min(shown.length - 1, Math.max(0, at + by))];
    const box = this.canvas.getBoundingClientRect();
    this.step = step.step;
    this.#tell(step, shown, box.left + place(step.done_s), box.top + 20);
    announce(document.getElementById("tip").textContent);
  }

  #tell(step, shown, x, y) {
    const before = shown[shown.indexOf(step) - 1];
    showTip(x, y, h("h3", {}, `Step ${step.step}`), pairs([
      ["Decode", `${count(step.decodes)} tokens`], ["Prefill", `${count(step.prefill)} tokens`],
      ["Wasted", step.wasted ? `${step.wasted} tokens` : null],
      ["Pull", step.pulls?.length ? step.pulls.map(told).join("; ") : null], ["Copied blocks", step.copied || null], ["Swapped out", step.swapped_out || null], ["Swapped in", step.swapped_in || null],
      ["Step", span(step.done_s - step.launched_s)], ["Device busy", step.busy_s ? span(step.busy_s) : null],
      ["Gap before it", before ? span(Math.max(0, beganS(step) - before.done_s)) : null],
      ["Plan on the bus", span(step.received_s - step.planned_s)], ["Result on the bus", span(step.landed_s - step.done_s)],
    ]));
  }
}

/** A pull in words. */
function told({ blocks, lender, hosts, replica, there, ordered_s: orderedS, ended_s: endedS }) {
  const ends = there === false ? ", failed" : endedS === undefined ? ", on its way" : "";
  return `${count(blocks.length)} from ${hosts ? "host memory of " : ""}${lender || "elsewhere"} to ${replica}${ends}${endedS === undefined ? "" : `, ${span(Math.max(0, endedS - orderedS))}`}`;
}

/** When the device began with a step: it may have been launched while the one before was still computed. */
function beganS(step) {
  return step.busy_s ? Math.max(step.launched_s, step.done_s - step.busy_s) : step.launched_s;
}

function line(context, from, to, y) {
  context.beginPath();
  context.moveTo(from, y);
  context.lineTo(Math.max(from + 1, to), y);
  context.stroke();
}

/** What the steps say in a few numbers. */
export function summary(steps) {
  if (!steps.length) return null;
  const sum = (of) => steps.reduce((total, step) => total + of(step), 0);
  const spanS = Math.max(1e-3, steps.at(-1).done_s - steps[0].launched_s);
  const busyS = sum((step) => step.busy_s || step.done_s - step.launched_s);
  const times = steps.map((step) => step.done_s - step.launched_s).sort((a, b) => a - b);
  return {
    perS: steps.length / spanS,
    decode: sum((step) => step.decodes) / spanS,
    prefill: sum((step) => step.prefill) / spanS,
    wasted: sum((step) => step.wasted) / Math.max(1, sum((step) => step.decodes + step.prefill)),
    p50: times[Math.floor(times.length / 2)],
    p99: times[Math.floor(times.length * 0.99)],
    busy: Math.min(1, busyS / spanS),
    planBus: sum((step) => step.received_s - step.planned_s) / steps.length,
    resultBus: sum((step) => step.landed_s - step.done_s) / steps.length,
  };
}
