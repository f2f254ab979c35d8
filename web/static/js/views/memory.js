// Who holds which block of the key-value cache.

import { fill, h } from "../dom.js";
import { count, percent, short } from "../format.js";
import { Figures } from "../parts/figures.js";
import { Memory } from "../parts/memory.js";
import { showFollowed } from "../parts/following.js";
import { chooseReplica } from "../parts/replicas.js";

const NAMES = ["Running", "Waiting", "Cache in use", "Prefix hits", "Preemptions", "Parked", "Swapped out / in", "Pulled / lent"];

export function memoryView({ world, view, tools, signal }) {
  const figures = new Figures(NAMES);
  const place = h("div", { class: "view" });
  const choice = h("div", {});
  const followed = h("div", {});
  tools.append(followed, choice);
  showFollowed(world, followed, signal);
  view.append(figures.element, place);
  let closing = null, name = null;
  const update = () => {
    const replica = world.shownReplicas().get(name);
    figures.element.classList.toggle("stale", Boolean(replica?.lostS));
    if (!replica) return;
    figures.set("Running", count(replica.num_running), `of ${count(replica.num_slots)} slots${replica.role ? `, ${replica.role}` : ""}`);
    figures.set("Waiting", count(world.numWaiting));
    const given = replica.given_back_blocks;
    figures.set("Cache in use", percent(1 - replica.num_free / replica.num_blocks), given ? `${short(given)} blocks fell behind the window` : "");
    figures.set("Prefix hits", replica.prefix_queries ? percent(replica.prefix_hits / replica.prefix_queries) : "–");
    figures.set("Preemptions", count(replica.num_swaps + replica.num_recomputes + (replica.num_departures ?? 0)));
    figures.set("Parked", count(replica.num_parked ?? 0), "client left");
    figures.set("Swapped out / in", `${short(replica.swapped_out_blocks)} / ${short(replica.swapped_in_blocks)}`);
    figures.show("Pulled / lent", world.shownReplicas().size > 1 || replica.pulled_blocks > 0);
    figures.set("Pulled / lent", `${short(replica.pulled_blocks)} / ${short(replica.lent_blocks)}`);
  };
  chooseReplica(world, choice, (chosen) => {
    closing?.abort();
    closing = new AbortController();
    signal.addEventListener("abort", () => closing.abort());
    name = chosen;
    fill(place, chosen ? new Memory({ world, name, signal: closing.signal }).element
      : h("div", { class: "card empty" }, h("h2", {}, "There is no executor yet"), h("p", {}, "Its blocks are shown as soon as it has joined.")));
    update();
  }, signal);
  world.on("state", update, signal);
}
