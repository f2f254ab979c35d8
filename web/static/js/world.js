// The deployment as far as it is known: filled by the live feed or by a replay, shown by the views.

export const FREE = 0, CACHED = -1, PINNED = -2;
const KEPT_STEPS = 6000;
const KEPT_OVER = 200;
const KEPT_VITALS = 120;
const OUTCOMES = ["", "done", "ended early"];
const STATES = ["waiting", "landing", "running"];

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
    let held = 0, cached = 0, shared = 0;
    for (let i = 0; i < this.owners.length; i++) {
      if (this.owners[i] > 0 || this.owners[i] === PINNED) held++;
      else if (this.owners[i] === CACHED) cached++;
      if (this.shares[i] > 1) shared++;
    }
    return { held, cached, shared, free: this.owners.length - held - cached, size: this.owners.length };
  }
}

export class World extends EventTarget {
  constructor() {
    super();
    this.hello = {};
    this.reset();
  }

  reset() {
    this.atS = 0;
    this.connected = false;
    this.away = "";
    this.replicas = new Map();
    this.requests = new Map();
    this.over = [];
    this.sequences = new Map();
    this.steps = [];
    this.numWaiting = 0;
    this.actors = [];
    this.streams = [];
    this.vitals = [];
    this.followed = null;
    this.clockGapS = null;
  }

  /** Tell the views: `state`, `actors`, `vitals`, `status`, `follow`. */
  tell(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** Listen until the signal is aborted. */
  on(name, listener, signal) {
    this.addEventListener(name, (event) => listener(event.detail), { signal });
  }

  /** The time at the server now. */
  nowS() {
    return this.clockGapS === null ? this.atS : Date.now() / 1000 + this.clockGapS;
  }

  takeHello(hello) {
    this.reset();
    this.hello = hello;
    this.connected = true;
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
    this.#takeRequests(state.requests.map((row) => record(columns.requests, row)), state.num_over);
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
      replica.device.take(device);
      replica.host.take(host);
      this.replicas.set(each.name, replica);
    }
  }

  #takeRequests(rows, numOver) {
    this.order = rows.map((row) => row.id);
    const living = new Map();
    rows.forEach((row, index) => {
      const request = { ...row, state: "", sequences: [], endedState: OUTCOMES[row.outcome] };
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

  takeActors({ actors, streams }) {
    this.actors = actors;
    this.streams = streams;
    this.tell("actors");
  }

  takeVitals({ at_s, figures }) {
    const vitals = { at_s };
    this.hello.figures.forEach((name, index) => (vitals[name] = figures[index]));
    this.vitals.push(vitals);
    if (this.vitals.length > KEPT_VITALS) this.vitals.shift();
    this.tell("vitals", vitals);
  }

  /** A request by its id, living or over. */
  find(id) {
    return this.requests.get(id) ?? this.over.findLast((request) => request.id === id) ?? null;
  }

  /** The sequence ids of the request that is followed. */
  followedSequences() {
    const request = this.followed && this.requests.get(this.followed);
    return new Set(request ? request.sequences.map((sequence) => sequence.id) : []);
  }

  follow(id) {
    this.followed = this.followed === id ? null : id;
    this.tell("follow", this.followed);
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
