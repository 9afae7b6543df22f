// The arenas of shared memory, as a map of their blocks and as a table.

import { byId, element, svg } from "./dom.js";
import { bytes, seconds } from "./format.js";

const ROWS = 8; // an arena is drawn as this number of lines, like text
const WIDTH = 640;
const LINE = 12;
const LEAST = 4; // minimum width, so that every block is visible
const FREED_MS = 2000; // time for which a freed block is still drawn
const MOST_TABLED = 100;
const MOST_NAMED = 12;
const OWNERS = 6; // number of colors; several requests may share one

export class Memory {
  #arenas = byId("arenas");
  #rows = byId("block-rows");
  #mine = new Set();
  #seen = new Map();
  #freed = [];
  #last = [];

  #colours = byId("colours");

  constructor() {
    byId("blocks").addEventListener("toggle", () => this.#tabulate());
    this.#colours.addEventListener("change", () => this.#draw());
  }

  /** Set the names of the blocks that belong to this page's own request. */
  own(names) {
    this.#mine = new Set(names);
  }

  /** Update the map and the table with the answer of /shm?blocks=true. */
  update({ arenas }) {
    this.#notice(arenas);
    this.#last = arenas;
    this.#draw();
    this.#tabulate();
  }

  get #blocks() {
    return this.#last.flatMap((arena) => arena.map);
  }

  #draw() {
    const byOwner = this.#colours.value === "owner";
    byId("ages").hidden = byOwner;
    byId("owners").hidden = !byOwner;
    const owners = [...new Set(this.#blocks.map(({ request }) => request))].slice(0, MOST_NAMED);
    byId("owners").replaceChildren(
      ...owners.map((request) =>
        element("li", {}, svg("svg", { class: `swatch ${owner(request)}`, "aria-hidden": "true" }), short(request)),
      ),
    );
    this.#arenas.replaceChildren(...this.#last.map((arena) => this.#arena(arena)));
    if (!this.#last.length) this.#arenas.append(element("p", { class: "quiet" }, "There are no arenas."));
  }

  /** Record blocks as freed if they were in the last update and are missing from this one. */
  #notice(arenas) {
    const now = performance.now();
    const seen = new Map();
    for (const arena of arenas) for (const block of arena.map) seen.set(`${block.name} ${block.request}`, { arena, block });
    for (const [key, { arena, block }] of this.#seen) {
      if (!seen.has(key)) this.#freed.push({ arena: arena.name, block, until: now + FREED_MS });
    }
    this.#seen = seen;
    this.#freed = this.#freed.filter(({ until }) => until > now);
  }

  #arena(arena) {
    const room = arena.capacity_bytes;
    const picture = svg("svg", {
      class: "arena",
      role: "img",
      viewBox: `0 0 ${WIDTH} ${ROWS * LINE}`,
      preserveAspectRatio: "none",
      "aria-label": described(arena),
    });
    for (const rect of rects(0, room, room)) picture.append(svg("rect", { class: "room", ...rect }));
    for (const rect of rects(0, room * arena.populated, room)) picture.append(svg("rect", { class: "populated", ...rect }));
    for (const { arena: name, block } of this.#freed) {
      if (name === arena.name) this.#put(picture, block, room, "freed");
    }
    const look = this.#colours.value === "owner" ? ownerLook : ageLook;
    for (const block of arena.map) this.#put(picture, block, room, look(block));
    const facts = `${bytes(arena.bytes)} of ${bytes(room)} in ${count(arena.blocks)}; peak ${bytes(arena.peak_bytes ?? 0)}`;
    return element(
      "figure",
      {},
      element("figcaption", {}, element("strong", {}, arena.name), ` of tokenizer process ${arena.pid}`),
      picture,
      element("p", { class: "quiet" }, facts),
    );
  }

  #put(picture, block, room, className) {
    const mine = this.#mine.has(block.name) && className !== "freed" ? " mine" : "";
    for (const [offset, size] of block.pieces) {
      for (const rect of rects(offset, size, room, LEAST)) {
        const facts = [block.name, block.state, `request ${short(block.request)}`, seconds(block.age_s), bytes(block.bytes)];
        picture.append(svg("rect", { class: `block ${className}${mine}`, ...rect }, svg("title", {}, facts.join(", "))));
      }
    }
  }

  #tabulate() {
    if (!byId("blocks").open) return;
    const blocks = this.#blocks;
    const rows = blocks.slice(0, MOST_TABLED).map((block) => {
      const own = this.#mine.has(block.name) ? " (of your request)" : "";
      const cells = [
        block.name + own,
        block.state,
        short(block.request),
        seconds(block.age_s),
        bytes(block.bytes),
        Object.entries(block.arrays).map(([name, { dtype, shape }]) => `${name} ${dtype} [${shape.join(", ")}]`).join("; "),
      ];
      return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
    });
    const told = blocks.length > MOST_TABLED ? `and ${blocks.length - MOST_TABLED} more` : rows.length ? "" : "There are no blocks.";
    if (told) rows.push(element("tr", {}, element("td", { colspan: 6 }, told)));
    this.#rows.replaceChildren(...rows);
  }
}

/** Return the rectangles of bytes [offset, offset + size) in the map, one per line. */
function rects(offset, size, room, least = 0) {
  const found = [];
  const perLine = room / ROWS;
  for (let line = Math.floor(offset / perLine); line < ROWS && line * perLine < offset + size; line += 1) {
    const from = Math.max(offset - line * perLine, 0) / perLine;
    const to = Math.min(offset + size - line * perLine, perLine) / perLine;
    const width = Math.max(least, (to - from) * WIDTH);
    found.push({ x: Math.min(from * WIDTH, WIDTH - width), y: line * LINE, width, height: LINE - 2 });
  }
  return found;
}

function ageLook({ state, age_s: age }) {
  if (state === "filling") return "filling";
  return `published ${age < 1 ? "young" : age < 10 ? "" : "old"}`;
}

const ownerLook = ({ state, request }) => `${owner(request)} ${state === "filling" ? "faint" : ""}`;

/** Return the class of a request's color. It depends only on the name, which is random hexadecimal digits. */
const owner = (request) => `owner-${request ? parseInt(request.slice(0, 6), 16) % OWNERS || 0 : 0}`;

const short = (request) => (request ?? "none").slice(0, 8);

function described(arena) {
  const filling = arena.map.filter(({ state }) => state === "filling").length;
  const oldest = Math.max(0, ...arena.map.map((block) => block.age_s));
  const told = arena.blocks
    ? `${count(arena.blocks)}, ${filling} being filled, the oldest ${seconds(oldest)} old`
    : "no block in use";
  return `Map of ${arena.name}: ${told}.`;
}

const count = (blocks) => `${blocks} ${blocks === 1 ? "block" : "blocks"}`;
