// A growing text, shown as Markdown.

import { finish, markdown } from "./markdown.js";

const SHARE = 5; // while a text grows, the page draws it in a sixth of the time

export class Text {
  element;
  #copy;
  #text = "";
  #timer = null;
  #pause_ms = 0;

  /** Show a text in the element `shown`. `copy` is a function of the code in a block whose button is pressed. */
  constructor(shown, copy) {
    this.element = shown;
    shown.classList.add("markdown");
    this.#copy = copy;
  }

  /** Show `text` soon. Calls in quick succession draw only the last text. */
  set(text) {
    if (text === this.#text) return;
    this.#text = text;
    this.#timer ??= setTimeout(() => this.#draw(), this.#pause_ms);
  }

  /** Show the text at once, with colors and buttons at its code. */
  end() {
    this.#draw();
    finish(this.element, this.#copy);
  }

  #draw() {
    const started = performance.now();
    clearTimeout(this.#timer);
    this.#timer = null;
    this.element.replaceChildren(markdown(this.#text));
    this.#pause_ms = SHARE * (performance.now() - started);
  }
}
