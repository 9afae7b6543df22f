// A growing text.

/** The text of an answer in an element. */
export class Text {
  element;

  constructor(shown) {
    this.element = shown;
  }

  /** Show `text`, which usually begins with the text that is shown already. */
  set(text) {
    this.element.textContent = text;
  }

  end() {}
}
