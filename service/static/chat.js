// The chat: it shows a conversation, sends questions, and keeps the answers.

import { chat as stream } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { seconds } from "./format.js";
import { TurnView } from "./turn.js";

const MERGED = ["answer", "reasoning"];
const SAME = " The answer is the same as before. For other answers, set a higher temperature in the settings.";

export class Chat {
  conversation = new Conversation();
  #log = byId("turns");
  #empty = byId("empty");
  #views = new Map();
  #answering = null; // the conversation whose answer is arriving
  #outside;
  #actions;

  /**
   * Create the chat. `outside` has what it needs from the page: `composer`, `settings`, `store`, `watch`, `end`,
   * `copy`, a function of a text, `kept`, which is called after a change in the store, and `refused`, which is called
   * if the service requires a key.
   */
  constructor(outside) {
    this.#outside = outside;
    this.#actions = {
      copy: outside.copy,
      edit: async (turn) => {
        if (await this.#keep(turn)) outside.composer.say("Saved.");
      },
      ask: (turn, question) => this.#run(turn.parent, { question, items: this.conversation.itemsOf(turn) }, turn),
      regenerate: (turn) => {
        const { question, results, answer: before } = turn;
        return this.#run(turn.parent, { question, items: this.conversation.itemsOf(turn), results, before }, turn);
      },
      results: (turn, results) => this.#run(turn.id, { results }, turn),
      choose: (turn) => {
        this.conversation.choose(turn);
        this.show();
        this.#focus(turn, ".versions button:enabled");
        this.#keep();
      },
    };
  }

  /** Show another conversation. An answer that is still arriving continues in the background. */
  open(conversation) {
    if (conversation === this.conversation) return;
    if (!this.#outside.composer.busy) {
      this.conversation.close();
      this.#views.clear();
      this.#outside.composer.say("");
    }
    this.conversation = conversation;
    this.show();
    this.#outside.end.go();
  }

  /** Keep nothing more of a conversation that the user deletes. An answer that is arriving ends. */
  drop(conversation) {
    if (!conversation) return;
    conversation.isDeleted = true;
    if (this.#answering === conversation) this.#outside.composer.stop();
  }

  /** Show the selected turns of the conversation. Turns that stay are not inserted again: they keep focus and media. */
  show() {
    const path = this.conversation.path;
    const wanted = path.length ? path.map((turn, at) => this.#view(turn, at).element) : [this.#empty];
    const shown = [...this.#log.children];
    const same = wanted.findIndex((element, at) => element !== shown[at]);
    const kept = same < 0 ? wanted.length : same;
    shown.slice(kept).forEach((element) => element.remove());
    this.#log.append(...wanted.slice(kept));
  }

  /** Move the focus to an element of a turn if the focused element is no longer shown. */
  #focus(turn, selector) {
    if (document.activeElement !== document.body) return;
    this.#views.get(turn)?.element.querySelector(selector)?.focus({ preventScroll: true });
  }

  /** Send a question, and show the answer as it arrives. Return whether there is an answer. */
  async ask(question, items, signal) {
    return !(await this.#send(this.conversation.path.at(-1)?.id ?? null, { question, items }, signal));
  }

  #view(turn, at) {
    const view = this.#views.get(turn) ?? new TurnView(turn, this.conversation.itemsOf(turn), at + 1, this.#actions);
    this.#views.set(turn, view);
    view.showVersions(this.conversation.siblings(turn.parent));
    return view;
  }

  /** Send what a button of the turn `from` asks. If there is no answer, show that turn again. */
  async #run(parent, asked, from) {
    const { conversation } = this;
    const { composer } = this.#outside;
    const failure = await composer.run((signal) => this.#send(parent, asked, signal));
    if (failure === "") {
      this.#focus(conversation.path.at(-1), '[aria-label="Regenerate answer"]');
      return;
    }
    if (failure) {
      conversation.choose(from);
      this.#keep(null, conversation); // the store has the new turn as the selected one
      this.show();
      composer.say(failure);
    }
    if (asked.question && asked.question !== from.question) composer.putBack(asked.question, []);
  }

  /** Send a turn and return an empty text, or why there is no answer. */
  async #send(parent, asked, signal) {
    const { composer, settings, watch, end, refused } = this.#outside;
    const { conversation } = this;
    conversation.system = settings.system;
    const turn = conversation.add(parent, asked);
    this.show();
    end.go();
    const path = conversation.path;
    const view = this.#view(turn, path.length - 1);
    const items = path.flatMap((one) => conversation.itemsOf(one));
    // Pages of a document are images of their own, so that the number of spans says nothing about the items.
    const names = items.some(({ kind }) => kind === "file") ? null : items.map(({ name }) => name);
    const told = { reason: null, usage: null, spans: [], timings: null, names };
    watch.start();
    this.#answering = conversation;
    composer.say("Asking.");
    this.#keep(turn, conversation); // the user may close the page before the answer ends
    try {
      const turns = settings.earlier ? path : path.slice(-1);
      const messages = await conversation.messages(turns);
      const body = { ...settings.fields, messages, timings: true, media_spans: true, stream_options: { include_usage: true } };
      for await (const chunk of stream(body, signal)) {
        if (chunk.media_spans) watch.own(chunk.media_spans);
        take(chunk, turn, told);
        view.draw();
      }
    } catch (error) {
      if (error.name === "AbortError") told.reason = "stopped";
      else told.error = error.message;
      if (error.status === 401) refused();
    }
    watch.stop();
    this.#answering = null;
    const failure = told.error ?? (told.reason === "stopped" ? "Stopped." : "");
    if (failure && !turn.answer && !turn.reasoning) {
      this.#remove(turn, conversation);
      view.fail(failure);
      composer.say(told.error ? "" : failure); // the view has the error
      return failure;
    }
    turn.end = told;
    view.end();
    const same = turn.answer && turn.answer === asked.before ? SAME : "";
    const done = (told.timings ? `Answered in ${seconds(told.timings.total_s)}.` : "Answered.") + same;
    if (await this.#keep(turn, conversation)) composer.say(told.error ? "" : failure || done);
    return "";
  }

  /** Remove a turn that has no answer, also from the store. */
  async #remove(turn, conversation) {
    const { store, kept } = this.#outside;
    conversation.remove(turn);
    const used = new Set(conversation.turns.flatMap(({ items }) => items));
    try {
      if (conversation.turns.length) await store.remove({ turns: [turn.id], items: turn.items.filter((id) => !used.has(id)) });
      else await store.delete(conversation.id);
      kept();
    } catch {
      // The store has nothing to remove, because it could not keep the question.
    }
  }

  /**
   * Keep the conversation in the store, with a turn that has changed and turns that could not be kept before. Return
   * whether this worked.
   */
  async #keep(changed = null, conversation = this.conversation) {
    const { store, composer, kept } = this.#outside;
    if (conversation.isDeleted) return true;
    try {
      const { id, record } = conversation;
      const added = conversation.turns.filter((turn) => !conversation.kept.has(turn));
      const items = added.flatMap((turn) => conversation.itemsOf(turn).map((item) => ({ ...item.record, conversation: id })));
      const turns = !changed || added.includes(changed) ? added : [...added, changed];
      await store.put({ conversations: [record], turns, items });
      added.forEach((turn) => conversation.kept.add(turn));
      kept();
      return true;
    } catch (error) {
      composer.say(`The browser does not keep this conversation after you close the page: ${error.message}`);
      return false;
    }
  }
}

/** Add a chunk of the stream to the turn and to the facts about its answer. */
function take(chunk, turn, told) {
  told.spans = chunk.media_spans ?? told.spans;
  told.usage = chunk.usage ?? told.usage;
  told.timings = chunk.timings ?? told.timings;
  const [choice] = chunk.choices;
  if (!choice) return;
  told.reason = choice.finish_reason ?? told.reason;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  MERGED.forEach((name, at) => (turn[name] += [content, reasoning][at] ?? ""));
  for (const { index, id, function: called } of calls ?? []) {
    const call = (turn.calls[index] ??= { id: "", name: "", text: "" });
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.text += called?.arguments ?? "";
  }
}
