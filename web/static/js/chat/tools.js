// Results of the tools that an answer called: put in by hand, they go back to the model.

import { h } from "../dom.js";
import { callId } from "./talk.js";

/** A form with a field for each call of the side that the talk goes on from; null if it called none. */
export function resultsForm(turn, send) {
  const side = turn.sides[turn.pick ?? 0] ?? turn.sides[0];
  const calls = (side.choices[0]?.calls ?? []).filter(Boolean);
  if (!calls.length) return null;
  const areas = calls.map((call) => h("textarea", { rows: "2", placeholder: '{"answer": 42}', spellcheck: "false", class: "mono", "aria-label": `Result of ${call.name}` }));
  return h("form", { class: "results", onsubmit: (event) => {
    event.preventDefault();
    send(calls.map((call, index) => ({ id: callId(call, index), name: call.name, content: areas[index].value })));
  } },
  calls.map((call, index) => h("label", { class: "field" }, h("span", {}, `Result of ${call.name}`), areas[index])),
  h("div", {}, h("button", { class: "button small primary" }, calls.length > 1 ? "Send the results" : "Send the result")));
}
