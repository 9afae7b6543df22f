// A turn on the page: a question with its media, and the answer with its buttons.

import { edit } from "./editor.js";
import { element, iconButton } from "./dom.js";
import { Text } from "./text.js";
import { timingsFigure } from "./timings.js";
import { tokensFigure } from "./tokens.js";

export class TurnView {
  #turn;
  #items;
  #actions;
  #asked = element("div", { class: "asked" });
  #fold = element("details", { class: "fold", hidden: true }, element("summary", {}, "Reasoning"));
  #reasoning;
  #text;
  #calls = element("div", { class: "calls" });
  #foot = element("div", { class: "foot" });

  /**
   * Create the view of the `number`th turn. `actions` has the functions `copy`, `edit`, `ask`, `regenerate`, `results`
   * and `choose` for the buttons.
   */
  constructor(turn, items, number, actions) {
    this.#turn = turn;
    this.#items = items;
    this.#actions = actions;
    this.#reasoning = new Text(element("div"), actions.copy);
    this.#fold.append(this.#reasoning.element);
    this.#text = new Text(element("div", { class: "answer", "aria-busy": "true" }), actions.copy);
    const answered = element("div", { class: "answered" }, this.#fold, this.#text.element, this.#calls, this.#foot);
    this.element = element("article", { "aria-label": `Question ${number}` }, this.#asked, answered);
    this.#drawQuestion();
    this.draw();
    if (turn.end) this.end();
  }

  /** Draw the answer as far as it has arrived. */
  draw() {
    const { answer, reasoning, calls } = this.#turn;
    this.#fold.hidden = !reasoning;
    this.#reasoning.set(reasoning);
    this.#text.set(answer);
    calls.slice(this.#calls.childElementCount).forEach(() => this.#calls.append(element("details", { class: "fold" }, element("summary"), element("pre"))));
    calls.forEach(({ name, text }, at) => {
      const [summary, shown] = this.#calls.children[at].children;
      summary.textContent = `Tool call: ${name}`;
      shown.textContent = indented(text);
    });
  }

  /** Finish the answer and show its buttons. */
  end() {
    this.draw();
    this.#text.end();
    this.#reasoning.end();
    this.#text.element.removeAttribute("aria-busy");
    const { reason, error, usage, timings } = this.#turn.end;
    if (reason === "length") this.#note("The answer ended at the maximum number of tokens.");
    if (reason === "stopped") this.#note("Stopped.");
    if (error) this.#note(error, "error", "alert");
    const tools = element("div", { class: "tools quiet" });
    const button = (icon, name, action) => tools.append(iconButton(icon, name, action));
    button("copy", "Copy answer", () => this.#actions.copy(this.#turn.answer));
    button("edit", "Edit answer", () => this.#editAnswer());
    button("again", "Regenerate answer", () => this.#actions.regenerate(this.#turn));
    this.#foot.append(tools);
    if (timings || usage) this.#foot.append(this.#details(tools));
    if (this.#turn.calls.length && reason === "tool_calls") this.#foot.append(this.#resultsForm());
  }

  /** Show an error instead of the answer. */
  fail(message) {
    this.#text.element.remove();
    this.#note(message, "error", "alert");
  }

  /** Show the number of this turn among its siblings, and buttons to the others. */
  showVersions({ turns, at }) {
    this.#asked.querySelector(".versions")?.remove();
    if (turns.length < 2) return;
    const step = (icon, name, to) => {
      const button = iconButton(icon, name, () => this.#actions.choose(turns[to]));
      button.disabled = !turns[to];
      return button;
    };
    const place = element("span", {}, `${at + 1} of ${turns.length}`);
    const versions = element("div", { class: "versions" }, step("left", "Previous version", at - 1), place, step("right", "Next version", at + 1));
    this.#asked.lastElementChild.append(versions);
  }

  #drawQuestion() {
    const { question, results } = this.#turn;
    const text = element("p", { class: "question" }, question);
    const tools = element("div", { class: "tools quiet" });
    if (question) tools.append(iconButton("copy", "Copy question", () => this.#actions.copy(question)));
    if (!results) {
      const ask = (changed) => this.#actions.ask(this.#turn, changed);
      tools.append(iconButton("edit", "Edit question", () => edit(text, question, ["Question to ask instead", "Ask again"], ask)));
    }
    this.#asked.append(
      element("div", { class: "items" }, ...this.#items.map((item) => item.view())),
      ...(results ?? []).map(({ name, content }) =>
        element("details", { class: "fold" }, element("summary", {}, `Result of ${name}`), element("pre", {}, content)),
      ),
      text,
      tools,
    );
  }

  #editAnswer() {
    edit(this.#text.element, this.#turn.answer, ["Answer", "Save"], (changed) => {
      this.#turn.answer = changed;
      this.#text.set(changed);
      this.#text.end();
      this.#actions.edit(this.#turn);
    });
  }

  /** Add a button for the figures to `tools`, and return their hidden container. */
  #details(tools) {
    const figures = element("div", { class: "figures", hidden: true });
    const button = iconButton("details", "Time and tokens", () => {
      const { usage, spans, timings, names } = this.#turn.end;
      if (!figures.childElementCount && timings) figures.append(timingsFigure(timings));
      if (figures.childElementCount < 2 && usage) figures.append(tokensFigure(usage, spans, names));
      figures.hidden = !figures.hidden;
      button.setAttribute("aria-expanded", !figures.hidden);
    });
    button.setAttribute("aria-expanded", false);
    tools.append(button);
    return figures;
  }

  #resultsForm() {
    const fields = this.#turn.calls.map(({ name }) => element("textarea", { rows: 1, "aria-label": `Result of ${name}`, placeholder: `Result of ${name}`, required: true }));
    const form = element("form", { class: "editor" }, ...fields, element("div", { class: "tools" }, element("button", {}, "Send results")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const results = this.#turn.calls.map(({ id, name }, at) => ({ id, name, content: fields[at].value }));
      this.#actions.results(this.#turn, results);
    });
    return form;
  }

  #note(text, className = "quiet", role = null) {
    this.#foot.append(element("p", { class: className, role }, text));
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not all arguments have arrived, or the model wrote invalid JSON
  }
}
