// The deployment as far as it is known: filled by the live feed or by a replay, shown by the views.

export const FREE = 0, CACHED = -1, PINNED = -2, ADAPTER = -3;
export const FLASH_PULLED = 3, FLASH_MS = 900;
const KEPT_STEPS = 6000;
export const KEPT_OVER = 1000;
const KEPT_VITALS = 120;
const FRESH_S = 12; // figures are told again every 5 s
const OUTCOMES = ["", "done", "ended early"];
const STATES = ["waiting", "preempted in flight", "running"];

/** One tier of a replica: `owners` (Int32Array) and `shares` (Uint8Array) by block; `dirty` is what changed since it
 * was drawn, null for everything. `flashes`: block -> [kind, time]. */
export class Tier {
  constructor(size = 0) {
    this.resize(size);
    this.version = 0;
  }

  resize(size) {
    this.owners = new Int32Array(size);
    this.shares = new Uint8Array(size);
    this.flashes = new Map();
  }

  take(told) {
    if (told.size !== this.owners.length) this.resize(told.size);
    if (!told.owners) return;
    const owners = ints(told.owners), shares = raw(told.shares);
    if (told.changed) {
      const changed = ints(told.changed);
      for (let i = 0; i < changed.length; i++) {
        this.owners[changed[i]] = owners[i];
        this.shares[changed[i]] = shares[i];
      }
    } else {
      this.owners.set(owners);
      this.shares.set(shares);
    }
    this.version++;
  }

  /** Blocks by what they are. */
  counts() {
    let held = 0, cached = 0, shared = 0, adapted = 0;
    for (let i = 0; i < this.owners.length; i++) {
      if (this.owners[i] > 0 || this.owners[i] === PINNED) held++;
      else if (this.owners[i] === CACHED) cached++;
      else if (this.owners[i] === ADAPTER) adapted++;
      if (this.shares[i] > 1) shared++;
    }
    return { held, cached, shared, adapted, free: this.owners.length - held - cached - adapted, size: this.owners.length };
  }
}

export class World extends EventTarget {
  constructor() {
    super();
    this.hello = {};
    this.followed = null;
    this.access = "ok"; // or "needed", "refused" (a wrong key), "forbidden" (a key that is no operator's)
    this.reset();
  }

  reset() {
    this.atS = 0;
    this.connected = false;
    this.away = "";
    this.replicas = new Map();
    this.lost = new Map(); // replicas that are gone, as they were last
    this.missing = [];
    this.held = ""; // the mode in which an operator holds the work
    this.requests = new Map();
    this.over = [];
    this.sequences = new Map();
    this.steps = [];
    this.numWaiting = 0;
    this.actors = [];
    this.streams = [];
    this.vitals = [];
    this.incidents = [];
    this.failures = null;
    this.tables = null; // block tables of the request that is followed
    this.clockGapS = null;
  }

  /** Tell the views: `state`, `actors`, `vitals`, `incidents`, `failures`, `status`, `follow`. */
  tell(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** Listen until the signal is aborted. */
  on(name, listener, signal) {
    this.addEventListener(name, (event) => listener(event.detail), { signal });
  }

  /** All replicas to show: those that are there, and as they were last those that are gone (`lostS`). */
  shownReplicas() {
    return new Map([...this.replicas, ...this.lost]);
  }

  /** The time at the server now. */
  nowS() {
    return this.clockGapS === null ? this.atS : Date.now() / 1000 + this.clockGapS;
  }

  takeHello(hello) {
    this.reset();
    this.hello = hello;
    this.connected = true;
    this.access = "ok";
    this.tell("status");
  }

  takeState(state) {
    const { columns } = this.hello;
    this.atS = state.at_s;
    const gap = state.at_s - Date.now() / 1000;
    this.clockGapS = this.clockGapS === null ? gap : this.clockGapS + (gap - this.clockGapS) * 0.1;
    this.away = "";
    this.numWaiting = state.num_waiting;
    this.#takeReplicas(state.replicas);
    this.#takeRequests(state.requests.map((row) => record(columns.requests, row)), state.num_over, state.clients ?? []);
    this.#takeSequences(state.sequences.map((row) => record(columns.sequences, row)));
    const names = [...this.replicas.keys()];
    for (const row of state.steps) {
      const step = record(columns.steps, row);
      step.replica = names[step.replica];
      this.steps.push(step);
    }
    if (this.steps.length > KEPT_STEPS) this.steps.splice(0, this.steps.length - KEPT_STEPS);
    this.#flash(state.flashed, names);
    this.tell("state", state);
  }

  #takeReplicas(told) {
    const before = this.replicas;
    this.replicas = new Map();
    for (const each of told) {
      const { device, host, ...counts } = each;
      const old = before.get(each.name);
      const replica = old?.epoch === each.epoch ? old : { device: new Tier(), host: new Tier() };
      Object.assign(replica, counts);
      this.lost.delete(each.name);
      replica.device.take(device);
      replica.host.take(host);
      this.replicas.set(each.name, replica);
    }
    for (const [name, old] of before) if (!this.replicas.has(name)) this.lost.set(name, { ...old, lostS: this.atS });
  }

  #takeRequests(rows, numOver, clients) {
    this.order = rows.map((row) => row.id);
    const living = new Map();
    rows.forEach((row, index) => {
      const request = { ...row, client: clients[index] ?? "", state: "", sequences: [], endedState: OUTCOMES[row.outcome] };
      if (index < numOver) this.over.push({ ...request, sequences: this.requests.get(row.id)?.sequences ?? [] });
      else living.set(row.id, request);
    });
    if (this.over.length > KEPT_OVER) this.over.splice(0, this.over.length - KEPT_OVER);
    this.requests = living;
  }

  #takeSequences(rows) {
    this.sequences = new Map();
    const names = [...this.replicas.keys()];
    for (const row of rows) {
      const id = this.order[row.request];
      const request = this.requests.get(id);
      const sequence = { ...row, requestId: id, state: STATES[row.state], replica: names[row.replica] ?? null };
      this.sequences.set(row.id, sequence);
      if (!request) continue;
      request.sequences.push(sequence);
      if (sequence.state === "running" || !request.state) request.state = sequence.state;
    }
    for (const request of this.requests.values()) {
      if (!request.state) request.state = "delivering";
      else if (request.state === "running") request.state = request.first_token_s ? "decoding" : "prefill";
      else if (request.num_preemptions && request.state === "waiting") request.state = "preempted";
    }
  }

  #flash(triples, names) {
    const now = performance.now();
    for (let i = 0; i < triples.length; i += 3) {
      this.replicas.get(names[triples[i]])?.device.flashes.set(triples[i + 2], [triples[i + 1], now]);
    }
  }

  takeActors({ at_s, actors, streams, missing = [], held = "" }) {
    this.actors = actors;
    this.streams = streams;
    this.missing = missing;
    this.held = held;
    this.actorsS = at_s;
    if (!this.atS) this.clockGapS = at_s - Date.now() / 1000; // there is no scheduler that could say
    const there = new Set(actors.map((row) => row.name));
    for (const name of this.lost.keys()) if (!there.has(name)) this.lost.delete(name);
    this.tell("actors");
  }

  takeVitals({ at_s, figures }) {
    const vitals = { at_s };
    this.hello.figures.forEach((name, index) => (vitals[name] = figures[index]));
    this.vitals.push(vitals);
    if (this.vitals.length > KEPT_VITALS) this.vitals.shift();
    this.tell("vitals", vitals);
  }

  takeIncidents({ incidents }) {
    this.incidents = incidents;
    this.tell("incidents");
  }

  takeFailures(failures) {
    this.failures = failures;
    this.tell("failures");
  }

  /** The newest figures; null if they are not of now. */
  figures() {
    const vitals = this.vitals.at(-1);
    const isKnown = this.connected && vitals && !this.missing.includes("bus") && this.nowS() - vitals.at_s < FRESH_S;
    return isKnown ? vitals : null;
  }

  /** Whether the scheduler's picture is of now. */
  get isCurrent() {
    return this.connected && !this.away && this.atS > 0 && !this.missing.includes("scheduler") && !this.missing.includes("bus");
  }

  /** A request by its id, living or over. */
  find(id) {
    return this.requests.get(id) ?? this.over.findLast((request) => request.id === id) ?? null;
  }

  /** The blocks of the request that is followed, with those that it shares: a set for a tier of a replica, or null
   * while nobody is followed, or it has none. */
  followedBlocks(replica, tier) {
    if (!this.followed || !this.tables) return null;
    const name = tier === "host" ? "host_blocks" : "blocks";
    const blocks = new Set(this.tables.filter((each) => each.replica === replica).flatMap((each) => each[name]));
    return this.tables.some((each) => each.blocks.length || each.host_blocks.length) ? blocks : null;
  }

  follow(id) {
    this.followed = this.followed === id ? null : id;
    this.tables = null;
    this.tell("follow", this.followed);
  }

  takeTables(tables) {
    this.tables = tables;
    this.tell("tables");
  }
}

function record(names, row) {
  const found = {};
  for (let i = 0; i < names.length; i++) found[names[i]] = row[i];
  return found;
}

function raw(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

function ints(text) {
  return new Int32Array(raw(text).buffer);
}
