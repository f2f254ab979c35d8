// The tokens of an answer: the less likely one was, the warmer its ground; what else it could have been on pointing.

import { h } from "../dom.js";
import { hideTip, showTip } from "../parts/tip.js";

/** 0 for a token that was certain, 1 for one with odds of 1 to 1000 or less. */
function doubt(logprob) {
  return Math.min(1, Math.max(0, -logprob / Math.log(1000)));
}

function visible(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

export function tokenView(tokens) {
  return h("div", { class: "tokens", role: "group", "aria-label": "Tokens with their odds" }, tokens.map((token) => {
    const show = (event) => {
      const box = event.currentTarget.getBoundingClientRect();
      showTip(box.left, box.bottom - 8, h("h3", {}, percentOf(token.logprob), " for this one"), odds(token));
    };
    const label = `${visible(token.text)}, ${percentOf(token.logprob)}`;
    return h("button", { type: "button", style: { "--doubt": doubt(token.logprob).toFixed(3) }, "aria-label": label,
      onpointerenter: show, onfocus: show, onpointerleave: hideTip, onblur: hideTip }, token.text);
  }));
}

function odds({ text, top }) {
  return h("div", { class: "odds" }, top.map(([other, logprob]) => [
    other === text ? h("b", {}, h("code", {}, visible(other))) : h("code", {}, visible(other)),
    h("i", {}, h("b", { style: { display: "block", width: `${(Math.exp(logprob) * 100).toFixed(1)}%` } })),
    h("span", { class: "num" }, percentOf(logprob)),
  ]));
}

function percentOf(logprob) {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100%" : share >= 0.1 ? `${share.toFixed(1)}%` : "<0.1%";
}
