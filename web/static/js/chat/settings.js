// The settings of an answer: a field of the API each. Empty fields are not sent, so the server's defaults hold.

import { fill, h, segmented } from "../dom.js";

const STORE = "pagebus.settings";
const number = (name, text, min, max, step, hint = "default") => ({ name, text, min, max, step, hint });

const MAIN = [
  number("temperature", "Temperature", 0, 2, 0.05), number("max_tokens", "Most tokens", 1, 1e6, 1),
  number("top_p", "Top p", 0.01, 1, 0.01), number("top_k", "Top k", -1, 1e6, 1, "all"),
  number("n", "Choices", 1, 8, 1, "1"), number("seed", "Seed", -(2 ** 53), 2 ** 53, 1, "by request"),
];
const MORE = [
  number("min_p", "Min p", 0, 1, 0.01), number("min_tokens", "Least tokens", 0, 1e6, 1),
  number("presence_penalty", "Presence penalty", -2, 2, 0.1), number("frequency_penalty", "Frequency penalty", -2, 2, 0.1),
  number("repetition_penalty", "Repetition penalty", 0.01, 10, 0.05), number("priority", "Priority", -1000, 1000, 1, "0"),
  number("timeout", "Timeout, s", 0.1, 86400, 0.1, "none"), number("truncate_prompt_tokens", "Truncate prompt", -1, 1e6, 1, "no"),
  number("length_penalty", "Length penalty", -10, 10, 0.1, "of beams"),
];
const FLAGS = [["ignore_eos", "Go on after the end token"], ["include_stop_str_in_output", "Show the stop text"],
  ["skip_special_tokens", "Show special tokens", false], ["spaces_between_special_tokens", "No spaces between these", false],
  ["use_beam_search", "Beam search, as wide as choices"]];
const LINES = [["stop", "Stop texts, one a line"], ["bad_words", "Words never to be said, one a line"]];
const IDS = [["stop_token_ids", "Stop tokens (ids)"], ["allowed_token_ids", "Only these tokens (ids)"]];
const BIAS = ["logit_bias", "Bias of tokens by their ids (JSON object)", '{"42": -100}'];
const JSONS = [
  ["json_schema", "Answer as JSON that fits this schema", '{"type": "object", "properties": {...}}'],
  ["tools", "Tools (JSON array)", '[{"type": "function", "function": {...}}]'],
  ["other", "Other fields of the API (JSON object)", '{"tool_choice": "required"}'],
];

/** The body's fields for what was put in. Raises SyntaxError or TypeError with the name of a wrong JSON text. */
export function toFields(values) {
  const fields = {};
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
  constructor({ system, onsystem, onchange }) {
    const stored = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    this.values = [stored.values?.[0] ?? {}, stored.values?.[1] ?? {}];
    this.compare = stored.compare ?? false;
    this.side = 0;
    this.onchange = onchange;
    this.body = h("div", { class: "card" });
    const area = h("textarea", { rows: "3", placeholder: "You are a helpful assistant.", value: system, oninput: () => onsystem(area.value) });
    this.element = h("div", { class: "settings" }, h("section", { class: "card", "aria-label": "System prompt" },
      h("label", { class: "field" }, h("span", {}, "System prompt"), area)), this.body);
    this.#render();
  }

  /** What each side is asked with: [{ label, fields }]. */
  sides() {
    const used = this.compare ? ["A", "B"] : [""];
    return used.map((label, index) => ({ label, fields: toFields(this.values[index]) }));
  }

  #changed() {
    localStorage.setItem(STORE, JSON.stringify({ values: this.values, compare: this.compare }));
    this.onchange();
  }

  #set(name, value) {
    this.values[this.side][name] = value;
    this.#changed();
  }

  #render() {
    const values = this.values[this.side];
    const compare = h("label", { class: "check" }, h("input", { type: "checkbox", checked: this.compare, onchange: (event) => {
      this.compare = event.target.checked;
      this.side = 0;
      this.#changed();
      this.#render();
    } }), "Compare two settings");
    fill(this.body, h("h2", {}, "Settings"), compare,
      this.compare && segmented("Settings of", [[0, "Side A"], [1, "Side B"]], this.side, (side) => { this.side = side; this.#render(); }),
      this.#grid(MAIN, values),
      this.#flag("tokens", "Show tokens and their odds", values),
      this.#details("More sampling", [this.#grid(MORE, values),
        LINES.map(([name, text]) => this.#text(name, text, "", values, 2)),
        IDS.map(([name, text]) => this.#text(name, text, "3, 17", values, 1)),
        this.#text(...BIAS, values, 2, true), FLAGS.map(([name, text]) => this.#flag(name, text, values))]),
      this.#details("Structure and tools", JSONS.map(([name, text, hint]) => this.#text(name, text, hint, values, 4, true))),
      h("button", { class: "button small", type: "button", onclick: () => { this.values[this.side] = {}; this.#changed(); this.#render(); } }, "Back to defaults"));
  }

  #details(title, content) {
    const open = this.opened?.has(title);
    this.opened ??= new Set();
    return h("details", { open, ontoggle: (event) => (event.target.open ? this.opened.add(title) : this.opened.delete(title)) },
      h("summary", {}, title), h("div", {}, content));
  }

  #grid(fields, values) {
    return h("div", { class: "pair" }, fields.map(({ name, text, min, max, step, hint }) => h("label", { class: "field" }, h("span", {}, text),
      h("input", { type: "number", name, min, max, step, placeholder: hint, value: values[name] ?? "",
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

function isValid(text) {
  try {
    return !text.trim() || Boolean(JSON.parse(text));
  } catch {
    return false;
  }
}
