// Polling of the service while the page is visible: its health, and the diagrams while their panel is open.

import { getJSON, getText } from "./api.js";
import { byId } from "./dom.js";
import { Load } from "./load.js";
import { Memory } from "./memory.js";

const IDLE_MS = 1000;
const ASKING_MS = 100; // shorter during a request, because blocks live only as long as requests
const SELDOM_MS = 900; // for health, queue and throughput, and for any part after an error

export class Watch {
  #panel = byId("service");
  #health = byId("health");
  #back;
  #wake = () => {};
  #memory = new Memory();
  #asking = false;
  /** Whether the service requires a key and has not accepted one. */
  locked = false;

  /** Start polling. `refused` is called if the service requires a key, and `back` when it is healthy again. */
  constructor(refused, back) {
    this.#back = back;
    const load = new Load();
    const health = part([], SELDOM_MS, () => getJSON("health").then(() => this.#show("Ready", "good")));
    const memory = part(["arenas"], 0, async () => this.#memory.update(await getJSON("shm?blocks=true")));
    const metrics = part(["queue", "throughput"], SELDOM_MS, async (at) => load.update(await getText("metrics"), at));
    document.addEventListener("visibilitychange", () => this.now());
    this.#run(async () => {
      const parts = this.#panel.hidden ? [] : [this.locked ? null : memory(), metrics()];
      const [sick, barred] = await Promise.all([health(), ...parts]);
      if (sick) this.#show(sick.status ? sick.message : "No answer", "bad");
      if (barred?.status !== 401) return;
      this.locked = true;
      refused();
    });
  }

  /** Poll more often from now on, because blocks live only as long as requests. */
  start() {
    this.#asking = true;
    this.now();
  }

  /** Poll at the usual rate again. */
  stop() {
    this.#asking = false;
    this.#memory.own([]);
  }

  /** Mark the blocks of this page's own request, which the service lists in `spans`. */
  own(spans) {
    this.#memory.own(spans.map((span) => span.block));
    this.now();
  }

  /** Poll immediately. */
  now() {
    this.#wake();
  }

  async #run(look) {
    for (;;) {
      if (!document.hidden) await look();
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, this.#asking ? ASKING_MS : IDLE_MS);
      });
    }
  }

  #show(text, className) {
    if (className === "good" && this.#health.classList.contains("bad")) this.#back();
    if (this.#health.textContent !== text) this.#health.textContent = text;
    this.#health.className = `badge ${className}`;
  }
}

/**
 * Return a function that polls one part of the service with `look`, at most once in `every` ms, and returns the error
 * or null. After an error, the sections around `ids` are marked as stale.
 */
function part(ids, every, look) {
  const sections = ids.map((id) => byId(id).closest("section"));
  let due = 0;
  return async () => {
    const at = performance.now();
    if (at < due) return null;
    const error = await look(at / 1000).then(
      () => null,
      (reason) => reason,
    );
    due = at + (error ? SELDOM_MS : every);
    for (const section of sections) section.classList.toggle("stale", error !== null);
    return error;
  };
}
