// Media that wait to be asked about: chosen, dropped, pasted or recorded.

import { element } from "./dom.js";
import { bytes } from "./format.js";

const BY_ENDING = {
  image: /\.(jpe?g|png|webp|gif|bmp|tiff?)$/i,
  video: /\.(mp4|m4v|mov|webm|mkv|avi|wmv|ts|flv)$/i,
  audio: /\.(wav|flac|mp3|m4a|aac|ogg|oga|opus|aiff?|wma)$/i,
};
const PART = { image: "image_url", video: "video_url", audio: "audio_url" };

/** One media item. */
export class Item {
  constructor(file, kind) {
    this.file = file;
    this.kind = kind;
    this.name = file.name || kind;
    this.url = URL.createObjectURL(file);
  }

  /** As a part of a chat message. */
  async part() {
    const type = PART[this.kind];
    return { type, [type]: { url: await dataURL(this.file) } };
  }

  /** What shows or plays it. */
  view() {
    if (this.kind === "image") return element("img", { src: this.url, alt: this.name });
    return element(this.kind, { src: this.url, controls: true, "aria-label": this.name });
  }
}

export class Items {
  #list;
  #say;
  #found = [];

  /** Shows them in `list`; `say` takes what happened, in words. */
  constructor(list, say) {
    this.#list = list;
    this.#say = say;
  }

  add(files) {
    const refused = [];
    const before = this.#found.length;
    for (const file of files) {
      const kind = kindOf(file);
      if (kind) this.#insert(new Item(file, kind), this.#found.length);
      else refused.push(file.name);
    }
    const added = this.#found.slice(before).map((item) => item.name);
    const said = added.length ? [`Attached: ${added.join(", ")}.`] : [];
    if (refused.length) said.push(`No picture, video or sound: ${refused.join(", ")}.`);
    this.#say(said.join(" "));
  }

  /** All of them, which are then the caller's. */
  take() {
    const taken = this.#found;
    this.#found = [];
    this.#list.replaceChildren();
    return taken;
  }

  /** Those of a question that was not answered, before what has come since; the conversation keeps its own. */
  putBack(items) {
    items.forEach(({ file, kind }, at) => this.#insert(new Item(file, kind), at));
  }

  #insert(item, at) {
    this.#found.splice(at, 0, item);
    const remove = element("button", { type: "button", "aria-label": `Remove ${item.name}` }, "Remove");
    const row = element(
      "li",
      {},
      item.view(),
      element("span", {}, item.name, element("span", { class: "quiet" }, ` ${item.kind}, ${bytes(item.file.size)}`)),
      remove,
    );
    remove.addEventListener("click", () => {
      this.#found.splice(this.#found.indexOf(item), 1);
      URL.revokeObjectURL(item.url);
      const next = row.nextElementSibling ?? row.previousElementSibling;
      row.remove();
      (next?.querySelector("button") ?? document.getElementById("files")).focus();
      this.#say(`Removed: ${item.name}.`);
    });
    this.#list.insertBefore(row, this.#list.children[at] ?? null);
  }
}

/** A file as a data: URL. */
export function dataURL(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

function kindOf(file) {
  const stated = file.type.split("/")[0];
  if (stated in PART) return stated;
  return Object.keys(BY_ENDING).find((kind) => BY_ENDING[kind].test(file.name));
}
