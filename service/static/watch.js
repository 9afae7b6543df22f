// Looks at the service again and again, while the page is seen and wants to.

import { getJSON, getText } from "./api.js";
import { byId } from "./dom.js";
import { Load } from "./load.js";
import { Memory } from "./memory.js";

const IDLE_MS = 1000;
const ASKING_MS = 100; // blocks live as long as requests do
const HEALTH_EVERY = 5;

export class Watch {
  #live = byId("live");
  #health = byId("health");
  #load = new Load();
  #refused;
  #wake = () => {};
  #looks = 0;
  #loaded = -Infinity;
  memory = new Memory();
  asking = false;
  /** No key was given that the service knows. */
  locked = false;

  /** `refused` is called when the service wants a key. */
  constructor(refused) {
    this.#refused = refused;
    this.#live.addEventListener("change", () => this.now());
    document.addEventListener("visibilitychange", () => this.now());
    this.#run();
  }

  /** Looks at once. */
  now() {
    this.#wake();
  }

  async #run() {
    for (;;) {
      if (this.#live.checked && !document.hidden) await this.#look();
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, this.asking ? ASKING_MS : IDLE_MS);
      });
    }
  }

  async #look() {
    try {
      if (this.#looks++ % HEALTH_EVERY === 0) await this.#ask();
      if (!this.locked) this.memory.update(await getJSON("shm?blocks=true"));
      const at = performance.now() / 1000;
      if (at - this.#loaded < 0.9) return;
      this.#loaded = at;
      this.#load.update(await getText("metrics"), at);
    } catch (error) {
      if (error.status === 401) {
        this.locked = true;
        this.#refused();
      } else {
        this.#looks = 0;
        this.#show(error.status ? error.message : "No answer", "bad");
      }
    }
  }

  async #ask() {
    await getJSON("health");
    this.#show("Ready", "good");
  }

  #show(text, className) {
    if (this.#health.textContent !== text) this.#health.textContent = text;
    this.#health.className = `badge ${className}`;
  }
}
