// A strip of figures: each a name and a number that is brought up to date.

import { h, say } from "../dom.js";

export class Figures {
  /** `names`: what is shown, in order. */
  constructor(names) {
    this.values = new Map(names.map((name) => [name, h("dd", {})]));
    this.element = h("dl", { class: "figures" }, [...this.values].map(([name, dd]) =>
      h("div", { class: "figure" }, h("dt", { title: name }, name), dd)));
  }

  set(name, text, extra = "") {
    const dd = this.values.get(name);
    dd.small ??= h("small", {});
    if (dd.shown === text + extra) return;
    dd.shown = text + extra;
    dd.replaceChildren(text, extra ? " " : "", extra ? dd.small : "");
    say(dd.small, extra);
  }

  /** Whether a figure is there at all. */
  show(name, there) {
    this.values.get(name).parentElement.hidden = !there;
  }

  /** A line below the figure, in a colour (good, bad) or none; "" takes it away. */
  note(name, text, kind = "") {
    const dd = this.values.get(name);
    if (text && !dd.below) dd.after(dd.below = h("dd", {}));
    if (!dd.below) return;
    say(dd.below, text);
    dd.below.className = `note ${kind}`;
    dd.below.hidden = !text;
  }
}
