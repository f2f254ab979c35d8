// The playground: talk to the model, and watch the engine beside it.

import { key } from "../api.js";
import { announce, fill, h, icon, labelled, say } from "../dom.js";
import { count, percent, short, span } from "../format.js";
import { Answer } from "../chat/answers.js";
import { showChats } from "../chat/list.js";
import { followModels } from "../chat/models.js";
import { Settings } from "../chat/settings.js";
import { showSnippets } from "../chat/snippets.js";
import { Talk } from "../chat/talk.js";
import { resultsForm } from "../chat/tools.js";
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
    facts: () => world.hello,
  });
  world.on("status", () => settings.showDefaults(), signal);
  followModels({ world, signal, show: (served, adapters) => {
    const text = settings.showModels(served, adapters);
    if (text) complain(text);
  } });
  settings.element.prepend(glance(world, signal));
  const composer = makeComposer();
  const talking = h("div", { class: "talk" }, turns, h("div", { class: "composer" }, problem, composer.form));
  playground.classList.toggle("compare", settings.compare);
  view.append(fill(playground, talking, settings.element));
  const tune = h("button", { class: "button only-narrow", type: "button", "aria-pressed": "false", onclick: () => {
    tune.setAttribute("aria-pressed", String(playground.classList.toggle("tuning")));
  } }, icon("tune"), labelled("Settings"));
  tools.append(tune, h("button", { class: "button", type: "button", onclick: () => showChats(talk) }, icon("list"), labelled("Chats")),
    h("button", { class: "button", type: "button", onclick: () => { talk.begin(); composer.focus(); } }, icon("plus"), labelled("New chat")));

  function complain(text) {
    problem.hidden = false;
    problem.textContent = text;
  }

  /** The settings, or null and why not. */
  const sides = () => {
    try {
      problem.hidden = true;
      return settings.sides();
    } catch (error) {
      complain(error.message);
      return null;
    }
  };
  const follows = () => innerHeight + scrollY > document.documentElement.scrollHeight - 120;
  let answers = [];

  function drawTurns() {
    answers = [];
    const { turns: all } = talk.state;
    settings.system.value = talk.state.system;
    fill(turns, all.length ? all.map(drawTurn) : welcome());
    composer.update();
  }

  function drawTurn(turn, index) {
    if (turn.role === "user") return userTurn(turn, index);
    if (turn.role === "tool") return toolTurn(turn);
    const isLast = index === talk.state.turns.length - 1;
    const shown = turn.sides.map((side) => new Answer(side, { running: (each) => talk.running.has(each), paused: () => whyPaused(world),
      follow: (each) => { if (world.followed !== each.id) world.follow(each.id); location.hash = "#/requests"; },
      actions: (answer) => actions(answer, turn, isLast) }));
    answers.push(...shown);
    const form = isLast && !talk.isRunning && resultsForm(turn, (results) => { const found = sides(); if (found) talk.sendResults(results, found); });
    return h("section", { class: "turn assistant" }, h("div", { class: `answers ${shown.length === 1 ? "single" : ""}` }, shown.map((answer) => answer.element)), form);
  }

  function actions({ side }, turn, isLast) {
    const act = (text, run, more = {}) => h("button", { class: "button small ghost", type: "button", onclick: run, ...more }, text);
    const isPicked = turn.sides[turn.pick ?? 0] === side;
    return [
      act("Copy as…", () => showSnippets({ body: { model: world.hello.model ?? "pagebus", ...side.body },
        deployment: world.hello.deployment ?? "pagebus", redis: world.hello.redis, needsKey: Boolean(key.get()) })),
      isLast && act("Regenerate", () => { const found = sides(); if (found) talk.regenerate(found, side); }),
      turn.sides.length > 1 && act(isPicked ? "Later turns go on from here" : "Go on from here", () => talk.choose(turn, side), { "aria-pressed": String(isPicked) }),
    ];
  }

  function userTurn(turn, index) {
    const says = h("div", { class: "says" }, turn.content);
    const section = h("section", { class: "turn user" }, says, h("header", {},
      h("button", { class: "button small ghost", type: "button", onclick: edit }, "Edit"), turn.versions && versions(turn.versions, index)));
    function edit() {
      const area = h("textarea", { rows: "3", value: turn.content, "aria-label": "Say it differently", onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
        if (event.key === "Escape") { event.preventDefault(); drawTurns(); }
      } });
      const save = () => { const found = sides(); if (found && area.value.trim()) talk.edit(index, area.value, found); };
      fill(section, area, h("header", {},
        h("button", { class: "button small primary", type: "button", onclick: save }, "Save and send"),
        h("button", { class: "button small", type: "button", onclick: drawTurns }, "Cancel")));
      area.focus();
    }
    return section;
  }

  /** Walks through what was said here instead, each with all that followed it. */
  function versions({ all, at }, index) {
    const step = (by, text, label) => h("button", { class: "button small ghost icon", type: "button", "aria-label": label,
      disabled: at + by < 0 || at + by >= all.length, onclick: () => talk.show(index, at + by) }, text);
    return [step(-1, "‹", "The version before"), h("span", { class: "num" }, `${at + 1} of ${all.length}`), step(1, "›", "The next version")];
  }

  function toolTurn(turn) {
    return h("section", { class: "turn tool" }, turn.results.map(({ name, content }) =>
      h("div", {}, h("span", { class: "small quiet" }, `Result of ${name}`), h("pre", { class: "call", tabindex: "0" }, content))));
  }

  function welcome() {
    return h("div", { class: "welcome" }, h("h2", {}, "Talk to the model, and watch the engine think."),
      h("p", {}, "Every answer is planned step by step: which tokens are computed next, and in which blocks they are kept. The other views show all of it while it happens."),
      h("div", { class: "suggestions" }, IDEAS.map((idea) => h("button", { class: "button", type: "button", onclick: () => { composer.send(idea); composer.focus(); } }, idea))));
  }

  function makeComposer() {
    const area = h("textarea", { rows: "1", placeholder: "Ask something", "aria-label": "Message", onkeydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(area.value); }
    } });
    const button = h("button", { class: "button primary icon", "aria-label": "Send" }, icon("send"));
    const hint = h("span", { class: "small faint grow hint" }, "Enter sends, Shift+Enter breaks the line");
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
    const focus = () => { if (matchMedia("(min-width: 801px)").matches) area.focus({ preventScroll: true }); };
    return { form, send, focus, update: () => {
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
    if (talk.isRunning) return;
    if (detail.status === "done") announce("The answer is complete.");
    if (detail.choices.some((choice) => choice?.calls.some(Boolean))) drawTurns(); // now results can be given
  }, { signal });
  world.on("health", () => answers.filter((answer) => talk.running.has(answer.side)).forEach((answer) => answer.update()), signal);
  drawTurns();
  composer.focus();
}

/** Why nothing is written at present; "" if all is well. */
function whyPaused(world) {
  if (world.health.level !== "bad") return "";
  return world.connected ? world.health.text.split(/[.;] /)[0].replace(/\.$/, "") : "the server cannot be reached";
}

/** The engine at a glance: the map of the first executor, small, and a few figures. */
function glance(world, signal) {
  const title = h("h2", {}, "The engine now");
  const facts = h("div", {});
  const empty = h("p", { class: "small quiet" });
  const map = new BlockMap({ label: "Blocks of the key-value cache, small", height: () => 130, signal,
    describe: (block) => h("span", {}, `Block ${block}`), choose: () => { location.hash = "#/memory"; } });
  const update = () => {
    const replica = world.shownReplicas().values().next().value;
    empty.hidden = Boolean(replica);
    map.element.hidden = !replica;
    if (!replica) return say(empty, world.health.text || "Nothing is known of it yet.");
    card.classList.toggle("stale", Boolean(replica.lostS));
    say(title, replica.lostS ? "The engine when it was there last" : "The engine now");
    map.show(replica.device);
    const last = world.vitals.at(-1) ?? {};
    fill(facts, replica.lostS ? null : pairs([["Running", `${count(replica.num_running)}, ${count(world.numWaiting)} waiting`],
      ["Cache in use", percent(1 - replica.num_free / replica.num_blocks)],
      ["Output", `${short(last.output_tokens_per_s ?? 0)} tokens/s`], ["Between tokens", span(last.itl_p50_s)]]));
  };
  const card = h("section", { class: "card glance" }, title, map.element, empty, facts);
  let last = 0;
  world.on("state", () => { if (performance.now() - last > 200) { last = performance.now(); update(); } }, signal);
  world.on("theme", () => map.refresh(), signal);
  for (const change of ["health", "status"]) world.on(change, update, signal);
  update();
  return card;
}
