// The playground: talk to the model, and watch the engine beside it.

import { key } from "../api.js";
import { announce, fill, h, icon, labelled } from "../dom.js";
import { count, percent, short, span } from "../format.js";
import { Answer } from "../chat/answers.js";
import { Settings } from "../chat/settings.js";
import { showSnippets } from "../chat/snippets.js";
import { Talk } from "../chat/talk.js";
import { BlockMap } from "../parts/blockmap.js";
import { pairs } from "../parts/tip.js";

const IDEAS = ["What is water?", "What does brave mean?", "Define river.", "Use \"light\" in a sentence."];
let talk = null;

export function chatView({ world, view, tools, signal }) {
  if (!talk) {
    talk = new Talk();
    talk.resume();
  }
  const playground = h("div", { class: "playground" });
  const turns = h("div", { class: "turns", role: "log", "aria-label": "Conversation" });
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const settings = new Settings({
    system: talk.state.system,
    onsystem: (text) => { talk.state.system = text; talk.save(); },
    onchange: () => playground.classList.toggle("compare", settings.compare),
  });
  settings.element.prepend(glance(world, signal));
  const composer = makeComposer();
  const talking = h("div", { class: "talk" }, turns, h("div", { class: "composer" }, problem, composer.form));
  playground.classList.toggle("compare", settings.compare);
  view.append(fill(playground, talking, settings.element));
  const tune = h("button", { class: "button only-narrow", type: "button", "aria-pressed": "false", onclick: () => {
    tune.setAttribute("aria-pressed", String(playground.classList.toggle("tuning")));
  } }, icon("tune"), labelled("Settings"));
  tools.append(tune, h("button", { class: "button", type: "button", onclick: () => talk.clear() }, icon("plus"), labelled("New talk")));

  /** The settings, or null and why not. */
  const sides = () => {
    try {
      problem.hidden = true;
      return settings.sides();
    } catch (error) {
      problem.hidden = false;
      problem.textContent = error.message;
      return null;
    }
  };
  const follows = () => innerHeight + scrollY > document.documentElement.scrollHeight - 120;
  let answers = [];

  function drawTurns() {
    answers = [];
    const { turns: all } = talk.state;
    fill(turns, all.length ? all.map(drawTurn) : welcome());
    composer.update();
  }

  function drawTurn(turn, index) {
    if (turn.role === "user") return userTurn(turn, index);
    const isLast = index === talk.state.turns.length - 1;
    const shown = turn.sides.map((side) => new Answer(side, { running: (each) => talk.running.has(each), actions: (answer) => actions(answer, isLast) }));
    answers.push(...shown);
    return h("section", { class: "turn assistant" }, h("div", { class: `answers ${shown.length === 1 ? "single" : ""}` }, shown.map((answer) => answer.element)));
  }

  function actions({ side }, isLast) {
    return [
      h("button", { class: "button small ghost", type: "button", onclick: () => showSnippets({
        body: { model: world.hello.model ?? "pagebus", ...side.body }, deployment: world.hello.deployment ?? "pagebus", needsKey: Boolean(key.get()) }) }, "Copy as…"),
      isLast && h("button", { class: "button small ghost", type: "button", onclick: () => { const found = sides(); if (found) talk.regenerate(found); } }, "Regenerate"),
      h("button", { class: "button small ghost", type: "button", onclick: () => { if (side.id) { world.followed = side.id; location.hash = "#/requests"; } } }, "Follow"),
    ];
  }

  function userTurn(turn, index) {
    const says = h("div", { class: "says" }, turn.content);
    const section = h("section", { class: "turn user" }, says, h("header", {},
      h("button", { class: "button small ghost", type: "button", onclick: edit }, "Edit")));
    function edit() {
      const area = h("textarea", { rows: "3", value: turn.content, "aria-label": "Say it differently" });
      fill(section, area, h("header", {},
        h("button", { class: "button small primary", type: "button", onclick: () => { const found = sides(); if (found && area.value.trim()) talk.edit(index, area.value, found); } }, "Send again"),
        h("button", { class: "button small", type: "button", onclick: drawTurns }, "Leave it")));
      area.focus();
    }
    return section;
  }

  function welcome() {
    return h("div", { class: "welcome" }, h("h2", {}, "Talk to the model, and watch the engine think."),
      h("p", {}, "Every answer is planned step by step: which tokens are computed next, and in which blocks they are kept. The views on the left show all of it while it happens."),
      h("div", { class: "suggestions" }, IDEAS.map((idea) => h("button", { class: "button", type: "button", onclick: () => composer.send(idea) }, idea))));
  }

  function makeComposer() {
    const area = h("textarea", { rows: "1", placeholder: "Ask something", "aria-label": "Message", onkeydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(area.value); }
    } });
    const button = h("button", { class: "button primary icon", "aria-label": "Send" }, icon("send"));
    const hint = h("span", { class: "small faint grow" }, "Enter sends, Shift+Enter breaks the line");
    const form = h("form", { onsubmit: (event) => { event.preventDefault(); talk.isRunning ? talk.stop() : send(area.value); } },
      area, h("div", { class: "bar" }, hint, button));
    function send(text) {
      if (!text.trim() || talk.isRunning) return;
      const found = sides();
      if (!found) return;
      area.value = "";
      talk.send(text.trim(), found);
      scrollTo(0, document.documentElement.scrollHeight);
    }
    return { form, send, area, update: () => {
      const label = talk.isRunning ? "Stop" : "Send";
      if (button.getAttribute("aria-label") === label) return;
      button.setAttribute("aria-label", label);
      fill(button, icon(talk.isRunning ? "stop" : "send"));
    } };
  }

  talk.addEventListener("turns", drawTurns, { signal });
  talk.addEventListener("answer", ({ detail }) => {
    const stick = follows();
    answers.find((answer) => answer.side === detail)?.update();
    composer.update();
    if (stick) requestAnimationFrame(() => scrollTo(0, document.documentElement.scrollHeight));
    if (detail.status === "done" && !talk.isRunning) announce("The answer is complete.");
  }, { signal });
  drawTurns();
  if (matchMedia("(min-width: 801px)").matches) composer.area.focus({ preventScroll: true });
}

/** The engine at a glance: the map of the first executor, small, and a few figures. */
function glance(world, signal) {
  const title = h("h2", {}, "The engine now");
  const facts = h("div", {});
  const map = new BlockMap({ label: "Blocks of the key-value cache, small", height: 130, signal, followed: () => new Set(),
    describe: (block) => h("span", {}, `Block ${block}`), choose: () => { location.hash = "#/memory"; } });
  const update = () => {
    const replica = world.replicas.values().next().value;
    if (!replica) return;
    map.show(replica.device);
    const last = world.vitals.at(-1) ?? {};
    fill(facts, pairs([["Running", `${count(replica.num_running)}, ${count(world.numWaiting)} waiting`],
      ["Cache in use", percent(1 - replica.num_free / replica.num_blocks)],
      ["Output", `${short(last.output_tokens_per_s ?? 0)} tokens/s`], ["Between tokens", span(last.itl_p50_s)]]));
  };
  let last = 0;
  world.on("state", () => { if (performance.now() - last > 200) { last = performance.now(); update(); } }, signal);
  world.on("theme", () => map.refresh(), signal);
  update();
  return h("section", { class: "card glance" }, title, map.element, facts);
}
