// Media and documents of a question: files that were chosen, dropped, pasted or recorded.

import { newId } from "./conversation.js";
import { element, icon } from "./dom.js";
import { bytes } from "./format.js";

// The same extensions as in mindie_mm/media/endings.py.
const BY_ENDING = {
  image: /\.(jpg|jpeg|jpe|jfif|png|apng|webp|gif|bmp|tif|tiff|avif|avifs|heic|heif|hif|jp2|j2k|jpc|jpf|jpx|j2c|ico|ppm|pgm|pbm|pnm|pfm)$/i,
  video: /\.(mp4|m4v|mov|qt|3gp|3g2|f4v|mkv|webm|avi|wmv|asf|ts|m2t|m2ts|mts|flv|mpg|mpeg|mpe|m2p|vob|dv|dif|ogv|ivf|h264|264|avc|h265|265|hevc)$/i,
  audio: /\.(wav|flac|mp3|mp2|aac|adts|ogg|oga|opus|m4a|m4b|mka|weba|aiff|aif|aifc|wma|caf|w64|au|snd|sph|amr|awb)$/i,
};
const TEXT_BYTES = 65536; // a file without null bytes in its beginning is a text
const PART = { image: "image_url", video: "video_url", audio: "audio_url" };

/** A media item, or a document of kind "file". */
export class Item {
  constructor(file, kind, id = newId()) {
    this.id = id;
    this.file = file;
    this.kind = kind;
    this.name = file.name || kind;
    this.url = URL.createObjectURL(file);
  }

  /** The item for the store. */
  get record() {
    const { id, kind, file } = this;
    return { id, kind, file };
  }

  /** Return the item as a part of a chat message. */
  async part() {
    if (this.kind === "file") {
      return { type: "file", file: { filename: this.name, file_data: await dataURL(this.file) } };
    }
    const type = PART[this.kind];
    return { type, [type]: { url: await dataURL(this.file) } };
  }

  /** Return an element that shows or plays the item. */
  view() {
    if (this.kind === "file") return element("a", { href: this.url, download: this.name, class: "button" }, icon("attach"), this.name);
    if (this.kind === "image") return element("img", { src: this.url, alt: this.name });
    return element(this.kind, { src: this.url, controls: true, "aria-label": this.name });
  }
}

export class Items {
  #list;
  #say;
  #found = [];
  #added = Promise.resolve();

  /** Create an empty collection that is shown in `list`. `say` is called with status messages. */
  constructor(list, say) {
    this.#list = list;
    this.#say = say;
  }

  /** Add files, after those that are still being read. */
  add(files) {
    const chosen = [...files]; // a copy, because the caller empties the list
    this.#added = this.#added.then(() => this.#add(chosen));
  }

  /** Remove and return all items. */
  async take() {
    await this.#added;
    const taken = this.#found;
    this.#found = [];
    this.#list.replaceChildren();
    return taken;
  }

  async #add(files) {
    const added = [];
    const refused = [];
    const unread = [];
    for (const file of files) {
      const data = await file.arrayBuffer().catch(() => null);
      const kind = data && kindOf(file, new Uint8Array(data, 0, Math.min(TEXT_BYTES, data.byteLength)));
      if (kind) this.#insert(new Item(copyOf(file, data, kind), kind), this.#found.length);
      (kind ? added : data ? refused : unread).push(file.name);
    }
    const said = { "Attached": added, "Not an image, video, audio, PDF or text file": refused, "Cannot be read": unread };
    const told = Object.entries(said).filter(([, names]) => names.length);
    this.#say(told.map(([what, names]) => `${what}: ${names.join(", ")}.`).join(" "));
  }

  /** Restore copies of an unanswered question's items, before newer items. The conversation keeps the originals. */
  putBack(items) {
    items.forEach(({ file, kind }, at) => this.#insert(new Item(file, kind), at));
  }

  #insert(item, at) {
    this.#found.splice(at, 0, item);
    const remove = element("button", { type: "button", "aria-label": `Remove ${item.name}` }, "Remove");
    const facts = element("span", { class: "quiet" }, ` ${item.kind === "file" ? "document" : item.kind}, ${bytes(item.file.size)}`);
    const name = item.kind === "file" ? "" : item.name; // the view has the name of a document
    const row = element("li", {}, item.view(), element("span", {}, name, facts));
    if (item.kind === "video") row.append(sendsOnlyAudio(item));
    row.append(remove);
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

/** Return a checkbox to send a video file as audio. Browsers go by extensions such as .mp4, which audio files also have. */
function sendsOnlyAudio(item) {
  const box = element("input", { type: "checkbox" });
  box.addEventListener("change", () => (item.kind = box.checked ? "audio" : "video"));
  return element("label", {}, box, " Send only the audio");
}

/** Return a file as a data: URL. */
export function dataURL(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** Return a copy of the file. A file that is changed, moved or removed could not be read again for a later question. */
function copyOf(file, data, kind) {
  const type = kind === "file" && !isPDF(file) ? "text/plain" : file.type;
  return new File([data], file.name, { type });
}

const isPDF = ({ name, type }) => type === "application/pdf" || /\.pdf$/i.test(name);

/** Return the kind of the file, which begins with the bytes `head`, or undefined. */
function kindOf(file, head) {
  const stated = file.type.split("/")[0];
  const kind = stated in PART ? stated : Object.keys(BY_ENDING).find((one) => BY_ENDING[one].test(file.name));
  const isText = head.length > 0 && !head.includes(0);
  if (kind === "video" && isText) return "file"; // TypeScript has the extension of an MPEG transport stream
  return kind ?? (isPDF(file) || isText ? "file" : undefined);
}
