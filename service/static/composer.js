// The form for questions and their media.

import { Camera } from "./camera.js";
import { byId } from "./dom.js";
import { Items } from "./items.js";
import { Recorder } from "./recorder.js";

export class Composer {
  #form = byId("composer");
  #question = byId("question");
  #status = byId("status");
  #items = new Items(byId("items"), (text) => this.say(text));
  #recorders;
  #settings;
  #busy = null;

  /**
   * Create the form. `ask` is an async function of a question, its items and an AbortSignal. If it returns false, the
   * form restores the question. Nothing is sent while `settings` are invalid.
   */
  constructor(settings, ask) {
    this.#settings = settings;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(ask);
    });
    this.#question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      // Escape also ends the input of Chinese or Japanese characters, and clears a search field.
      if (event.key !== "Escape" || event.defaultPrevented || event.isComposing || event.target.type === "search") return;
      if (!document.querySelector("dialog[open]")) this.stop();
    });
    const files = byId("files");
    files.addEventListener("change", () => {
      this.#items.add(files.files);
      files.value = "";
    });
    const done = (file) => this.#items.add([file]);
    this.#recorders = [["audio", "record-audio"], ["video", "record-video"]].map(
      ([kind, id]) => new Recorder(kind, byId(id), done, (text) => this.say(text)),
    );
    new Camera(byId("photo"), done, (text) => this.say(text));
    document.addEventListener("paste", (event) => {
      if (!pastesText(event)) this.#takeFrom(event, event.clipboardData);
    });
    document.addEventListener("drop", (event) => this.#takeFrom(event, event.dataTransfer));
    for (const name of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(name, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        document.body.classList.toggle("dropping", name === "dragover");
      });
    }
  }

  /** Show `text` as the status. */
  say(text) {
    this.#status.textContent = text;
  }

  #takeFrom(event, transfer) {
    if (!transfer?.files.length) return;
    event.preventDefault();
    this.#items.add(transfer.files);
    this.#question.focus();
  }

  /** End the answer that is arriving, if there is one. */
  stop() {
    this.#busy?.abort();
  }

  /** Whether an answer is arriving. */
  get busy() {
    return this.#busy !== null;
  }

  /** Call `work` with an AbortSignal of the Stop button, unless an answer is arriving. Return the result, or null. */
  async run(work) {
    if (this.#busy) {
      this.say("The previous answer is not finished. Press Stop to end it.");
      return null;
    }
    if (!this.#settings.check()) return null;
    this.#showBusy(new AbortController());
    try {
      return await work(this.#busy.signal);
    } finally {
      this.#showBusy(null);
    }
  }

  #submit(ask) {
    return this.run(async (signal) => {
      const question = this.#question.value.trim();
      this.#question.value = "";
      await Promise.all(this.#recorders.map((recorder) => recorder.stop()));
      const items = await this.#items.take();
      if (!question && !items.length) this.say("There is nothing to ask yet. Write a question, or attach a file.");
      else if (!(await ask(question, items, signal))) this.putBack(question, items);
    });
  }

  /** Restore a question that was not answered, so that nothing is lost. A recording, for example, has no other copy. */
  putBack(question, items) {
    this.#items.putBack(items);
    const since = this.#question.value;
    if (!since) this.#question.value = question;
    else if (question) this.#question.setRangeText(`${question}\n`, 0, 0, "preserve"); // keep the caret in place
    this.say(`${this.#status.textContent} The question is back in the form.`.trim());
  }

  #showBusy(busy) {
    this.#busy = busy;
    const hadFocus = [byId("stop"), byId("ask")].includes(document.activeElement);
    byId("stop").hidden = !busy;
    byId("ask").disabled = busy;
    if (hadFocus) (busy ? byId("stop") : this.#question).focus({ preventScroll: true });
  }
}

/**
 * Return whether a paste event inserts text into a text field. Pasted text may have an image of itself, for example
 * from spreadsheet cells. Pasted files may have their names, paths or URLs as text.
 */
function pastesText({ target, clipboardData }) {
  const text = clipboardData?.getData("text/plain").trim();
  if (!text || !target.matches?.(":read-write")) return false;
  return ![...clipboardData.files].some(({ name }) => text.endsWith(name) || text.endsWith(encodeURIComponent(name)));
}
