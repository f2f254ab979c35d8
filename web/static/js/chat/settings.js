// The settings of an answer: a field of the API each. Empty fields are not sent, so the server's defaults hold.

import { fill, h, say, segmented } from "../dom.js";
import { count } from "../format.js";

const STORE = "pagebus.settings";
const number = (name, text, min, max, step, standard) => ({ name, text, min, max, step, standard });

const MAIN = [
  number("temperature", "Temperature", 0, 2, 0.05, "1.0"), number("max_tokens", "Max tokens", 1, 1e6, 1),
  number("top_p", "Top p", 0.01, 1, 0.01, "1.0"), number("top_k", "Top k", -1, 1e6, 1, "all"),
  number("n", "Choices", 1, 8, 1, "1"), number("seed", "Seed", -(2 ** 53), 2 ** 53, 1, "by request"),
];
const MORE = [
  number("min_p", "Min p", 0, 1, 0.01, "0"), number("min_tokens", "Min tokens", 0, 1e6, 1, "0"),
  number("presence_penalty", "Presence penalty", -2, 2, 0.1, "0"), number("frequency_penalty", "Frequency penalty", -2, 2, 0.1, "0"),
  number("repetition_penalty", "Repetition penalty", 0.01, 10, 0.05, "1.0"), number("priority", "Priority", -1000, 1000, 1, "0"),
  number("timeout", "Timeout, s", 0.1, 86400, 0.1, "none"), number("truncate_prompt_tokens", "Truncate prompt", -1, 1e6, 1, "no"),
  number("length_penalty", "Length penalty", -10, 10, 0.1, "1.0 (beams)"),
];
const MODELS = new Set(["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"]); // a model may have its own
const FLAGS = [["ignore_eos", "Go on after the end token"], ["include_stop_str_in_output", "Show the stop text"],
  ["skip_special_tokens", "Show special tokens", false], ["spaces_between_special_tokens", "No spaces between these", false],
  ["use_beam_search", "Beam search, as wide as choices"]];
const LINES = [["stop", "Stop texts, one a line"], ["bad_words", "Banned words, one a line"]];
const IDS = [["stop_token_ids", "Stop tokens (ids)"], ["allowed_token_ids", "Only these tokens (ids)"]];
const BIAS = ["logit_bias", "Bias of tokens by their ids (JSON object)", '{"42": -100}'];
const JSONS = [
  ["json_schema", "Answer as JSON that fits this schema", '{"type": "object", "properties": {...}}'],
  ["tools", "Tools (JSON array)", '[{"type": "function", "function": {...}}]'],
  ["other", "Other fields of the API (JSON object)", '{"tool_choice": "required"}'],
];

/** The body's fields for what was put in. Raises SyntaxError or TypeError with the name of a wrong JSON text. */
export function toFields(values) {
  const fields = values.model ? { model: values.model } : {};
  for (const { name } of [...MAIN, ...MORE]) {
    if (values[name] !== undefined && values[name] !== "") fields[name] = Number(values[name]);
  }
  for (const [name, , value = true] of FLAGS) if (values[name]) fields[name] = value;
  for (const [name] of LINES) {
    const lines = (values[name] ?? "").split("\n").filter((line) => line !== "");
    if (lines.length) fields[name] = lines;
  }
  for (const [name, text] of IDS) {
    const ids = (values[name] ?? "").split(/[\s,]+/).filter((id) => id !== "");
    const wrong = ids.find((id) => !/^\d+$/.test(id));
    if (wrong) throw new SyntaxError(`${text}: ${wrong} is no number`);
    if (ids.length) fields[name] = ids.map(Number);
  }
  const bias = parsed(values, "logit_bias");
  if (bias) fields.logit_bias = bias;
  if (values.tokens) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  const schema = parsed(values, "json_schema");
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  const tools = parsed(values, "tools");
  if (tools) fields.tools = tools;
  return { ...fields, ...parsed(values, "other") };
}

function parsed(values, name) {
  const text = (values[name] ?? "").trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${[BIAS, ...JSONS].find(([each]) => each === name)[1]}: ${error.message}`);
  }
}

export class Settings {
  /** `facts()` is what is known of the server: its model's defaults. */
  constructor({ system, onsystem, onchange, facts = () => ({}) }) {
    const stored = readStored();
    this.facts = facts;
    this.values = [stored.values?.[0] ?? {}, stored.values?.[1] ?? {}];
    this.compare = stored.compare ?? false;
    this.side = 0;
    this.onchange = onchange;
    this.body = h("div", { class: "card" });
    this.badges = [];
    this.models = { served: "", adapters: null }; // not known yet
    const select = this.select = h("select", { name: "model", onchange: () => { this.#set("model", select.value); this.#entitle(); } });
    this.model = h("label", { class: "field", hidden: true }, h("span", {}, "Model"), select);
    const area = this.system = h("textarea", { rows: "3", placeholder: "You are a helpful assistant.", value: system, oninput: () => onsystem(area.value) });
    this.element = h("div", { class: "settings" }, h("section", { class: "card", "aria-label": "System prompt" },
      h("label", { class: "field" }, h("span", {}, "System prompt"), area)), this.body);
    this.#render();
  }

  /** What each side is asked with: [{ label, fields }]. */
  sides() {
    const used = this.compare ? ["A", "B"] : [""];
    const all = used.map((_, index) => toFields(this.values[index]));
    return used.map((label, index) => ({ label, name: this.compare ? difference(all[index], all[1 - index]) : "", fields: all[index] }));
  }

  /** Offer the served model and these adapters. A choice that is gone falls back to the served model; returns what to
   * say about it, or "". */
  showModels(served, adapters) {
    const isSame = JSON.stringify(this.models) === JSON.stringify({ served, adapters });
    this.models = { served, adapters };
    const gone = this.values.filter(({ model }) => model && !adapters.includes(model));
    const names = new Set(gone.filter((values) => this.compare || values === this.values[0]).map(({ model }) => short(model)));
    for (const values of gone) delete values.model;
    if (gone.length) this.#changed();
    if (!isSame) this.#offer(); // a list that somebody has opened stays open
    return names.size ? `Unloaded: ${[...names].map((name) => `'${name}'`).join(", ")}. The model itself answers now.` : "";
  }

  /** Fill the list in, with what this side has chosen; it comes with the first adapter. */
  #offer() {
    const { served, adapters } = this.models, chosen = this.values[this.side].model ?? "";
    const names = adapters ?? (chosen ? [chosen] : []);
    fill(this.select, h("option", { value: "" }, served || this.facts().model || "default"), names.map((name) => h("option", { value: name }, name)));
    this.select.value = chosen;
    this.#entitle();
    if (names.length) this.model.hidden = false;
  }

  /** The whole name of what is chosen is on the tip: there is no room for a long one. */
  #entitle() {
    this.select.title = this.select.value;
  }

  #changed() {
    localStorage.setItem(STORE, JSON.stringify({ values: this.values, compare: this.compare }));
    this.onchange();
  }

  #set(name, value) {
    this.values[this.side][name] = value;
    this.#changed();
    this.#count();
  }

  /** What holds where nothing is put in: the model's own, the API's, or, as long as nobody said, "default". */
  showDefaults() {
    const { defaults, max_model_len: longest } = this.facts();
    for (const { name, standard } of [...MAIN, ...MORE]) {
      const input = this.body.querySelector(`input[name=${name}]`);
      const own = defaults?.[name], shown = typeof own === "number" && Number.isInteger(own) && standard?.includes(".") ? own.toFixed(1) : own;
      const known = own !== undefined ? `${shown} (model)` : name === "max_tokens" && longest ? `to ${count(longest)} in all` : standard;
      input.placeholder = defaults || !MODELS.has(name) ? (known ?? "default") : "default";
    }
  }

  /** How many settings of each closed section are in force: they are so across visits. */
  #count() {
    const values = this.values[this.side];
    for (const { badge, names } of this.badges) {
      const changed = names.filter((name) => values[name] !== undefined && values[name] !== "" && values[name] !== false).length;
      badge.hidden = !changed;
      say(badge, `${changed} changed`);
    }
  }

  #render() {
    const values = this.values[this.side];
    this.badges = [];
    const compare = h("label", { class: "check" }, h("input", { type: "checkbox", checked: this.compare, onchange: (event) => {
      this.compare = event.target.checked;
      this.side = 0;
      this.#changed();
      this.#render();
    } }), "Compare two settings");
    fill(this.body, h("h2", {}, "Settings"), compare,
      this.compare && segmented("Settings of", [[0, "Side A"], [1, "Side B"]], this.side, (side) => { this.side = side; this.#render(); }),
      this.model, this.#grid(MAIN, values),
      this.#flag("tokens", "Show tokens and their odds", values),
      this.#details("More sampling", [...MORE, ...LINES, ...IDS, BIAS, ...FLAGS].map((each) => each.name ?? each[0]), [this.#grid(MORE, values),
        LINES.map(([name, text]) => this.#text(name, text, "", values, 2)),
        IDS.map(([name, text]) => this.#text(name, text, "3, 17", values, 1)),
        this.#text(...BIAS, values, 2, true), FLAGS.map(([name, text]) => this.#flag(name, text, values))]),
      this.#details("Structure and tools", JSONS.map(([name]) => name), JSONS.map(([name, text, hint]) => this.#text(name, text, hint, values, 4, true))),
      h("button", { class: "button small", type: "button", onclick: () => { this.values[this.side] = {}; this.#changed(); this.#render(); } }, "Back to defaults"));
    this.#offer();
    this.showDefaults();
    this.#count();
  }

  #details(title, names, content) {
    const open = this.opened?.has(title);
    this.opened ??= new Set();
    const badge = h("span", { class: "chip", hidden: true });
    this.badges.push({ badge, names });
    return h("details", { open, ontoggle: (event) => (event.target.open ? this.opened.add(title) : this.opened.delete(title)) },
      h("summary", {}, title, badge), h("div", {}, content));
  }

  #grid(fields, values) {
    return h("div", { class: "pair" }, fields.map(({ name, text, min, max, step }) => h("label", { class: "field" }, h("span", {}, text),
      h("input", { type: "number", name, min, max, step, value: values[name] ?? "",
        oninput: (event) => this.#set(name, event.target.value) }))));
  }

  #flag(name, text, values) {
    return h("label", { class: "check" }, h("input", { type: "checkbox", name, checked: values[name] ?? false,
      onchange: (event) => this.#set(name, event.target.checked) }), text);
  }

  #text(name, text, hint, values, rows, isJson = false) {
    return h("label", { class: "field" }, h("span", {}, text), h("textarea", { name, rows, placeholder: hint, spellcheck: "false",
      class: isJson ? "mono" : "", value: values[name] ?? "", oninput: (event) => {
        this.#set(name, event.target.value);
        if (isJson) event.target.setAttribute("aria-invalid", String(!isValid(event.target.value)));
      } }));
  }
}

function readStored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

/** In what the settings of one side are others than those of the other, in a few words. */
function difference(mine, other) {
  const names = [...new Set([...Object.keys(mine), ...Object.keys(other)])].filter((name) => JSON.stringify(mine[name]) !== JSON.stringify(other[name]));
  const shown = names.slice(0, 2).map((name) => `${name.replaceAll("_", " ")} ${mine[name] === undefined ? "default" : short(mine[name])}`);
  return names.length ? shown.join(", ") + (names.length > 2 ? ` and ${names.length - 2} more` : "") : "same settings";
}

function short(value) {
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return text.length > 24 ? `${text.slice(0, 23)}…` : text;
}

function isValid(text) {
  try {
    return !text.trim() || Boolean(JSON.parse(text));
  } catch {
    return false;
  }
}
