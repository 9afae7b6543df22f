// The list of the conversations that the browser keeps.

import { byId, element, iconButton } from "./dom.js";
import { edit } from "./editor.js";

export class Chats {
  #list = byId("chats");
  #search = byId("search");
  #actions;
  #all = [];

  /** Create the list. `actions` has the functions `rename`, `download` and `remove` of a conversation's record. */
  constructor(actions) {
    this.#actions = actions;
    this.#search.addEventListener("input", () => this.#draw());
  }

  /** Show the conversations `all`. The one with the id `current` is open. */
  show(all, current) {
    this.#all = all;
    this.#draw(current);
  }

  /** Mark the conversation with the id `current` as open. */
  mark(current) {
    for (const link of this.#list.querySelectorAll("a")) {
      if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  #draw(current = this.#list.querySelector("[aria-current]")?.hash.slice(1)) {
    const sought = this.#search.value.trim().toLowerCase();
    const found = this.#all.filter(({ title }) => title.toLowerCase().includes(sought));
    this.#list.replaceChildren(...found.map((record) => this.#row(record)));
    byId("no-chats").hidden = found.length > 0;
    this.mark(current);
  }

  #row(record) {
    const { id, title } = record;
    const link = element("a", { href: `#${id}` }, title || "Untitled");
    const rename = () => edit(link, title, ["Title", "Rename"], (changed) => this.#actions.rename(record, changed));
    return element(
      "li",
      {},
      link,
      iconButton("edit", `Rename ${title}`, rename),
      iconButton("download", `Export ${title}`, () => this.#actions.download(record)),
      iconButton("remove", `Delete ${title}`, () => this.#actions.remove(record)),
    );
  }
}
