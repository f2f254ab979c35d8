// The models that can be chosen: the served one and its adapters, which are loaded and unloaded at any time.

import { getJson } from "../api.js";

const LOOK_MS = 5000;

/** Call `show(served, adapters)` with their names, now and every few seconds, until the signal is aborted. Any key may
 * ask for them, so they are asked for: the feed is for operators alone. */
export function followModels({ world, show, signal }) {
  let timer = null, began = false;
  const begin = () => { // once it is known whether this server has adapters; who may not know asks
    if (began || !(world.hello.model || world.access === "forbidden")) return;
    began = true;
    look();
  };
  async function look() {
    const models = await namesOf(world, signal).catch(() => null); // the banner says what is wrong
    if (signal.aborted) return;
    if (models) show(...models);
    timer = setTimeout(look, LOOK_MS);
  }
  for (const change of ["status", "health"]) world.on(change, begin, signal);
  signal.addEventListener("abort", () => clearTimeout(timer));
  begin();
}

/** [served, adapters], or null: they are not asked for at present. */
async function namesOf(world, signal) {
  if (world.hello.takes_adapters === false) return [world.hello.model, []];
  if (document.hidden || !["ok", "forbidden"].includes(world.access)) return null;
  const { data } = await getJson("/v1/models", { signal });
  return [data.find(({ parent }) => !parent).id, data.filter(({ parent }) => parent).map(({ id }) => id)];
}
