// One turn of the talk on the screen.

import { fill, h, say } from "../dom.js";
import { count, span } from "../format.js";
import { markdown } from "./markdown.js";
import { tokenView } from "./tokens.js";

const ENDS = { length: "cut at the most tokens", tool_calls: "wants a tool", content_filter: "filtered" };

/** The answer of one side: all its choices, brought up to date at most once a frame. */
export class Answer {
  constructor(side, { running, actions }) {
    Object.assign(this, { side, running });
    this.showsTokens = false;
    this.choices = h("div", { class: "answers single" });
    this.facts = h("span", { class: "num" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.tokens = h("button", { class: "button small ghost", type: "button", "aria-pressed": "false", hidden: true, onclick: () => {
      this.showsTokens = !this.showsTokens;
      this.tokens.setAttribute("aria-pressed", String(this.showsTokens));
      this.shown = [];
      this.#draw();
    } }, "Tokens");
    this.element = h("article", { class: "answer", "aria-label": side.label ? `Answer ${side.label}` : "Answer" },
      side.label && h("span", { class: "chip" }, `Side ${side.label}`), this.choices, this.error,
      h("footer", {}, this.facts, this.tokens, actions(this)));
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
    choices.forEach((choice, index) => {
      const place = this.choices.children[index] ?? this.choices.appendChild(h("div", { class: choices.length > 1 ? "answer" : "" }));
      const text = choice ? `${choice.text}${choice.reasoning}${JSON.stringify(choice.calls)}${choice.finish}${choice.tokens.length}` : "";
      if (this.shown[index] === text) return;
      this.shown[index] = text;
      fill(place, choice && this.#choice(choice, index, choices.length), !choice && h("div", { class: "prose" }));
    });
    while (this.choices.children.length > choices.length) this.choices.lastChild.remove();
    this.error.hidden = !side.error;
    say(this.error, side.error ?? "");
    this.tokens.hidden = !side.choices.some((choice) => choice?.tokens.length);
    say(this.facts, this.#facts());
  }

  #choice(choice, index, total) {
    const body = this.showsTokens && choice.tokens.length ? tokenView(choice.tokens) : h("div", { class: "prose" }, markdown(choice.text));
    return [
      total > 1 && h("span", { class: "small quiet" }, `Choice ${index + 1} of ${total}`),
      choice.reasoning && h("details", {}, h("summary", { class: "small quiet" }, "Reasoning"), h("div", { class: "prose" }, markdown(choice.reasoning))),
      body,
      choice.calls.filter(Boolean).map((call) => h("pre", { class: "card", tabindex: "0" }, `${call.name}(${call.arguments})`)),
      choice.finish && ENDS[choice.finish] && h("span", { class: "chip warn" }, ENDS[choice.finish]),
    ];
  }

  #facts() {
    const { side } = this, facts = [];
    if (this.running(side)) facts.push(side.firstMs ? "writing" : "waiting");
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
