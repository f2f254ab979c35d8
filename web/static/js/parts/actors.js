// The processes of the deployment: who is there, how busy, and orders to them.

import { request } from "../api.js";
import { fill, h, put, say } from "../dom.js";
import { age, bytes, percent, short } from "../format.js";
import { expertLoad, showExpertLoad } from "./experts.js";

const ABOUT = {
  ingress: "HTTP in, text out", tokenizer: "Text to tokens", scheduler: "Plans every step", executor: "Computes the steps",
  rank: "Computes the steps with its executor", detokenizer: "Tokens to text", jobs: "Queued work",
};
const ORDER = ["ingress", "tokenizer", "scheduler", "executor", "rank", "detokenizer", "jobs"];
const COMPUTES = ["executor", "rank"];

/** A row for each actor, kept up to date until the signal is aborted; `problem` shows what an order ended with. */
export function actorRows(world, problem, signal) {
  const rows = h("div", { class: "actors" });
  const known = new Map();
  const update = () => {
    const actors = [...world.actors].sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind));
    const names = actors.map((row) => `${row.kind}:${row.name}`), most = Math.max(...actors.map((row) => row.memory_bytes ?? 0));
    actors.forEach((row, index) => {
      if (!known.has(names[index])) known.set(names[index], makeRow(world, row, problem));
      updateRow(known.get(names[index]), row, world.nowS(), most);
      showAdapters(known.get(names[index]), world.replicas.get(row.name));
    });
    if (rows.dataset.names === names.join()) return;
    rows.dataset.names = names.join();
    fill(rows, names.map((name) => known.get(name).element));
  };
  world.on("actors", update, signal);
  update();
  return rows;
}

function meter(name) {
  const fillBar = h("b", {}), value = h("span", {});
  return { element: h("div", { class: "meter" }, h("span", {}, name), h("i", {}, fillBar), value), fillBar, value };
}

function makeRow(world, row, problem) {
  const card = { state: h("span", { class: "chip" }), restarts: h("span", { class: "small quiet num" }), rate: h("span", { class: "num" }), paths: h("span", {}), adapters: h("span", { class: "clip" }),
    cpu: meter("CPU"), memory: meter("Memory"), gpu: meter("Device"), gpuMemory: meter("On the GPU"), experts: expertLoad() };
  card.gpu.element.hidden = !COMPUTES.includes(row.kind);
  const attention = h("div", { class: "meter", hidden: !COMPUTES.includes(row.kind) }, h("span", {}, "Attention"), h("span", {}), card.paths);
  card.adapted = h("div", { class: "meter", hidden: true }, h("span", {}, "Adapters"), h("span", {}), card.adapters);
  const act = (order, text) => h("button", { class: "button small", type: "button", onclick: () => confirmOrder(world, row, order, problem) }, text);
  card.buttons = [act("drain", "Drain"), act("stop", "Stop")];
  card.element = h("section", { class: "actor", data: { actor: row.name }, "aria-label": row.name },
    h("header", {}, h("div", {}, h("h3", { class: "clip", title: row.name }, row.name), h("p", { class: "small quiet" }, ABOUT[row.kind] ?? row.kind)), card.state),
    h("div", { class: "meters" }, card.cpu.element, card.memory.element, card.gpu.element, card.gpuMemory.element,
      h("div", { class: "meter" }, h("span", {}, "Work"), h("span", {}), card.rate), attention, card.adapted, card.experts.element),
    h("footer", {}, card.restarts, card.buttons));
  return card;
}

/** `most`: the memory of the actor that has most, the full length of a bar. */
function updateRow(card, row, nowS, most) {
  const kind = { ready: "good", gone: "bad", draining: "warn" }[row.state] ?? "warn";
  const text = row.state === "gone" ? `gone for ${age(nowS - row.gone_s)}` : row.state;
  const shown = row.progress !== null && row.progress !== undefined ? `${row.phase ?? row.state} ${percent(row.progress)}` : text;
  card.state.className = `chip ${kind}`;
  if (card.shown !== shown) fill(card.state, h("span", { class: "dot" }), shown);
  card.shown = shown;
  const up = row.started_s && row.state !== "gone" ? ` · up ${age(nowS - row.started_s)}` : "";
  say(card.restarts, `${row.restarts ? `restarted ${row.restarts === 1 ? "once" : `${row.restarts} times`}` : "never restarted"}${up}`);
  card.restarts.title = `Process ${row.pid} on ${row.host}, life ${row.epoch}`;
  set(card.cpu, row.cpu, row.cpu === null ? "–" : percent(row.cpu));
  set(card.memory, row.memory_bytes / most, bytes(row.memory_bytes));
  card.memory.element.title = "A full bar is the actor that takes most";
  set(card.gpu, row.gpu, row.gpu === null ? "–" : `${percent(row.gpu)} busy`);
  card.gpuMemory.element.hidden = row.gpu_memory_bytes === null;
  set(card.gpuMemory, row.gpu_memory_bytes / row.gpu_capacity_bytes, bytes(row.gpu_memory_bytes));
  card.gpuMemory.element.title = `of ${bytes(row.gpu_capacity_bytes)}`;
  say(card.rate, row.rate === null ? "–" : row.unit === "busy" ? `${percent(row.rate)} busy` : `${short(row.rate)} ${row.unit}`);
  const paths = Object.entries(row.paths ?? {}).map(([path, share]) => `${path} ${percent(share)}`);
  say(card.paths, paths[0] ?? "–");
  card.paths.title = paths.join(", ");
  showExpertLoad(card.experts, row.experts);
  for (const button of card.buttons) button.disabled = row.state === "gone";
}

/** Which adapters are on the device of this replica, the one used last in front; the rest, and their blocks, on the tip. */
function showAdapters(card, replica) {
  card.adapted.hidden = !replica?.most_adapters;
  if (card.adapted.hidden) return;
  const names = [...replica.adapters].reverse();
  say(card.adapters, `${names.length}${names.length ? `: ${names[0]}` : ""}${names.length > 1 ? ` +${names.length - 1}` : ""}`);
  card.adapted.title = names.length ? `In ${replica.num_adapter_blocks} blocks of the device, the one used last in front: ${names.join(", ")}` : "None is on the device";
}

function set({ fillBar, value }, share, text) {
  fillBar.style.setProperty("width", percent(Math.min(1, share || 0)));
  say(value, text);
}

const EFFECTS = {
  drain: "It finishes what it has, takes nothing new, and ends. Its supervisor starts it again.",
  stop: "It ends at once, with its next heartbeat. Requests go on as if it had died; its supervisor starts it again.",
};

/** Nobody ends an actor by a slip of the finger. */
function confirmOrder(world, row, order, problem) {
  const dialog = h("dialog", { "aria-labelledby": "order-title", onclose: () => dialog.remove() });
  const send = async () => {
    dialog.close();
    problem.hidden = true;
    try {
      await request(`/api/actors/${row.kind}/${encodeURIComponent(row.name)}/${order}`, { json: {} });
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
  };
  put(dialog, h("form", { method: "dialog", onsubmit: send },
    h("h2", { id: "order-title" }, `${order === "drain" ? "Drain" : "Stop"} ${row.name}?`), h("p", { class: "quiet" }, EFFECTS[order]),
    h("div", { class: "actions" }, h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Cancel"),
      h("button", { class: "button primary" }, order === "drain" ? "Drain it" : "Stop it"))));
  document.body.append(dialog);
  dialog.showModal();
}
