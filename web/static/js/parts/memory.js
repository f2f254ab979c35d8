// The two maps of one replica, with a legend, how full they are, and what a block tells. Used live and in replays.

import { getJson } from "../api.js";
import { colourOf } from "../colors.js";
import { fill, h, say } from "../dom.js";
import { count, percent, shortId } from "../format.js";
import { ADAPTER, CACHED, PINNED } from "../world.js";
import { BlockMap } from "./blockmap.js";
import { pairs } from "./tip.js";

const entry = (className, colour, text) =>
  h("li", {}, h("span", { class: `swatch ${className}`, style: colour ? { "--colour": colour } : {} }), text);

/** What the colours mean; `more` entries are behind the others. */
function legend(more) {
  return h("ul", { class: "legend" }, entry("held", "", "Held, a colour per sequence"), entry("shared", "", "Shared"),
    entry("", "var(--cached)", "Free, still cached"), entry("", "var(--free)", "Free"), more);
}

export class Memory {
  constructor({ world, name, signal, asks = true }) {
    Object.assign(this, { world, name });
    this.stale = h("p", { class: "stale-note", hidden: true });
    this.texts = { device: h("span", { class: "counts small quiet num" }), host: h("span", { class: "counts small quiet num" }) };
    this.bars = { device: h("div", { class: "usage", "aria-hidden": "true" }), host: h("div", { class: "usage", "aria-hidden": "true" }) };
    this.maps = {};
    for (const tier of ["device", "host"]) {
      this.maps[tier] = new BlockMap({
        label: `${tier === "device" ? "Device" : "Host"} blocks of ${name}. Move with the arrow keys.`,
        height: () => this.#height(tier),
        signal,
        describe: (block, more) => this.#describe(tier, block, more),
        ask: asks ? (block) => getJson(`/api/blocks?replica=${encodeURIComponent(name)}&block=${block}&tier=${tier}`) : null,
        followed: () => world.followedBlocks(name, tier),
        choose: (block) => this.#choose(tier, block),
      });
    }
    this.copying = entry("", "var(--ink)", "Being copied");
    this.pulled = entry("", "var(--accent)", "Just pulled from another executor");
    this.adapters = entry("", "var(--prefill)", "Adapters");
    this.copying.hidden = this.pulled.hidden = this.adapters.hidden = true; // until there is something of it
    this.hostMap = h("div", { class: "below" }, this.maps.host.element);
    this.hostCard = h("section", { class: "card", hidden: true },
      h("header", {}, h("h2", {}, "Host tier"), this.texts.host), this.bars.host, this.hostMap);
    this.element = h("div", { class: "view" }, this.stale,
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Device tier"), this.texts.device),
        this.bars.device, h("div", { class: "spacer" }), this.maps.device.element, h("div", { class: "spacer" }), legend([this.adapters, this.copying, this.pulled])),
      this.hostCard);
    world.on("state", () => this.update(), signal);
    for (const change of ["follow", "tables", "theme"]) world.on(change, () => this.refresh(), signal);
    this.update();
  }

  /** A map gets what the window has left: the device's most of it. */
  #height(tier) {
    const has = this.world.shownReplicas().get(this.name)?.host.owners.length;
    const left = Math.max(440, innerHeight - (has ? 430 : 300));
    return tier === "device" ? (has ? left * 0.72 : left) : Math.max(150, left * 0.28);
  }

  refresh() {
    this.maps.device.refresh();
    this.maps.host.refresh();
  }

  update() {
    const replica = this.world.shownReplicas().get(this.name);
    if (!replica) return;
    this.element.classList.toggle("stale", Boolean(replica.lostS));
    this.stale.hidden = !replica.lostS;
    say(this.stale, replica.lostS ? `${this.name} is gone: these were its blocks when it was there last.` : "");
    this.copying.hidden &&= !replica.num_pinned;
    this.pulled.hidden &&= !replica.pulled_blocks;
    this.adapters.hidden = !replica.most_adapters;
    const host = replica.host.counts();
    this.hostCard.hidden = !host.size;
    this.hostMap.hidden = host.free === host.size;
    for (const tier of ["device", "host"]) {
      const counts = replica[tier].counts();
      this.maps[tier].show(replica[tier]);
      const shared = counts.shared ? `, ${count(counts.shared)} of them shared` : "";
      const adapted = counts.adapted ? ` · ${count(counts.adapted)} of adapters` : "";
      say(this.texts[tier], `${count(counts.held)} of ${count(counts.size)} held${shared} · ${count(counts.cached)} cached${adapted}`);
      fill(this.bars[tier], h("i", { style: { width: percentOf(counts.held, counts), "--colour": "var(--accent)" } }),
        h("i", { style: { width: percentOf(counts.adapted, counts), "--colour": "var(--prefill)" } }),
        h("i", { style: { width: percentOf(counts.cached, counts), "--colour": "var(--cached)" } }));
    }
  }

  #describe(tier, block, more) {
    const replica = this.world.shownReplicas().get(this.name);
    const owner = replica?.[tier].owners[block], shares = replica?.[tier].shares[block];
    const sequence = this.world.sequences.get(owner);
    const what = owner > 0 ? "held" : owner === CACHED ? "free, still cached" : owner === PINNED ? "being copied" : owner === ADAPTER ? "an adapter" : "free";
    const hashes = more?.hashes ?? [];
    return [
      h("h3", {}, `Block ${block} · ${what}`),
      pairs([
        ["Sequence", sequence ? `${shortId(sequence.requestId)}${sequence.choice ? `, choice ${sequence.choice + 1}` : ""}` : owner > 0 ? String(owner) : null],
        ["Adapter", more?.adapter || null],
        ["Held by", shares > 1 ? `${shares} sequences` : null],
        ["Place", more && more.place >= 0 ? placed(more) : null],
        ["Table", more?.table.length ? h("span", { class: "mono" }, table(more.table, more.place)) : null],
        ["Hash chain", hashes.length ? h("span", { class: "mono" }, chain(hashes)) : null],
      ]),
    ];
  }

  #choose(tier, block) {
    const owner = this.world.shownReplicas().get(this.name)?.[tier].owners[block];
    const sequence = this.world.sequences.get(owner);
    if (sequence) this.world.follow(sequence.requestId);
  }
}

function percentOf(part, counts) {
  return percent(part / Math.max(1, counts.size));
}

/** Where in its table a block is; those before the first lie behind the window. */
function placed({ first_block: first, place, table: blocks }) {
  return `${first + place + 1} of ${first + blocks.length} in its table${first ? `, which begins with ${first + 1}` : ""}`;
}

/** A few entries round the place. */
function table(blocks, place) {
  const from = Math.max(0, Math.min(place - 3, blocks.length - 8)), shown = blocks.slice(from, from + 8);
  return `${from ? "… " : ""}${shown.map((block, index) => (from + index === place ? `[${block}]` : block)).join(" ")}${from + 8 < blocks.length ? " …" : ""}`;
}

function chain(hashes) {
  const shown = hashes.slice(-4).map((hash) => hash.slice(0, 8));
  return `${hashes.length > 4 ? "… → " : ""}${shown.join(" → ")}`;
}

/** A square in the colour of a sequence. */
export function swatch(id) {
  return h("i", { style: { "--colour": id ? colourOf(id) : "var(--line-strong)" } });
}
