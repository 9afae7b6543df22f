// The settings: system prompt, sampling parameters, other fields of the request, and the theme.

import { byId } from "./dom.js";

const NAME = "mindie_mm.settings";

export class Settings {
  #dialog = byId("settings");
  #form = byId("settings-form");

  /** Create the form, with the values that the browser has kept. */
  constructor() {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    for (const field of this.#fields) if (field.name in kept) write(field, kept[field.name]);
    byId("settings-button").addEventListener("click", () => this.#dialog.showModal());
    this.#form.addEventListener("input", () => this.#changed());
    this.#form.addEventListener("reset", () => setTimeout(() => this.#changed())); // fields are reset after the event
    this.#changed();
  }

  get system() {
    return byId("system").value.trim();
  }

  /** Show the system prompt of another conversation. */
  set system(text) {
    byId("system").value = text;
    this.#changed();
  }

  /** Whether to send the earlier turns. */
  get earlier() {
    return byId("earlier").checked;
  }

  /** The request's fields that the user has set. */
  get fields() {
    const numbers = this.#fields.filter(({ type, value }) => type === "number" && value);
    const stop = byId("stops").value.split("\n").filter((line) => line);
    const fields = Object.fromEntries(numbers.map(({ name, valueAsNumber }) => [name, valueAsNumber]));
    return { ...fields, ...(stop.length && { stop }), ...JSON.parse(byId("other").value || "{}") };
  }

  /** Return whether all settings are valid. If not, show the first invalid one. */
  check() {
    if (this.#form.checkValidity()) return true;
    this.#dialog.showModal();
    this.#form.reportValidity();
    return false;
  }

  get #fields() {
    return [...this.#form.elements].filter(({ name }) => name);
  }

  #changed() {
    const set = this.#fields.filter((field) => read(field) !== initial(field));
    localStorage.setItem(NAME, JSON.stringify(Object.fromEntries(set.map((field) => [field.name, read(field)]))));
    document.documentElement.dataset.theme = byId("theme").value;
    byId("other").setCustomValidity(problem(byId("other").value));
  }
}

const read = (field) => (field.type === "checkbox" ? field.checked : field.value);

const initial = (field) => (field.type === "checkbox" ? field.defaultChecked : field.tagName === "SELECT" ? field.options[0].value : field.defaultValue);

function write(field, value) {
  if (field.type === "checkbox") field.checked = value;
  else field.value = value;
}

/** Return why the text is no JSON object, or an empty text. */
function problem(text) {
  try {
    const value = JSON.parse(text || "{}");
    return value && typeof value === "object" && !Array.isArray(value) ? "" : "This must be a JSON object, such as {\"tools\": []}.";
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}
