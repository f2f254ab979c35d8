// Whether requests are answered, in a sentence: the health of the deployment, not of the feed.

import { age, count, percent } from "./format.js";

const LABELS = { good: "Live", warn: "Degraded", bad: "Outage", held: "Paused" };
const GONE_SHOWN_S = 120; // how long an actor is missed that others stand in for
const WITHOUT = {
  bus: "Redis does not answer.", tokenizer: "There is no tokenizer.", scheduler: "There is no scheduler.",
  executor: "There is no executor.", detokenizer: "There is no detokenizer.",
};
const HELD = {
  keep: "An operator has paused the work: requests wait.",
  refuse: "An operator has paused the work: new requests are told to come again (503).",
};
const ACCESS = {
  needed: ["This server needs an API key.", "Enter a key"],
  refused: ["This server refused the key.", "Enter another key"],
  forbidden: ["This key may use the playground and batches. What the engine does needs a key of an operator.", "Enter another key"],
};

/** The label until the first connection, after which nothing is well "again". */
export const CONNECTING = "Connecting";

/** { level: good, warn or bad; label; text, "" if all is well; action: null or the text of a button that asks for a key }. */
export function healthOf(world, nowS = world.nowS()) {
  const access = ACCESS[world.access];
  if (access) return { level: "warn", label: world.access === "forbidden" ? "No access" : "Key needed", text: access[0], action: access[1] };
  if (!world.connected) {
    const text = world.problem ? `${world.problem} Trying again.` : "";
    return { level: world.problem ? "bad" : "warn", label: world.problem ? "Not connected" : CONNECTING, text, action: null };
  }
  const troubles = world.actors.map((row) => troubleOf(row, nowS)).filter(Boolean);
  const missing = world.missing.length ? world.missing : world.away && !troubles.length ? ["scheduler"] : [];
  if (missing.length) return { level: "bad", label: LABELS.bad, text: outage(world, missing, troubles), action: null };
  if (world.held) return { level: "warn", label: LABELS.held, text: HELD[world.held === "keep" ? "keep" : "refuse"], action: null };
  const shown = troubles.filter((each) => each.sinceS === null || nowS - each.sinceS < GONE_SHOWN_S);
  const text = shown.length ? `${sentence(shown)} Others of its kind carry on.` : "";
  return { level: text ? "warn" : "good", label: text ? LABELS.warn : LABELS.good, text, action: null };
}

/** What works, what does not, since when, and what was lost: the health that an operator's home always shows. */
export function sentenceOf(world, { level, text, action } = healthOf(world), nowS = world.nowS()) {
  if (action || !world.connected) return text || "Connecting to the server.";
  const there = world.actors.filter((row) => row.state !== "gone"), well = there.filter((row) => !troubleOf(row, nowS));
  const lost = lossOf(world);
  if (level === "bad") return [`Outage${since(world, "outage", nowS)}:`, text, works(world, well.length), lost].filter(Boolean).join(" ");
  if (world.held) return `${text} ${lost}`.trim();
  if (level === "warn") return `Requests are answered. ${text} ${lost}`.trim();
  if (!well.length) return "";
  const sinceS = Math.max(...well.map((row) => row.started_s ?? 0), ...world.incidents.map((each) => each.at_s));
  const who = well.length === 1 ? "the actor works" : `all ${count(well.length)} actors work`;
  const time = sinceS > 0 ? `, for ${age(nowS - sinceS)}` : "";
  return `Requests are answered: ${who}${time}. ${lost}`.trim();
}

function since(world, what, nowS) {
  const found = world.incidents.find((each) => each.what === what);
  return found ? ` for ${age(nowS - found.at_s)}` : "";
}

function works({ missing }, number) {
  if (missing.includes("bus")) return "";
  return number === 1 ? "The other actor works." : number ? `The other ${count(number)} actors work.` : "";
}

/** What has become of requests lately, if that is known. */
function lossOf({ failures, missing }) {
  if (!failures || missing.includes("bus")) return "";
  const time = `in the last ${age(failures.over_s)}`;
  if (!failures.server) return `No request was lost ${time}.`;
  return `${count(failures.server)} ${failures.server === 1 ? "request" : "requests"} got an error of the server (5xx) ${time}.`;
}

/** What is wrong with an actor, if anything: { kind, text, sinceS }. */
function troubleOf(row, nowS) {
  const progress = row.progress === null || row.progress === undefined ? "" : ` (${row.phase ?? row.state} ${percent(row.progress)})`;
  const trouble = (text, sinceS = null) => ({ kind: row.kind, text: `${row.name} ${text}`, sinceS });
  if (row.lost_s) {
    const ended = `${row.drained ? "ended" : "died"} ${age(nowS - row.lost_s)} ago`;
    return trouble(row.state === "gone" ? ended : `${ended}, restarting${progress}`, row.state === "gone" ? row.lost_s : null);
  }
  if (row.state.startsWith("stalled")) return trouble(`does not get on with its steps (${row.state})`);
  if (row.state === "draining") return trouble("is draining");
  return ["starting", "loading"].includes(row.state) ? trouble(`is starting${progress}`) : null;
}

function sentence(troubles) {
  return `${troubles.map((each) => each.text).join("; ")}.`;
}

function outage(world, missing, troubles) {
  const about = troubles.filter((each) => missing.includes(each.kind));
  const unsaid = missing.filter((kind) => !about.some((each) => each.kind === kind));
  const waiting = world.requests.size;
  const after = waiting ? `${count(waiting)} request${waiting === 1 ? " waits and goes" : "s wait and go"} on with the same tokens.` : "New requests are told to come again (503).";
  return [about.length && sentence(about), ...unsaid.map((kind) => WITHOUT[kind] ?? `There is no ${kind}.`), after].filter(Boolean).join(" ");
}
