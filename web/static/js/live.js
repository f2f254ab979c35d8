// The live feed: connects the world to /api/events while the page is visible, and again when the connection breaks.

import { events, key, request } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 4000];
const SILENT_MS = 20_000; // the server says something every 5 s

export class Live {
  constructor(world) {
    this.world = world;
    this.controller = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    if (this.controller || this.world.access !== "ok") return;
    this.controller = new AbortController();
    this.#run(this.controller.signal);
  }

  /** A page that nobody sees costs nothing. */
  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  /** There is another key. */
  again() {
    this.world.access = "ok";
    this.world.problem = "";
    this.stop();
    this.start();
    this.world.tell("status");
  }

  async #run(signal) {
    for (let attempt = 0; !signal.aborted; attempt++) {
      const broken = new AbortController();
      const stop = () => broken.abort();
      signal.addEventListener("abort", stop);
      try {
        await this.#read(signal, broken, () => { attempt = 0; });
        this.world.problem = "The connection to the server has ended.";
      } catch (error) {
        if (signal.aborted) return;
        this.world.problem = error.name === "AbortError" ? "The server is silent." : error.message;
        if (error.status === 401) this.world.access = key.get() ? "refused" : "needed";
        if (error.status === 403) this.world.access = "forbidden";
        if (error.status === 401 || error.status === 403) this.controller = null; // until there is another key
      } finally {
        signal.removeEventListener("abort", stop);
        broken.abort();
      }
      if (signal.aborted) return;
      this.world.connected = false;
      this.world.tell("status");
      if (!this.controller) return;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
    }
  }

  async #read(signal, broken, heard) {
    let silent = setTimeout(() => broken.abort(), SILENT_MS);
    try {
      const response = await request("/api/events", { signal: broken.signal });
      for await (const { event, data } of events(response)) {
        if (signal.aborted) return;
        clearTimeout(silent);
        silent = setTimeout(() => broken.abort(), SILENT_MS);
        heard();
        this.#take(event, JSON.parse(data));
      }
    } finally {
      clearTimeout(silent);
    }
  }

  #take(event, data) {
    const { world } = this;
    if (event === "hello") world.takeHello(data);
    else if (event === "state") world.takeState(data);
    else if (event === "actors") world.takeActors(data);
    else if (event === "vitals") world.takeVitals(data);
    else if (event === "incidents") world.takeIncidents(data);
    else if (event === "failures") world.takeFailures(data);
    else if (event === "away") {
      world.away = data.message;
      world.tell("status");
    }
  }
}
