// A conversation: a tree of turns, because a question that is asked again in other words starts a new branch.

import { Item } from "./items.js";

const TITLE_CHARACTERS = 60;
const MISSING = "The answer is missing: the page was closed before it was complete, or another tab is still receiving it.";

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

export class Conversation {
  id;
  title;
  system;
  turns;
  /** Items by id. */
  items;
  /** Turns that the store has. */
  kept;
  /** Whether the user has deleted the conversation. */
  isDeleted = false;
  /** The id of the selected turn, by the id of its parent. */
  #chosen;

  /** Create a conversation, from a record of the store if there is one. */
  constructor({ id = newId(), title = "", system = "", turns = [], items = [], chosen = {} } = {}) {
    this.id = id;
    this.title = title;
    this.system = system;
    this.turns = turns.sort((one, other) => one.created - other.created);
    for (const turn of turns) turn.end ??= { error: MISSING };
    this.kept = new Set(turns);
    this.items = new Map(items.map(({ id: key, file, kind }) => [key, new Item(file, kind, key)]));
    this.#chosen = chosen;
  }

  /** The conversation for the store, without its turns and items. */
  get record() {
    const { id, title, system } = this;
    return { id, title, system, chosen: this.#chosen, changed: Date.now() };
  }

  /** The selected turns, from the first to the last. */
  get path() {
    const path = [];
    for (let parent = null; ; ) {
      const { turns, at } = this.siblings(parent);
      if (!turns.length) return path;
      path.push(turns[at]);
      parent = turns[at].id;
    }
  }

  /** Return the turns that follow the turn `parent`, and the index of the selected one. */
  siblings(parent) {
    const turns = this.turns.filter((turn) => turn.parent === parent);
    const at = turns.findIndex(({ id }) => id === this.#chosen[parent]);
    return { turns, at: at < 0 ? turns.length - 1 : at };
  }

  /** Select a turn among its siblings. */
  choose(turn) {
    this.#chosen[turn.parent] = turn.id;
  }

  /** Add a turn after the turn `parent`, and select it. `asked` has the question and the items, or results of tools. */
  add(parent, { question = "", items = [], results = null }) {
    for (const item of items) this.items.set(item.id, item);
    const turn = {
      id: newId(),
      conversation: this.id,
      parent,
      created: Date.now(),
      question,
      items: items.map((item) => item.id),
      results,
      answer: "",
      reasoning: "",
      calls: [],
      end: null,
    };
    this.turns.push(turn);
    this.choose(turn);
    this.title ||= question.slice(0, TITLE_CHARACTERS) || items[0]?.name || "";
    return turn;
  }

  /** Remove a turn that has no answer. */
  remove(turn) {
    this.turns = this.turns.filter((one) => one !== turn);
  }

  itemsOf(turn) {
    return turn.items.map((id) => this.items.get(id));
  }

  /** Return turns as chat messages, after the system prompt. */
  async messages(turns) {
    const system = this.system ? [{ role: "system", content: this.system }] : [];
    return [...system, ...(await Promise.all(turns.map((turn) => this.#messages(turn)))).flat()];
  }

  async #messages(turn) {
    const asked = turn.results?.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content })) ?? [await this.#question(turn)];
    if (!turn.end) return asked;
    if (!turn.answer && !turn.reasoning && !turn.calls.length) return turn.results ? asked : []; // the answer is missing
    const calls = turn.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    const answer = { role: "assistant", content: turn.answer || (calls.length ? null : "") };
    return [...asked, calls.length ? { ...answer, tool_calls: calls } : answer];
  }

  async #question(turn) {
    const parts = await Promise.all(this.itemsOf(turn).map((item) => item.part()));
    if (turn.question) parts.push({ type: "text", text: turn.question });
    return { role: "user", content: parts };
  }

  /** Release the memory of the items' URLs. */
  close() {
    for (const item of this.items.values()) URL.revokeObjectURL(item.url);
  }
}
