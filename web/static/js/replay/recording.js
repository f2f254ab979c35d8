// What `pagebus record` wrote, as a world at any step: block tables are played forward, from a kept copy now and then.

import { CACHED, FLASH_MS, FLASH_PULLED, FREE, PINNED, Tier, World } from "../world.js";

const KEEP_EVERY = 200;

/** Lines of a file, with or without gzip. */
export async function readLines(blob) {
  const head = new Uint8Array(await blob.slice(0, 2).arrayBuffer());
  const zipped = head[0] === 0x1f && head[1] === 0x8b;
  const stream = zipped ? blob.stream().pipeThrough(new DecompressionStream("gzip")) : blob.stream();
  return (await new Response(stream).text()).split("\n").filter((line) => line.trim());
}

/** A recording. Raises Error if the lines are none. */
export class Recording {
  constructor(lines) {
    const rows = lines.map((line) => JSON.parse(line));
    const head = rows.find((row) => row.pagebus_trace);
    const steps = rows.filter((row) => "step" in row);
    if (!head || !steps.length) throw new Error("This is no recording of steps: make one with `pagebus record --out run.jsonl` or `pagebus simulate --record run.jsonl`.");
    this.blockSize = head.block_size;
    this.replicas = [...new Set(steps.map((row) => row.replica))];
    this.steps = steps.sort((a, b) => a.done_s - b.done_s);
    this.startS = Math.min(...this.steps.map((row) => row.planned_s));
    this.endS = this.steps.at(-1).done_s;
    this.numBlocks = head.num_blocks || 1 + this.steps.reduce((most, row) => Math.max(most, ...blocksOf(row), -1), -1);
    this.pulls = rows.filter((row) => "pull" in row).sort((a, b) => a.ordered_s - b.ordered_s);
    for (const pull of this.pulls) pull.lent = pull.hosts ? [] : pull.sources; // there is no map of host tiers
    if (!head.num_blocks) for (const { lent, blocks } of this.pulls) this.numBlocks = Math.max(this.numBlocks, 1 + Math.max(...lent, ...blocks));
    this.landings = Map.groupBy(this.pulls.filter((pull) => pull.there), (pull) => this.#firstDone(pull.ended_s));
    this.#findWaiting();
    this.requests = this.#requests();
    this.kept = new Map();
  }

  /** The number of the first step that was done at a time or after it. */
  #firstDone(atS) {
    const index = this.indexAt(atS);
    return index >= 0 && this.steps[index].done_s === atS ? index : index + 1;
  }

  /** Who waited for the blocks of each pull: `waiting`, ids of sequences that entered with some of them, and when. */
  #findWaiting() {
    const brought = new Map(), landed = this.pulls.filter((pull) => pull.there).sort((a, b) => a.ended_s - b.ended_s);
    for (const pull of this.pulls) pull.waiting = new Map();
    let next = 0;
    for (const row of this.steps) {
      for (; landed[next]?.ended_s <= row.planned_s; next++) for (const block of landed[next].blocks) brought.set(`${landed[next].replica} ${block}`, landed[next]);
      for (const [, id, computed, blocks] of row.entered ?? []) {
        const pulls = new Set(blocks.slice(0, computed / this.blockSize).map((block) => brought.get(`${row.replica} ${block}`)));
        for (const pull of pulls) if (pull && !pull.waiting.has(id)) pull.waiting.set(id, row.done_s);
      }
    }
  }

  /** Lives of sequences, from the slots they enter and leave. One that moves with its blocks is not preempted. */
  #requests() {
    const lives = new Map(), slots = new Map(), places = new Map();
    const moves = (row, id) => places.get(id) && !places.get(id).startsWith(`${row.replica} `) && this.pulls.some((pull) => pull.replica === row.replica && pull.waiting.has(id));
    const leave = (slot, atS) => {
      const life = lives.get(slots.get(slot));
      if (life) life.ended_s = life.over_s = atS;
      slots.delete(slot);
    };
    for (const row of this.steps) {
      for (const slot of row.freed ?? []) leave(`${row.replica} ${slot}`, row.planned_s);
      for (const [slot, id, computed, blocks] of row.entered ?? []) {
        const life = lives.get(id), place = `${row.replica} ${slot}`;
        if (life) Object.assign(life, { ended_s: null, over_s: null, num_preemptions: life.num_preemptions + !moves(row, id) });
        if (slots.get(places.get(id)) === id) slots.delete(places.get(id)); // where it was, this has not been said yet
        slots.set(place, id);
        places.set(id, place);
        if (!life) lives.set(id, { id: `sequence ${id & 0xfffff}`, sequences: [{ id }], arrived_s: row.planned_s, tokenized_s: row.planned_s,
          started_s: row.planned_s, first_token_s: row.done_s, ended_s: null, over_s: null, num_prompt: blocks.length * this.blockSize,
          num_cached: computed, num_output: null, num_preemptions: 0, endedState: "done", state: "decoding" });
      }
    }
    return [...lives.values()];
  }

  /** The number of the last of some steps that was done at a time; -1: none. */
  indexAt(atS, steps = this.steps) {
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle].done_s <= atS) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** Tables { replica: Map(slot -> [id, blocks]) } and blocks ever used, after step `index`. */
  #tables(index) {
    let from = Math.max(0, Math.floor(index / KEEP_EVERY) * KEEP_EVERY); // before the first step the index is -1
    while (from > 0 && !this.kept.has(from)) from -= KEEP_EVERY;
    const state = from > 0 ? copy(this.kept.get(from)) : Object.fromEntries(this.replicas.map((name) => [name, { slots: new Map(), used: new Set() }]));
    for (let i = from; i <= index; i++) {
      if (i % KEEP_EVERY === 0 && i > 0 && !this.kept.has(i)) this.kept.set(i, copy(state));
      for (const pull of this.landings.get(i) ?? []) for (const block of pull.blocks) state[pull.replica]?.used.add(block);
      apply(state, this.steps[i]);
    }
    return state;
  }

  /** Make a world look as it did at a time. */
  show(world, atS) {
    const index = this.indexAt(atS);
    const state = this.#tables(index);
    this.state = state;
    world.atS = atS;
    world.connected = true;
    for (const name of this.replicas) {
      const replica = world.replicas.get(name) ?? { name, device: new Tier(this.numBlocks), host: new Tier(0) };
      world.replicas.set(name, replica);
      draw(replica.device, state[name]);
      Object.assign(replica, { num_pinned: 0, pulled_blocks: 0, lent_blocks: 0 });
    }
    this.#showPulls(world, atS, this.steps[index]?.done_s ?? -Infinity);
    world.sequences = new Map(this.requests.map((request) => [request.sequences[0].id, { ...request.sequences[0], requestId: request.id, choice: 0 }]));
    world.requests = new Map();
    world.over = [];
    for (const request of this.requests) {
      if (request.arrived_s > atS) continue;
      if (request.over_s && request.over_s <= atS) world.over.push(request);
      else world.requests.set(request.id, { ...request, ended_s: null, over_s: null });
    }
    this.follow(world);
    world.tell("state");
  }

  /** Blocks on their way are held on both sides; those that have come are cached, and flash. The tables know of those
   * that had come by `knownS`. */
  #showPulls(world, atS, knownS) {
    const now = performance.now();
    for (const { device } of world.replicas.values()) for (const flash of device.flashes.values()) flash[1] = -Infinity;
    for (const pull of this.pulls) {
      if (pull.ordered_s > atS) break;
      const target = world.replicas.get(pull.replica), lender = world.replicas.get(pull.lender);
      if ((pull.ended_s ?? Infinity) > atS) {
        mark(lender, pull.lent, PINNED, pull.waiting, atS);
        mark(target, pull.blocks, PINNED, pull.waiting, atS);
      } else if (pull.there) {
        if (lender) lender.lent_blocks += pull.sources.length;
        if ([...pull.waiting.values()].some((enteredS) => enteredS > atS)) mark(lender, pull.lent, CACHED, pull.waiting, atS);
        if (!target) continue;
        target.pulled_blocks += pull.blocks.length;
        const ageMs = 1000 * (atS - pull.ended_s);
        for (const block of pull.ended_s > knownS || ageMs < FLASH_MS ? pull.blocks : []) {
          if (target.device.owners[block] === FREE) target.device.owners[block] = CACHED;
          if (ageMs < FLASH_MS) target.device.flashes.set(block, [FLASH_PULLED, now - ageMs]);
        }
      }
    }
  }

  /** The pulls from and to one replica. */
  pullsOf(replica) {
    return this.pulls.filter((pull) => pull.replica === replica || pull.lender === replica);
  }

  /** The block tables of who is followed. */
  follow(world) {
    const id = world.followed && this.requests.find((request) => request.id === world.followed)?.sequences[0].id;
    const tables = Object.entries(this.state).flatMap(([replica, { slots }]) =>
      [...slots.values()].filter(([owner]) => owner === id).map(([owner, blocks]) => ({ id: owner, replica, blocks, host_blocks: [] })));
    world.tables = id ? tables : null;
  }

  /** The steps of one replica, as the timeline wants them. */
  stepsOf(replica) {
    return this.shown.get(replica) ?? [];
  }

  world() {
    const world = new World();
    const ordered = Map.groupBy(this.pulls, (pull) => `${pull.replica} ${pull.ordered_s}`);
    this.shown = Map.groupBy(this.steps.map((row) => ({ ...row, pulls: ordered.get(`${row.replica} ${row.planned_s}`), prefill: row.prefill_tokens, wasted: 0, landed_s: row.done_s, busy_s: row.busy_s ?? 0 })), (row) => row.replica);
    world.clockGapS = null;
    return world;
  }
}

/** Blocks are copied, or have been, unless somebody has them. Who waits for the copies has them no more, though its
 * executor may not have been told yet. */
function mark(replica, blocks, what, waiting, atS) {
  if (!replica) return;
  const { owners } = replica.device;
  for (const block of blocks) if ((owners[block] <= 0 && what === PINNED) || waiting.get(owners[block]) > atS) owners[block] = what;
  if (what === PINNED) replica.num_pinned += blocks.length;
}

function blocksOf(row) {
  return [...(row.entered ?? []).flatMap((each) => each[3]), ...(row.appended ?? []).map((each) => each[1])];
}

function apply(state, row) {
  const { slots, used } = state[row.replica];
  for (const slot of row.freed ?? []) slots.delete(slot);
  for (const [slot, id, , blocks] of row.entered ?? []) {
    for (const [name, other] of Object.entries(state)) { // an executor that it has left may be told later, or never
      if (name !== row.replica) for (const [old, [owner]] of other.slots) if (owner === id) other.slots.delete(old);
    }
    slots.set(slot, [id, [...blocks]]);
  }
  for (const [slot, block] of row.appended ?? []) slots.get(slot)?.[1].push(block);
  for (const block of blocksOf(row)) used.add(block);
}

function copy(state) {
  return Object.fromEntries(Object.entries(state).map(([name, { slots, used }]) =>
    [name, { slots: new Map([...slots].map(([slot, [id, blocks]]) => [slot, [id, [...blocks]]])), used: new Set(used) }]));
}

function draw(tier, { slots, used }) {
  tier.owners.fill(FREE);
  tier.shares.fill(0);
  for (const block of used) tier.owners[block] = CACHED;
  for (const [id, blocks] of [...slots.values()].reverse()) {
    for (const block of blocks) {
      tier.owners[block] = id;
      tier.shares[block] = Math.min(255, tier.shares[block] + 1);
    }
  }
  tier.version++;
}
