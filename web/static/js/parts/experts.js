// How evenly a model's experts are used: a bar for each layer that has some, as high as its busiest expert is loaded.

import { fill, h, say } from "../dom.js";

export function expertLoad() {
  const bars = h("div", { class: "experts", role: "img" }), most = h("span", {});
  return { element: h("div", { class: "meter", hidden: true }, h("span", {}, "Experts"), bars, most), bars, most };
}

/** `rows`: layer, tokens of the busiest expert over the mean, and how many experts got none; of an executor's last second or so. */
export function showExpertLoad({ element, bars, most }, rows) {
  element.hidden = !rows?.length;
  if (element.hidden || bars.dataset.rows === JSON.stringify(rows)) return;
  bars.dataset.rows = JSON.stringify(rows);
  const [layer, highest] = rows.reduce((one, other) => (other[1] > one[1] ? other : one));
  const full = Math.max(2, highest);
  fill(bars, rows.map(([place, load, unused]) => h("b", { style: { height: `${(100 * load) / full}%` },
    title: `Layer ${place}: the busiest expert has ${load.toFixed(1)} times the mean; ${unused} had no token` })));
  say(most, `≤ ${highest.toFixed(1)} × mean`);
  bars.setAttribute("aria-label", `Load of experts by layer: at most ${highest.toFixed(1)} times the mean, in layer ${layer}`);
}
