// A square per block, drawn as pixels: from a hundred to a hundred thousand. Only what has changed is drawn again.

import { mix, pixel, rgbOf, rgbOfName } from "../colors.js";
import { announce, h } from "../dom.js";
import { ADAPTER, CACHED, FLASH_MS, FREE, PINNED } from "../world.js";
import { hideTip, showTip } from "./tip.js";

const ASK_AFTER_MS = 120;
const LARGEST = 26, LARGEST_WIDE = 64;
const SMALLEST = 2;

/** Size of a square with its gap (CSS pixels), so that `count` of them fit into width x height if they can. */
export function pitchOf(count, width, height) {
  let pitch = Math.min(innerWidth >= 1600 && width > 700 ? LARGEST_WIDE : LARGEST, Math.floor(Math.sqrt((width * height) / Math.max(1, count))));
  while (pitch > SMALLEST && Math.ceil(count / Math.floor(width / pitch)) * pitch > height) pitch--;
  return Math.max(SMALLEST, Math.floor(pitch));
}

export class BlockMap {
  /** `height()` is how much of it there is; `describe(block)` gives the content of the tip, `ask(block)` a promise of
   * more; `followed()` is the set of blocks that stand out, null: none does. */
  constructor({ label, height, describe, ask, followed = () => null, choose = () => {}, signal }) {
    Object.assign(this, { label, heightOf: height, describe, ask, followed, choose });
    this.tier = null;
    this.frames = 0;
    this.drawn = { version: -1, owners: new Int32Array(0), shares: new Uint8Array(0) };
    this.hovered = -1;
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": label, "aria-roledescription": "block map" });
    this.overlay = h("canvas", { class: "cursor", "aria-hidden": "true" });
    this.element = h("div", { class: "map" }, this.canvas, this.overlay);
    this.canvas.addEventListener("pointermove", (event) => this.#point(this.#blockAt(event), event));
    this.canvas.addEventListener("pointerleave", () => this.#point(-1));
    this.canvas.addEventListener("click", () => this.hovered >= 0 && this.choose(this.hovered));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#point(-1));
    const observer = new ResizeObserver(() => this.#resize());
    observer.observe(this.element);
    addEventListener("resize", () => this.#resize(), { signal });
    signal.addEventListener("abort", () => {
      observer.disconnect();
      cancelAnimationFrame(this.frame);
      this.closed = true;
      hideTip();
    });
  }

  show(tier) {
    if (tier !== this.tier || tier.owners.length !== this.count) {
      this.tier = tier;
      this.count = tier.owners.length;
      this.#resize();
    }
    this.#wake();
  }

  /** Everything looks different now: the theme, or who is followed. */
  refresh() {
    this.drawn.version = -1;
    this.drawn.all = true;
    this.#wake();
  }

  #resize() {
    const width = Math.floor(this.element.clientWidth);
    if (!this.tier || !width || !this.count) return;
    const scale = Math.min(2, devicePixelRatio || 1);
    this.pitch = pitchOf(this.count, width, this.heightOf());
    this.columns = Math.floor(width / this.pitch);
    this.rows = Math.ceil(this.count / this.columns);
    this.cell = Math.round(this.pitch * scale);
    // Large squares share what is left of the width, so that the map ends where its card does.
    const spread = this.pitch >= 9 ? (width * scale) / this.columns : this.cell;
    this.xs = Array.from({ length: this.columns + 1 }, (_, column) => Math.round(column * spread));
    this.scale = scale;
    this.gap = this.cell >= 22 ? 3 : this.cell >= 12 ? 2 : this.cell >= 5 ? 1 : 0;
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.width = this.xs[this.columns];
      canvas.height = this.rows * this.cell;
      canvas.style.setProperty("width", `${canvas.width / scale}px`);
      canvas.style.setProperty("height", `${canvas.height / scale}px`);
    }
    this.context = this.canvas.getContext("2d");
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.drawn = { version: -1, all: true, owners: new Int32Array(this.count), shares: new Uint8Array(this.count) };
    this.#wake();
  }

  #wake() {
    if (!this.waking && !this.closed) {
      this.waking = true;
      this.frame = requestAnimationFrame(() => this.#draw());
    }
  }

  #draw() {
    this.waking = false;
    const { tier, drawn } = this;
    if (!tier || !this.image || this.closed) return;
    const now = performance.now();
    this.frames++;
    const palette = this.#palette();
    const dirty = { first: Infinity, last: -1 };
    if (drawn.version !== tier.version) {
      const { owners, shares } = tier;
      for (let block = 0; block < this.count; block++) {
        if (!drawn.all && owners[block] === drawn.owners[block] && shares[block] === drawn.shares[block]) continue;
        drawn.owners[block] = owners[block];
        drawn.shares[block] = shares[block];
        this.#cell(block, palette, dirty, 0);
      }
      drawn.version = tier.version;
      drawn.all = false;
    }
    for (const [block, [kind, since]] of tier.flashes) {
      const age = (now - since) / FLASH_MS;
      if (age >= 1 || block >= this.count) tier.flashes.delete(block);
      this.#cell(block, palette, dirty, Math.max(0, 1 - age), kind);
    }
    if (dirty.last >= 0) {
      const top = dirty.first * this.cell;
      this.context.putImageData(this.image, 0, 0, 0, top, this.canvas.width, (dirty.last + 1) * this.cell - top);
    }
    if (tier.flashes.size) this.#wake();
    if (this.hovered >= 0) this.#outline();
  }

  #palette() {
    const followed = this.followed();
    return {
      followed,
      ground: rgbOfName("surface"),
      ink: rgbOfName("ink"),
      free: rgbOfName("free"),
      cached: rgbOfName("cached"),
      adapter: rgbOfName("prefill"),
      flashes: [[255, 255, 255], rgbOfName("prefill"), rgbOfName("good"), rgbOfName("accent")],
    };
  }

  #cell(block, palette, dirty, flash, kind = 0) {
    const owner = this.tier.owners[block], shared = this.tier.shares[block] > 1;
    let colour = owner > 0 ? rgbOf(owner) : owner === CACHED ? palette.cached : owner === PINNED ? palette.ink : owner === ADAPTER ? palette.adapter : palette.free;
    if (palette.followed && owner !== FREE && !palette.followed.has(block)) colour = mix(colour, palette.free, 0.82);
    if (flash) colour = mix(colour, palette.flashes[kind], flash);
    const width = this.canvas.width, row = Math.floor(block / this.columns), column = block % this.columns;
    const side = this.cell - this.gap, wide = this.xs[column + 1] - this.xs[column] - this.gap;
    const start = row * this.cell * width + this.xs[column];
    if (shared && side < 5) colour = mix(colour, [255, 255, 255], 0.45);
    const value = pixel(colour);
    for (let y = 0; y < side; y++) this.pixels.fill(value, start + y * width, start + y * width + wide);
    if (side >= 8) { // a hint of round corners
      const ground = pixel(palette.ground);
      for (const at of [0, wide - 1, (side - 1) * width, (side - 1) * width + wide - 1]) this.pixels[start + at] = ground;
    }
    if (shared && side >= 5) {
      const core = Math.max(2, Math.round(side * 0.34)), inset = Math.floor((side - core) / 2), across = Math.floor((wide - core) / 2);
      const bright = pixel(mix(colour, [255, 255, 255], 0.82));
      for (let y = inset; y < inset + core; y++) {
        this.pixels.fill(bright, start + y * width + across, start + y * width + across + core);
      }
    }
    dirty.first = Math.min(dirty.first, row);
    dirty.last = Math.max(dirty.last, row);
  }

  // -- pointing -------------------------------------------------------------------------------------------------------

  #blockAt(event) {
    if (!this.xs) return -1;
    const column = Math.floor((event.offsetX * this.scale * this.columns) / this.xs[this.columns]);
    const row = Math.floor((event.offsetY * this.scale) / this.cell);
    const block = row * this.columns + column;
    return column < this.columns && block >= 0 && block < this.count ? block : -1;
  }

  #point(block, event = null) {
    clearTimeout(this.timer);
    const moved = block !== this.hovered;
    this.hovered = block;
    if (block < 0) {
      hideTip();
      this.overlay.getContext("2d").clearRect(0, 0, this.overlay.width, this.overlay.height);
      return;
    }
    const box = this.canvas.getBoundingClientRect();
    const x = event ? event.clientX : box.left + this.xs[(block % this.columns) + 1] / this.scale;
    const y = event ? event.clientY : box.top + ((Math.floor(block / this.columns) + 1) * this.cell) / this.scale;
    if (moved) {
      this.more = null;
      this.#outline();
    }
    showTip(x, y, this.describe(block, this.more));
    if (!this.more && this.ask) {
      this.timer = setTimeout(async () => {
        const more = await this.ask(block).catch(() => null);
        if (more && this.hovered === block) {
          this.more = more;
          showTip(x, y, this.describe(block, more));
        }
      }, ASK_AFTER_MS);
    }
  }

  /** A frame round the block that is pointed at, and round all others of its sequence. */
  #outline() {
    const context = this.overlay.getContext("2d"), { owners } = this.tier, owner = owners[this.hovered];
    context.clearRect(0, 0, this.overlay.width, this.overlay.height);
    context.strokeStyle = `rgb(${rgbOfName("ink").join(" ")})`;
    const side = this.cell - this.gap;
    const frame = (block, width) => {
      const column = block % this.columns, x = this.xs[column], y = Math.floor(block / this.columns) * this.cell;
      const wide = this.xs[column + 1] - x - this.gap;
      context.lineWidth = width;
      context.strokeRect(x + width / 2, y + width / 2, Math.max(1, wide - width), Math.max(1, side - width));
    };
    if (owner > 0) for (let block = 0; block < this.count; block++) if (owners[block] === owner) frame(block, 1);
    frame(this.hovered, side >= 8 ? 3 : 2);
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (event.key in moves) {
      const block = Math.min(this.count - 1, Math.max(0, Math.max(0, this.hovered) + moves[event.key]));
      this.#point(block);
      announce(document.getElementById("tip").textContent);
    } else if (event.key === "Enter" && this.hovered >= 0) this.choose(this.hovered);
    else if (event.key === "Escape" && this.hovered >= 0) this.#point(-1);
    else return;
    event.preventDefault();
  }
}
