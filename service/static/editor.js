// Editing of a text in place, such as a question or the title of a conversation.

import { element } from "./dom.js";

/**
 * Replace `shown` by a field with `text` until the user saves or cancels. `save` is called with a changed text that is
 * not empty. `labels` are the name of the field and of the button that saves. Escape cancels.
 */
export function edit(shown, text, [name, verb], save) {
  const field = element("textarea", { "aria-label": name, rows: 1 });
  const cancel = element("button", { type: "button" }, "Cancel");
  const form = element("form", { class: "editor" }, field, element("div", { class: "tools" }, element("button", {}, verb), cancel));
  field.value = text;
  const before = document.activeElement;
  const end = () => {
    form.replaceWith(shown);
    before?.focus();
  };
  cancel.addEventListener("click", end);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    end();
    const changed = field.value.trim();
    if (changed && changed !== text) save(changed);
  });
  form.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") end();
    else if (event.key === "Enter" && !event.shiftKey && event.target === field) {
      event.preventDefault();
      form.requestSubmit();
    } else return;
    event.stopPropagation();
  });
  shown.replaceWith(form);
  field.focus();
}
