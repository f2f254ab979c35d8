// The steps of an executor as they come.

import { fill, h, icon, labelled, say, segmented } from "../dom.js";
import { pair, percent, short } from "../format.js";
import { Figures } from "../parts/figures.js";
import { chooseReplica } from "../parts/replicas.js";
import { summary, Timeline } from "../parts/timeline.js";

const NAMES = ["Steps/s", "Step, p50 / p99", "Device busy", "Decode/s", "Prefill/s", "Wasted", "Drafts accepted", "Bus, plan / result"];

export function stepsView({ world, view, tools, signal }) {
  const figures = new Figures(NAMES);
  let name = null;
  const timeline = new Timeline({
    steps: () => world.steps.filter((step) => step.replica === name),
    nowS: () => world.nowS(),
    tall: true,
    signal,
  });
  const choice = h("div", {});
  const hold = h("button", { class: "button", type: "button", "aria-pressed": "false", onclick: () => {
    const paused = hold.getAttribute("aria-pressed") !== "true";
    hold.setAttribute("aria-pressed", String(paused));
    fill(hold, icon(paused ? "play" : "pause"), labelled(paused ? "Follow" : "Hold"));
    timeline.pause(paused ? world.nowS() - 0.25 : null);
  } }, icon("pause"), labelled("Hold"));
  tools.append(choice, segmented("Time shown", [[2, "2 s"], [10, "10 s"], [60, "1 min"]], 10, (seconds) => { timeline.windowS = seconds; }), hold);
  chooseReplica(world, choice, (chosen) => { name = chosen; }, signal);
  const hint = h("div", { class: "small quiet" });
  view.append(figures.element, h("section", { class: "card" },
    h("header", {}, h("h2", {}, "Tokens of each step, and where the time went"), key()), timeline.element, hint));
  const whyNone = () => {
    if (world.health.level === "bad") return `Nothing is computed. ${world.health.text}`;
    if (world.lost.has(name)) return `${name} is gone.`;
    return "Nothing has been computed in this time. Ask something in the playground.";
  };
  const update = () => {
    const found = summary(timeline.visible().shown);
    figures.set("Steps/s", found ? short(found.perS) : "0");
    figures.set("Step, p50 / p99", ...(found ? pair(found.p50, found.p99) : ["–"]));
    figures.set("Device busy", percent(found?.busy));
    figures.set("Decode/s", found ? short(found.decode) : "0", "tokens");
    figures.set("Prefill/s", found ? short(found.prefill) : "0", "tokens");
    figures.set("Wasted", percent(found?.wasted));
    const replica = world.shownReplicas().get(name);
    figures.show("Drafts accepted", replica?.most_drafts > 0);
    figures.set("Drafts accepted", ...drafts(replica));
    figures.set("Bus, plan / result", ...(found ? pair(found.planBus, found.resultBus) : ["–"]));
    say(hint, found ? "" : whyNone());
  };
  const timer = setInterval(update, 500);
  signal.addEventListener("abort", () => clearInterval(timer));
  requestAnimationFrame(update);
}

/** The share of an executor's drafts that were right, and how many they were. */
function drafts(replica) {
  if (!replica?.most_drafts) return ["–"];
  const drafted = replica.num_drafted, accepted = replica.num_accepted;
  return [drafted ? percent(accepted / drafted) : "–", `of ${short(drafted)}`];
}

const KEY = { decode: "Decode", prefill: "Prefill", wasted: "Wasted", "ink-3": "Plan to executor", good: "Result to scheduler" };

export function key(colours = Object.keys(KEY)) {
  return h("ul", { class: "key" }, colours.map((colour) => h("li", {}, h("i", { style: { "--colour": `var(--${colour})` } }), KEY[colour])));
}
