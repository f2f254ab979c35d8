// The live feed: connects the world to /api/events while the page is visible, and again when the connection breaks.

import { events, request } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 4000];

export class Live {
  constructor(world) {
    this.world = world;
    this.controller = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    if (this.controller) return;
    this.controller = new AbortController();
    this.#run(this.controller.signal);
  }

  /** A page that nobody sees costs nothing. */
  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  again() {
    this.stop();
    this.start();
  }

  async #run(signal) {
    for (let attempt = 0; !signal.aborted; attempt++) {
      try {
        const response = await request("/api/events", { signal });
        for await (const { event, data } of events(response)) {
          if (signal.aborted) return;
          attempt = 0;
          this.#take(event, JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        this.world.problem = error.status === 401 ? "An API key is needed." : error.message;
        if (error.status === 401 || error.status === 403) this.controller = null; // until there is another key
      }
      this.world.connected = false;
      this.world.tell("status");
      if (!this.controller) return;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
    }
  }

  #take(event, data) {
    const { world } = this;
    if (event === "hello") world.takeHello(data);
    else if (event === "state") world.takeState(data);
    else if (event === "actors") world.takeActors(data);
    else if (event === "vitals") world.takeVitals(data);
    else if (event === "away") {
      world.away = data.message;
      world.tell("status");
    }
  }
}
