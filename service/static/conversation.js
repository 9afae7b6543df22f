// The conversation: a log of questions and answers.

import { element } from "./dom.js";
import { timingsFigure } from "./timings.js";
import { tokensFigure } from "./tokens.js";

/** A question and its growing answer. */
class Turn {
  #text = element("p", { class: "answer", "aria-busy": "true" });
  #article;
  answer = "";
  /** Whether the turn has an answer, which may be partial, and belongs to the conversation. Otherwise the form has the
   * question again. */
  answered = false;

  constructor(number, question, items) {
    this.question = question;
    this.items = items;
    this.#article = element(
      "article",
      { "aria-label": `Question ${number}` },
      element("div", { class: "items" }, ...items.map((item) => item.view())),
      element("p", { class: "question" }, question),
      this.#text,
    );
  }

  get element() {
    return this.#article;
  }

  /** Append text to the answer. */
  add(text) {
    this.answer += text;
    this.#text.append(text);
  }

  /** Finish the answer, which may have been stopped. */
  end({ reason, usage, spans, timings, names }) {
    this.#text.removeAttribute("aria-busy");
    this.answered = reason !== "stopped" || this.answer !== "";
    if (reason === "length") this.#note("The answer ended at the maximum number of tokens.");
    if (reason === "stopped") this.#note("Stopped.");
    if (timings) this.#article.append(timingsFigure(timings));
    if (usage) this.#article.append(tokensFigure(usage, spans, names));
  }

  fail(message) {
    this.#text.removeAttribute("aria-busy");
    if (!this.answer) this.#text.remove();
    this.#article.append(element("p", { class: "error", role: "alert" }, message));
  }

  /** Return the turn as chat messages. */
  async messages() {
    const parts = await Promise.all(this.items.map((item) => item.part()));
    if (this.question) parts.push({ type: "text", text: this.question });
    const asked = { role: "user", content: parts };
    return this.answered ? [asked, { role: "assistant", content: this.answer }] : [asked];
  }

  #note(text) {
    this.#article.append(element("p", { class: "quiet" }, text));
  }
}

export class Conversation {
  #log;
  #empty;
  turns = [];

  constructor(log) {
    this.#log = log;
    this.#empty = log.firstElementChild;
  }

  /** Turns with an answer. Only these are sent to the model. */
  get answered() {
    return this.turns.filter((turn) => turn.answered);
  }

  add(question, items) {
    this.#empty.remove();
    const turn = new Turn(this.turns.length + 1, question, items);
    this.turns.push(turn);
    this.#log.append(turn.element);
    return turn;
  }

  clear() {
    for (const item of this.turns.flatMap((turn) => turn.items)) URL.revokeObjectURL(item.url);
    this.turns = [];
    this.#log.replaceChildren(this.#empty);
  }
}
