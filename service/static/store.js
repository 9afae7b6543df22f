// Conversations in the browser's IndexedDB, which also holds media that are too large for local storage.

const NAME = "mindie_mm";
const VERSION = 1;
const PARTS = ["turns", "items"];

export class Store {
  #database = opened();

  /** Return all conversations without their turns, the last changed one first. */
  async conversations() {
    const all = await this.#request("conversations", (store) => store.getAll());
    return all.sort((one, other) => other.changed - one.changed);
  }

  /** Return the conversation with its `turns` and `items`, or null. */
  async conversation(id) {
    const found = await this.#request("conversations", (store) => store.get(id));
    if (!found) return null;
    const [turns, items] = await Promise.all(
      PARTS.map((part) => this.#request(part, (store) => store.index("conversation").getAll(id))),
    );
    return { ...found, turns, items };
  }

  /** Add or replace records of `conversations`, `turns` and `items`, either all or none of them. */
  async put(records) {
    const transaction = (await this.#database).transaction(Object.keys(records), "readwrite");
    for (const [part, added] of Object.entries(records)) added.forEach((record) => transaction.objectStore(part).put(record));
    await ended(transaction);
  }

  /** Delete records of `turns` and `items` with the given ids, either all or none of them. */
  async remove(ids) {
    const transaction = (await this.#database).transaction(Object.keys(ids), "readwrite");
    for (const [part, removed] of Object.entries(ids)) removed.forEach((id) => transaction.objectStore(part).delete(id));
    await ended(transaction);
  }

  /** Delete a conversation with its turns and items. */
  async delete(id) {
    const transaction = (await this.#database).transaction(["conversations", ...PARTS], "readwrite");
    transaction.objectStore("conversations").delete(id);
    for (const part of PARTS) {
      const keys = transaction.objectStore(part).index("conversation").getAllKeys(id);
      keys.onsuccess = () => keys.result.forEach((key) => transaction.objectStore(part).delete(key));
    }
    await ended(transaction);
  }

  async #request(part, make) {
    const transaction = (await this.#database).transaction(part);
    const request = make(transaction.objectStore(part));
    await ended(transaction);
    return request.result;
  }
}

function opened() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    for (const part of PARTS) request.result.createObjectStore(part, { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function ended(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
}
