// A recorded run: the same views, and a slider for time.

import { request } from "../api.js";
import { fill, h, icon, segmented } from "../dom.js";
import { count, span } from "../format.js";
import { Figures } from "../parts/figures.js";
import { Memory } from "../parts/memory.js";
import { showFollowed } from "../parts/following.js";
import { chooseReplica } from "../parts/replicas.js";
import { Timeline } from "../parts/timeline.js";
import { phaseKey, Waterfall } from "../parts/waterfall.js";
import { readLines, Recording } from "../replay/recording.js";
import { key as stepKey } from "./steps.js";

const SAMPLE = new URL("../../sample/cpu-run.jsonl.gz", import.meta.url).href;
const NAMES = ["Time", "Step", "Running", "Blocks held", "Ended", "Preempted", "Pulled / lent"];
const WINDOW_S = 4;

export function replayView({ view, tools, signal }) {
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const place = h("div", { class: "view" });
  const input = h("input", { type: "file", class: "sr", id: "recording", accept: ".jsonl,.gz", onchange: () => open(input.files[0], input.files[0]?.name) });
  tools.append(input, h("label", { class: "button", for: "recording" }, "Open a recording"));
  view.append(problem, place);
  let closing = null;

  async function open(blob, name) {
    if (!blob) return;
    problem.hidden = true;
    try {
      const recording = new Recording(await readLines(blob));
      if (signal.aborted) return;
      closing?.abort();
      closing = new AbortController();
      signal.addEventListener("abort", () => closing.abort());
      fill(place, player(recording, name, closing.signal));
    } catch (error) {
      problem.hidden = false;
      problem.textContent = `${name}: ${error.message}`;
    }
  }

  request(SAMPLE).then((response) => response.blob()).then((blob) => open(blob, "cpu-run.jsonl.gz"))
    .catch((error) => { problem.hidden = false; problem.textContent = error.message; });
}

function player(recording, name, signal) {
  const world = recording.world();
  let replica = null, closing = null;
  let atS = recording.startS + (recording.endS - recording.startS) * 0.4, speed = 1, playing = false, before = 0;
  recording.show(world, atS);
  const figures = new Figures(NAMES);
  const memory = h("div", { class: "view" }), choice = h("div", {});
  const timeline = new Timeline({ steps: () => recording.stepsOf(replica), nowS: () => atS, windowS: WINDOW_S, lanes: ["Decode", "Prefill", "Device", "Bus", "Pulls"], zeroS: recording.startS,
    pulls: recording.pulls.length ? () => recording.pullsOf(replica) : null, signal });
  const waterfall = new Waterfall({ choose: (id) => world.follow(id) });
  world.on("follow", () => { recording.follow(world); world.tell("tables"); draw(); }, signal);
  const slider = h("input", { type: "range", min: String(recording.startS), max: String(recording.endS), step: "any", "aria-label": "Time in the recording",
    oninput: () => { go(Number(slider.value)); } });
  const button = h("button", { class: "button primary", type: "button", onclick: () => play(!playing) });
  const step = (by) => {
    const steps = recording.stepsOf(replica);
    play(false);
    go(steps[Math.min(steps.length - 1, Math.max(0, recording.indexAt(atS, steps) + by))].done_s);
  };

  function go(toS) {
    atS = Math.min(recording.endS, Math.max(recording.startS, toS));
    recording.show(world, atS);
    draw();
  }

  function play(on) {
    playing = on && atS < recording.endS ? true : on ? (go(recording.startS), true) : false;
    fill(button, icon(playing ? "pause" : "play"), playing ? "Pause" : "Play");
    before = performance.now();
    if (playing) requestAnimationFrame(turn);
  }

  function turn(now) {
    if (!playing || signal.aborted) return;
    go(atS + ((now - before) / 1000) * speed);
    before = now;
    if (atS >= recording.endS) play(false);
    else requestAnimationFrame(turn);
  }

  function draw() {
    slider.value = String(atS);
    slider.setAttribute("aria-valuetext", span(atS - recording.startS));
    timeline.pause(atS);
    const living = [...world.requests.values()].sort((a, b) => b.arrived_s - a.arrived_s);
    const shown = [...living, ...world.over.toReversed()].slice(0, 40);
    waterfall.show(shown, Math.max(recording.startS, atS - 6), atS, world.followed);
    const { device, pulled_blocks: pulled, lent_blocks: lent } = world.replicas.get(replica), counts = device.counts();
    const steps = recording.stepsOf(replica), index = recording.indexAt(atS, steps);
    figures.set("Time", span(atS - recording.startS), `of ${span(recording.endS - recording.startS)}`);
    figures.set("Step", index < 0 ? "–" : count(steps[index].step), `of ${count(steps.at(-1).step)}`);
    figures.set("Running", count(world.requests.size));
    figures.set("Blocks held", count(counts.held), `of ${count(counts.size)}`);
    figures.set("Ended", count(world.over.length));
    figures.show("Pulled / lent", recording.pulls.length > 0);
    figures.set("Pulled / lent", `${count(pulled)} / ${count(lent)}`);
    figures.set("Preempted", count([...world.requests.values(), ...world.over].filter((each) => each.num_preemptions).length));
  }

  chooseReplica(world, choice, (name) => {
    replica = name;
    closing?.abort();
    closing = new AbortController();
    signal.addEventListener("abort", () => closing.abort());
    fill(memory, new Memory({ world, name, signal: closing.signal, asks: false }).element);
    draw();
  }, signal);
  const followed = h("div", {});
  showFollowed(world, followed, signal);
  play(false);
  return [
    h("section", { class: "card scrub controls" }, button,
      h("button", { class: "button", type: "button", onclick: () => step(-1) }, "Previous step"),
      h("button", { class: "button", type: "button", onclick: () => step(1) }, "Next step"), slider,
      segmented("Speed", [[0.1, "0.1×"], [1, "1×"], [5, "5×"]], 1, (value) => { speed = value; }), choice,
      h("span", { class: "small quiet" }, name), followed),
    figures.element,
    h("div", { class: "two" }, memory, h("div", { class: "view" },
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Steps"), stepKey(["decode", "prefill", "ink-3", "good"])), timeline.element),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Sequences"), phaseKey(["Prefill", "Decode"])), waterfall.element))),
  ];
}
