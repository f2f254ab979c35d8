// The frame: which view is shown, the theme, the key, and what the feed says of itself.

import { onUnauthorized } from "./api.js";
import { forgetColors, isDark } from "./colors.js";
import { announce, fill, h, icon, labelled, put, say } from "./dom.js";
import { keepTables } from "./following.js";
import { CONNECTING, healthOf, sentenceOf } from "./health.js";
import { askKey } from "./keydialog.js";
import { NOTES } from "./notes.js";
import { Live } from "./live.js";
import { World } from "./world.js";
import { batchesView } from "./views/batches.js";
import { chatView } from "./views/chat.js";
import { memoryView } from "./views/memory.js";
import { overviewView } from "./views/overview.js";
import { requestsView } from "./views/requests.js";
import { stepsView } from "./views/steps.js";

/** A view whose code is fetched when it is opened first. */
const later = (path, name) => async (parts) => (await import(path))[name](parts);

const VIEWS = {
  chat: { title: "Playground", brief: "Chat", sign: "chat", make: chatView },
  batches: { title: "Batches", sign: "batch", make: batchesView },
  overview: { title: "Overview", sign: "overview", make: overviewView, group: "Engine room" },
  memory: { title: "Memory", sign: "memory", make: memoryView },
  steps: { title: "Steps", sign: "steps", make: stepsView },
  requests: { title: "Requests", sign: "requests", make: requestsView },
  charts: { title: "Charts", sign: "charts", make: later("./views/charts.js", "chartsView") },
  replay: { title: "Replay", sign: "replay", make: later("./views/replay.js", "replayView"), group: "Recorded" },
};
const HOME = "overview"; // says how all is also when all is well
const MOVED = new Map([["actors", HOME]]); // views of earlier versions that are parts of others now
const HEALTH_MS = 1000; // how often an age in the banner moves on

export const world = new World();
export const live = new Live(world);
const main = document.getElementById("main");
const rail = document.getElementById("rail");
const banner = { text: h("p", {}), action: h("button", { class: "button small", type: "button", onclick: ask }) };
banner.element = h("div", { class: "banner", hidden: true }, h("span", { class: "dot" }), banner.text, banner.action);
let leaving = null;
let shown = "";

function showView() {
  const name = location.hash.replace(/^#\/?/, "").split("/")[0];
  const current = Object.hasOwn(VIEWS, name) ? name : (MOVED.get(name) ?? "chat");
  if (MOVED.has(name)) history.replaceState(null, "", `#/${current}`);
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
  fill(main, banner.element, heading, notes ? put(notes.frame, notes.panel, view) : view);
  showHealth();
  open(make, { world, view, tools, signal: leaving.signal });
  document.title = `${title} · Pagebus`;
  for (const link of rail.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (moved) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  if (MOVED.has(name)) document.getElementById(name).scrollIntoView();
}

/** Some views come later than others, and may be left before they are there. */
async function open(make, parts) {
  try {
    await make(parts);
  } catch (error) {
    if (parts.signal.aborted) return;
    put(parts.view, h("p", { class: "error", role: "alert" }, `This view cannot be shown: ${error.message}`));
    throw error;
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
  for (const [name, { title, brief, sign, group }] of Object.entries(VIEWS)) {
    if (group) put(nav, h("p", {}, group));
    put(nav, h("a", { href: `#/${name}`, "aria-label": title }, icon(sign), h("span", { class: "name" }, title),
      h("span", { class: "brief", "aria-hidden": "true" }, brief ?? title)));
  }
  const model = h("div", { class: "clip", title: "Served model" });
  const status = h("span", { class: "chip", role: "status" });
  const theme = h("button", { class: "button ghost icon", type: "button", "aria-label": "Dark or light", onclick: switchTheme }, icon("sun"));
  const lock = h("button", { class: "button ghost icon", type: "button", "aria-label": "API key", onclick: ask }, icon("key"));
  const brand = h("a", { class: "brand", href: "#/chat" }, logo(), "Pagebus");
  fill(rail, brand, nav, h("footer", {}, h("div", { class: "model" }, h("span", { class: "small faint" }, "Model"), model),
    h("div", {}, status), h("div", { class: "tools" }, theme, lock)));
  const update = () => {
    say(model, world.hello.model ?? "");
    model.title = world.hello.model ?? "";
    const { level, label, text } = world.health;
    status.className = `chip ${level}`;
    if (status.dataset.shown !== label) fill(status, h("span", { class: "dot" }), label);
    status.dataset.shown = label;
    status.title = text;
  };
  world.on("health", update);
  world.on("status", update);
  update();
}

/** Bring the banner up to date: in trouble on all views, on an operator's home always. */
function showHealth() {
  const { level, text, action } = world.health, said = shown === HOME ? sentenceOf(world, world.health) : text;
  banner.element.hidden = !said;
  banner.element.className = `banner ${level} ${shown === HOME ? "home" : ""}`;
  say(banner.text, said);
  banner.action.hidden = !action;
  say(banner.action, action ?? "");
}

function keepHealth() {
  const update = () => {
    const before = world.health, health = world.health = healthOf(world);
    showHealth();
    if (before && before.label === health.label && before.text === health.text) return;
    const news = health.text || (before?.label === CONNECTING ? "" : "All is well again.");
    if (before && before.label !== health.label && news) announce(news);
    world.tell("health");
  };
  for (const name of ["status", "actors", "failures"]) world.on(name, update);
  world.on("state", () => world.health.level === "bad" && update());
  setInterval(update, HEALTH_MS);
  update();
}

function logo() {
  return h("img", { src: new URL("../icon.svg", import.meta.url).pathname, alt: "", width: "26", height: "26" });
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("pagebus.theme", theme);
  forgetColors();
  world.tell("theme");
}

let asked = false;

function ask() {
  askKey(world, () => live.again());
}

/** A key is asked for once by itself; then the banner says that one is needed. */
onUnauthorized(() => {
  if (!asked) ask();
  asked = true;
});

keepHealth();
makeRail();
keepTables(world);
addEventListener("hashchange", showView);
showView();
live.start();
