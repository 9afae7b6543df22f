// The API key: typed in here, kept in this tab's session storage, sent to this service alone.

import { byId } from "./dom.js";

const NAME = "mindie_mm.key";

/** What a request's headers bear. */
export function authorization() {
  const key = sessionStorage.getItem(NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export class KeyForm {
  #form = byId("key-form");
  #field = byId("key");
  #button = byId("key-button");

  /** `changed` is called with each new key. */
  constructor(changed) {
    this.#button.addEventListener("click", () => this.#show(this.#form.hidden));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#field.value) sessionStorage.setItem(NAME, this.#field.value.trim());
      else sessionStorage.removeItem(NAME);
      this.#field.value = "";
      this.#show(false);
      changed();
    });
  }

  /** The service has refused the key, or the lack of one. `focus`: whether that is what the reader waits for. */
  ask(focus = true) {
    const known = sessionStorage.getItem(NAME) !== null;
    byId("key-why").textContent = known
      ? "The service does not know this API key. Give another one."
      : "This service asks for an API key. It is kept until this tab is closed, and sent to this service alone.";
    this.#show(true, focus);
  }

  #show(shown, focus = true) {
    this.#form.hidden = !shown;
    this.#button.setAttribute("aria-expanded", shown);
    if (focus) (shown ? this.#field : this.#button).focus();
  }
}
