// One turn of the talk on the screen.

import { copyBy } from "../clipboard.js";
import { fill, h, say } from "../dom.js";
import { count, span } from "../format.js";
import { jsonOf, structured } from "./json.js";
import { markdown } from "./markdown.js";
import { tokenView } from "./tokens.js";

const ENDS = { length: "Stopped at max tokens", tool_calls: "Tool call", content_filter: "Filtered" };
const SHORT_CALL = 60;

/** The answer of one side: all its choices, brought up to date at most once a frame. `running(side)`; `paused()` is why
 * nothing is written at present, or ""; `follow(side)`; `actions(answer)` are more buttons. */
export class Answer {
  constructor(side, { running, paused, follow, actions }) {
    Object.assign(this, { side, running, paused });
    this.showsTokens = Boolean(side.body.logprobs);
    this.choices = h("div", { class: "answers single" });
    this.facts = h("span", { class: "num" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.tokens = h("button", { class: "button small ghost", type: "button", "aria-pressed": String(this.showsTokens), hidden: true, onclick: () => {
      this.showsTokens = !this.showsTokens;
      this.tokens.setAttribute("aria-pressed", String(this.showsTokens));
      this.shown = [];
      this.#draw();
    } }, "Tokens");
    this.copy = copyButton(() => this.side.choices[0]);
    this.follow = h("button", { class: "button small ghost", type: "button", onclick: () => follow(side) }, "Follow");
    const name = side.label ? `${side.label}${side.name ? ` · ${side.name}` : ""}` : side.body.model;
    this.element = h("article", { class: "answer", "aria-label": side.label ? `Answer ${side.label}` : "Answer" },
      name && h("span", { class: "chip side", title: name }, h("span", { class: "clip" }, name)), this.choices, this.error,
      h("footer", {}, this.facts, this.tokens, this.copy, actions(this), this.follow));
    this.shown = [];
    this.#draw();
  }

  update() {
    this.waiting ??= requestAnimationFrame(() => { this.waiting = null; this.#draw(); });
  }

  #draw() {
    const { side } = this;
    const isRunning = this.running(side);
    this.element.classList.toggle("running", isRunning);
    this.element.setAttribute("aria-busy", String(isRunning));
    const choices = side.choices.length ? side.choices : [null];
    this.choices.classList.toggle("single", choices.length === 1);
    choices.forEach((choice, index) => this.#drawChoice(choice, index, choices.length));
    while (this.choices.children.length > choices.length) this.choices.lastChild.remove();
    this.error.hidden = !side.error;
    say(this.error, side.error ?? "");
    this.tokens.hidden = !side.choices.some((choice) => choice?.tokens.length);
    this.copy.hidden = choices.length > 1 || !choices[0]?.text;
    this.follow.hidden = !side.id || side.status === "failed";
    say(this.facts, this.#facts());
  }

  #drawChoice(choice, index, total) {
    const place = this.choices.children[index] ?? this.choices.appendChild(h("div", {}));
    place.className = total > 1 ? "answer" : "";
    const text = choice ? `${choice.text}${choice.reasoning}${JSON.stringify(choice.calls)}${choice.finish}${choice.tokens.length} ${total}` : "";
    if (this.shown[index] === text) return;
    this.shown[index] = text;
    fill(place, choice && this.#choice(choice, index, total), !choice && h("div", { class: "prose" }));
  }

  #choice(choice, index, total) {
    return [
      total > 1 && h("header", { class: "choice-head" }, h("span", { class: "small quiet" }, `Choice ${index + 1} of ${total}`), copyButton(() => choice)),
      choice.reasoning && h("details", {}, h("summary", { class: "small quiet" }, "Reasoning"), h("div", { class: "prose" }, markdown(choice.reasoning))),
      this.#body(choice),
      choice.calls.filter(Boolean).map((call) => h("pre", { class: "call", tabindex: "0" }, callText(call))),
      choice.finish && ENDS[choice.finish] && h("span", { class: "chip warn" }, ENDS[choice.finish]),
    ];
  }

  #body(choice) {
    if (this.showsTokens && choice.tokens.length) return tokenView(choice.tokens);
    const json = jsonOf(choice.text, this.side.body);
    if (json !== null) return h("div", { class: "prose" }, h("pre", { tabindex: "0" }, h("code", {}, json)));
    if (structured(this.side.body) && /^\s*[[{]/.test(choice.text)) return h("div", { class: "prose" }, h("pre", {}, h("code", {}, choice.text)));
    return h("div", { class: "prose" }, markdown(choice.text));
  }

  #facts() {
    const { side } = this, facts = [];
    if (this.running(side)) facts.push(this.paused() ? `paused: ${this.paused()}` : side.firstMs ? "writing" : "waiting");
    else if (side.status === "stopped") facts.push("stopped");
    if (side.usage) facts.push(`${count(side.usage.completion_tokens)} tokens`);
    if (side.firstMs) facts.push(`first after ${span((side.firstMs - side.startedMs) / 1000)}`);
    if (side.endedMs && side.usage && side.firstMs && side.endedMs > side.firstMs) {
      facts.push(`${(side.usage.completion_tokens / ((side.endedMs - side.firstMs) / 1000)).toFixed(0)} tokens/s`);
    }
    const cached = side.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) facts.push(`${count(cached)} of ${count(side.usage.prompt_tokens)} prompt tokens cached`);
    return facts.join(" · ");
  }
}

function copyButton(choiceOf) {
  const button = h("button", { class: "button small ghost", type: "button", onclick: () => copyBy(button, choiceOf()?.text ?? "") }, "Copy");
  return button;
}

/** A call as it would be written; long arguments over several lines. */
function callText({ name, arguments: text }) {
  const line = `${name}(${text})`;
  if (line.length <= SHORT_CALL) return line;
  try {
    return `${name}(${JSON.stringify(JSON.parse(text), null, 2)})`;
  } catch {
    return line;
  }
}
