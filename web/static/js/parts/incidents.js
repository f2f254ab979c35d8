// What has happened lately, in words, the newest first.

import { fill, h } from "../dom.js";
import { age, count, span } from "../format.js";

const KINDS = { executor: "executor", scheduler: "scheduler", tokenizer: "tokenizer", detokenizer: "detokenizer", bus: "Redis" };
const after = ({ after_s: afterS }) => (afterS < 9.95 ? span(afterS) : age(afterS));

/** An incident's colour and words. */
const WORDS = {
  joined: (it) => ["good", `${it.actor} has joined.`],
  died: (it) => ["bad", `${it.actor} died.`],
  ended: (it) => ["warn", `${it.actor} ended, as it was told to.`],
  back: (it) => ["good", `${it.actor} was started again, and is ready after ${after(it)}.`],
  renewed: (it) => ["good", `${it.actor} has its lease again, after ${after(it)}.`],
  moved: (it) => ["warn", `${it.actor} has taken the lease of ${it.before}.`],
  resumed: (it) => ["good", it.count === 1 ? "1 sequence of a lost executor goes on with the same tokens." : `${count(it.count)} sequences of lost executors go on with the same tokens.`],
  outage: (it) => ["bad", `Outage: without ${it.missing.map((kind) => KINDS[kind] ?? kind).join(", ")}.`],
  answered: (it) => ["good", `Requests are answered again, after ${after(it)}.`],
};

/** The colour and the words of an incident; null for one that this page does not know. */
export function wordsOf(incident) {
  return WORDS[incident.what]?.(incident) ?? null;
}

/** A list that is kept up to date until the signal is aborted. */
export function incidentList(world, signal) {
  const list = h("ul", { class: "incidents", tabindex: "0", role: "list", "aria-label": "Last events" });
  const update = () => fill(list, world.incidents.length ? world.incidents.map(entry)
    : h("li", { class: "quiet" }, "Nothing has happened since this ingress was started."));
  world.on("incidents", update, signal);
  update();
  return list;
}

function entry(incident) {
  const found = wordsOf(incident);
  if (!found) return null;
  const date = new Date(incident.at_s * 1000), [kind, text] = found;
  return h("li", {}, h("time", { class: "num", datetime: date.toISOString(), title: date.toLocaleString("en-GB") }, date.toLocaleTimeString("en-GB")),
    h("span", { class: `dot ${kind}` }), h("span", {}, text));
}
