// The API key and its form. The key is kept in the tab's session storage and sent only to this service.

import { byId } from "./dom.js";

const NAME = "mindie_mm.key";

/** Return the request headers with the API key, or none. */
export function authorization() {
  const key = sessionStorage.getItem(NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export class KeyForm {
  #form = byId("key-form");
  #field = byId("key");
  #button = byId("key-button");

  /** Create the form. `changed` is called after each change of the key. */
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

  /** Ask for a key, after the service has refused a request. `focus` states whether to focus the form. */
  ask(focus = true) {
    const known = sessionStorage.getItem(NAME) !== null;
    byId("key-why").textContent = known
      ? "The service does not accept this API key. Enter another key."
      : "This service requires an API key. The key is kept until you close this tab, and is sent only to this service.";
    this.#show(true, focus);
  }

  #show(shown, focus = true) {
    this.#form.hidden = !shown;
    this.#button.setAttribute("aria-expanded", shown);
    if (focus) (shown ? this.#field : this.#button).focus();
  }
}
