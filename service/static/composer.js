// The form that asks.

import { byId } from "./dom.js";
import { Items } from "./items.js";
import { Recorder } from "./recorder.js";

export class Composer {
  #form = byId("composer");
  #question = byId("question");
  #status = byId("status");
  #items = new Items(byId("items"), (text) => this.say(text));
  #busy = null;

  /** `ask` gets the question and its items, and a signal that ends it; the form waits for it. */
  constructor(ask) {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(ask);
    });
    this.#question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#busy?.abort());
    const files = byId("files");
    files.addEventListener("change", () => {
      this.#items.add(files.files);
      files.value = "";
    });
    const done = (file) => this.#items.add([file]);
    for (const [kind, id] of [["audio", "record-sound"], ["video", "record-video"]]) {
      new Recorder(kind, byId(id), done, (text) => this.say(text));
    }
    this.#takeFrom("paste", (event) => event.clipboardData);
    this.#takeFrom("drop", (event) => event.dataTransfer);
    for (const name of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(name, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        document.body.classList.toggle("dropping", name === "dragover");
      });
    }
  }

  /** Says what happened. */
  say(text) {
    this.#status.textContent = text;
  }

  /** What the options ask for. */
  get options() {
    return {
      max_tokens: byId("max-tokens").valueAsNumber || undefined,
      temperature: byId("temperature").valueAsNumber || 0,
      earlier: byId("earlier").checked,
    };
  }

  #takeFrom(name, transfer) {
    document.addEventListener(name, (event) => {
      const { files } = transfer(event) ?? {};
      if (!files?.length) return;
      event.preventDefault();
      this.#items.add(files);
      this.#question.focus();
    });
  }

  async #submit(ask) {
    if (this.#busy) return;
    const question = this.#question.value.trim();
    const items = this.#items.take();
    if (!question && !items.length) {
      this.say("There is nothing to ask yet: write a question, or attach something.");
      return;
    }
    this.#busy = new AbortController();
    this.#question.value = "";
    this.#showBusy(true);
    await ask(question, items, this.#busy.signal);
    this.#busy = null;
    this.#showBusy(false);
  }

  #showBusy(busy) {
    const hadFocus = [byId("stop"), byId("ask")].includes(document.activeElement);
    byId("stop").hidden = !busy;
    byId("ask").disabled = busy;
    if (hadFocus) (busy ? byId("stop") : this.#question).focus();
  }
}
