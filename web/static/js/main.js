// The frame: which view is shown, the theme, the key, and what the feed says of itself.

import { key, onUnauthorized } from "./api.js";
import { forgetColors, isDark } from "./colors.js";
import { fill, h, icon, labelled, put, say } from "./dom.js";
import { NOTES } from "./notes.js";
import { Live } from "./live.js";
import { World } from "./world.js";
import { actorsView } from "./views/actors.js";
import { batchesView } from "./views/batches.js";
import { chartsView } from "./views/charts.js";
import { chatView } from "./views/chat.js";
import { memoryView } from "./views/memory.js";
import { replayView } from "./views/replay.js";
import { requestsView } from "./views/requests.js";
import { stepsView } from "./views/steps.js";

const VIEWS = {
  chat: { title: "Playground", sign: "chat", make: chatView },
  batches: { title: "Batches", sign: "batch", make: batchesView },
  memory: { title: "Memory", sign: "memory", make: memoryView, group: "Engine room" },
  steps: { title: "Steps", sign: "steps", make: stepsView },
  requests: { title: "Requests", sign: "requests", make: requestsView },
  actors: { title: "Actors", sign: "actors", make: actorsView },
  charts: { title: "Charts", sign: "charts", make: chartsView },
  replay: { title: "Replay", sign: "replay", make: replayView, group: "Recorded" },
};

export const world = new World();
export const live = new Live(world);
const main = document.getElementById("main");
const rail = document.getElementById("rail");
let leaving = null;
let shown = "";

function showView() {
  const name = location.hash.replace(/^#\/?/, "").split("/")[0];
  const current = VIEWS[name] ? name : "chat";
  if (current === shown) return;
  const moved = shown !== "";
  shown = current;
  leaving?.abort();
  leaving = new AbortController();
  const { title, make } = VIEWS[current];
  const view = h("div", { class: "view" });
  const tools = h("div", { class: "scrub" });
  const notes = notesOf(current);
  const heading = h("div", { class: "heading" }, h("h1", {}, title), tools, notes?.button);
  fill(main, heading, notes ? put(notes.frame, notes.panel, view) : view);
  make({ world, view, tools, signal: leaving.signal });
  document.title = `${title} · Pagebus`;
  for (const link of rail.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (moved) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

/** The notes beside a view, and the button that shows them. */
function notesOf(name) {
  const note = NOTES[name];
  if (!note) return null;
  const panel = h("aside", { class: "notes", id: "notes", "aria-label": "What this shows" },
    h("h2", {}, note.title), note.text.map((text) => h("p", {}, emphasised(text))),
    note.more && h("p", { class: "small" }, note.more));
  const frame = h("div", { class: "with-notes" });
  const button = h("button", { class: "button", type: "button", "aria-controls": "notes", onclick: () => set(panel.hidden) },
    icon("help"), labelled("What am I seeing?"));
  const set = (open) => {
    panel.hidden = !open;
    frame.classList.toggle("open", open);
    button.setAttribute("aria-expanded", String(open));
    localStorage.setItem("pagebus.notes", open ? "open" : "closed");
  };
  const wanted = localStorage.getItem("pagebus.notes");
  set(wanted ? wanted === "open" : matchMedia("(min-width: 1560px)").matches);
  if (!wanted) localStorage.removeItem("pagebus.notes");
  return { panel, frame, button };
}

/** `*words*` of a note are strong, and what is in backticks is code. */
function emphasised(text) {
  return text.split(/(\*[^*]+\*|`[^`]+`)/).map((part) =>
    part.startsWith("*") ? h("b", {}, part.slice(1, -1)) : part.startsWith("`") ? h("code", {}, part.slice(1, -1)) : part);
}

function makeRail() {
  const nav = h("nav", { "aria-label": "Views" });
  for (const [name, { title, sign, group }] of Object.entries(VIEWS)) {
    if (group) put(nav, h("p", {}, group));
    put(nav, h("a", { href: `#/${name}` }, icon(sign), h("span", {}, title)));
  }
  const model = h("div", { class: "clip", title: "Served model" });
  const status = h("span", { class: "chip", role: "status" });
  const theme = h("button", { class: "button ghost icon", type: "button", "aria-label": "Dark or light", onclick: switchTheme }, icon("sun"));
  const lock = h("button", { class: "button ghost icon", type: "button", "aria-label": "API key", onclick: () => askKey() }, icon("key"));
  const brand = h("a", { class: "brand", href: "#/chat" }, logo(), "Pagebus");
  fill(rail, brand, nav, h("footer", {}, h("div", { class: "model" }, h("span", { class: "small faint" }, "Model"), model),
    h("div", {}, status), h("div", { class: "tools" }, theme, lock)));
  const update = () => {
    say(model, world.hello.model ?? "");
    model.title = world.hello.model ?? "";
    const [kind, text] = world.connected ? (world.away ? ["warn", "No scheduler"] : ["good", "Live"]) : ["bad", "Not connected"];
    status.className = `chip ${kind}`;
    fill(status, h("span", { class: "dot" }), text);
    status.title = world.away || (world.connected ? "" : (world.problem ?? ""));
  };
  world.on("status", update);
  world.on("state", () => status.textContent !== "Live" && update());
  update();
}

function logo() {
  return h("img", { src: "/static/icon.svg", alt: "", width: "26", height: "26" });
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("pagebus.theme", theme);
  forgetColors();
  world.tell("theme");
}

let asking = false;

/** Ask for the API key; it stays in this tab. */
function askKey() {
  if (asking) return;
  asking = true;
  const input = h("input", { type: "password", id: "key", autocomplete: "off", value: key.get() });
  const dialog = h("dialog", { "aria-labelledby": "key-title", onclose: () => { asking = false; dialog.remove(); } },
    h("form", { method: "dialog", onsubmit: () => { key.set(input.value.trim()); live.again(); } },
      h("h2", { id: "key-title" }, "API key"),
      h("p", { class: "quiet" }, "This server was started with keys. Yours is kept in this tab only."),
      h("label", { class: "field" }, h("span", {}, "Key"), input),
      h("div", { class: "actions" },
        h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Cancel"),
        h("button", { class: "button primary" }, "Use this key"))));
  document.body.append(dialog);
  dialog.showModal();
}

onUnauthorized(askKey);
makeRail();
addEventListener("hashchange", showView);
showView();
live.start();
