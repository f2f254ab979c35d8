// Asks for the block tables of the request that is followed: the maps know the first owner of a block only, and what is
// shared is what there is to see.

import { getJson } from "./api.js";

const LEAST_MS = 200;

/** Keep `world.tables` as long as somebody is followed. */
export function keepTables(world) {
  let asking = false, seen = "";
  const look = async () => {
    const request = world.followed && world.requests.get(world.followed);
    const state = request ? `${request.id} ${request.sequences.map((each) => [each.id, each.replica, each.num_blocks, each.num_host_blocks])}` : "";
    if (asking || state === seen) return;
    seen = state;
    if (!request) return world.takeTables(null);
    asking = true;
    try {
      const { sequences } = await getJson(`/api/requests/${encodeURIComponent(request.id)}/blocks`);
      if (world.followed === request.id) world.takeTables(sequences);
    } catch { // the feed says what is wrong
    }
    setTimeout(() => { asking = false; look(); }, LEAST_MS);
  };
  world.on("state", look);
  world.on("follow", () => { seen = ""; look(); });
}
