// Which executor is looked at: the only one, or a choice among several.

import { fill, segmented } from "../dom.js";

/** Calls `show(name)` when the choice changes; keeps the buttons in `place`. */
export function chooseReplica(world, place, show, signal) {
  let names = "", current = null;
  const update = () => {
    const all = [...world.shownReplicas().keys()].sort();
    if (all.join() === names && (current || !all.length)) return;
    names = all.join();
    if (!all.includes(current)) {
      current = all[0] ?? null;
      show(current);
    }
    fill(place, all.length > 1 ? segmented("Executor", all.map((name) => [name, name]), current, (name) => {
      current = name;
      show(name);
    }) : null);
  };
  for (const change of ["state", "actors"]) world.on(change, update, signal);
  update();
}
