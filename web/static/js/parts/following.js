// Who is followed, where its blocks are seen, and how to end that.

import { fill, h, say } from "../dom.js";
import { shortId } from "../format.js";

/** A chip "Following 9d05…" with a way out, kept in `place`; Escape is one, too. */
export function showFollowed(world, place, signal) {
  const text = h("span", {});
  const button = h("button", { class: "button following", type: "button", title: "Follow no longer (Esc)", onclick: () => world.follow(null) },
    text, h("span", { "aria-hidden": "true" }, "✕"));
  const update = () => {
    const id = world.followed;
    if (Boolean(id) !== button.isConnected) fill(place, id ? button : null);
    if (!id) return;
    say(text, `${world.requests.has(id) ? "Following" : "Over:"} ${shortId(id)}`);
    button.setAttribute("aria-label", `${text.textContent}. Follow no longer`);
  };
  for (const change of ["follow", "state"]) world.on(change, update, signal);
  addEventListener("keydown", (event) => {
    const busy = event.defaultPrevented || document.querySelector("dialog[open]") || event.target.matches("input, textarea, select");
    if (event.key === "Escape" && world.followed && !busy) world.follow(null);
  }, { signal });
  update();
}
