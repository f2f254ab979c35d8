// One small panel that follows the pointer, or stands beside what has the focus.

import { fill, h } from "../dom.js";

const tip = h("div", { class: "tip", role: "tooltip", id: "tip", hidden: true });

export function showTip(x, y, ...content) {
  if (!tip.isConnected) document.body.append(tip);
  fill(tip, content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width < innerWidth - 8 ? x + 14 : Math.max(8, x - width - 14);
  const top = y + 14 + height < innerHeight - 8 ? y + 14 : Math.max(8, y - height - 14);
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${top}px`);
}

export function hideTip() {
  tip.hidden = true;
}

/** Term and value, alternating, as a list. */
export function pairs(entries, className = "pairs") {
  return h("dl", { class: className }, entries.filter(([, value]) => value !== null && value !== undefined)
    .map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]));
}
