// Markdown as elements. The text of a model is not trusted: HTML in it stays text, and the result is sanitized.

import { element, iconButton } from "./dom.js";
import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js"; // sets the global DOMPurify

const none = () => undefined;
const parser = new Marked({
  breaks: true,
  tokenizer: { html: none, tag: none },
  renderer: {
    // An image would be loaded from another host, so it becomes a link.
    image({ href, text }) {
      return parser.parseInline(`[${text || href}](<${href}>)`);
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});
const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Return a node that shows `text`. Text that is nested too deeply is shown as it is. */
export function markdown(text) {
  let html;
  try {
    html = parser.parse(text);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return element("pre", {}, text);
  }
  const made = DOMPurify.sanitize(html, ALLOWED);
  for (const link of made.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const wide of made.querySelectorAll("pre, table")) {
    const frame = element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": wide.tagName === "PRE" ? "Code" : "Table" });
    wide.replaceWith(frame);
    frame.append(wide);
  }
  return made;
}

/** Add colors and buttons to the code blocks in `shown`. `copy` is a function of the code. */
export async function finish(shown, copy) {
  const blocks = [...shown.querySelectorAll("pre > code")];
  for (const block of blocks) {
    block.closest(".wide").before(
      element("div", { class: "code-head quiet" }, languageOf(block), iconButton("copy", "Copy code", () => copy(block.textContent))),
    );
  }
  if (!blocks.some(languageOf)) return;
  const { default: highlighter } = await import("./vendor/highlight.js"); // large, and seldom needed
  for (const block of blocks) if (highlighter.getLanguage(languageOf(block))) highlighter.highlightElement(block);
}

const languageOf = (block) => /language-(\S+)/.exec(block.className)?.[1] ?? "";
