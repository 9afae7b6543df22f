// Example questions, with small media that the page brings along.

import { element, icon } from "./dom.js";
import { Item } from "./items.js";

const EXAMPLES = [
  { question: "What is in the image?", kind: "image", name: "image.png", symbol: "photo" },
  { question: "Which way does the shape move?", kind: "video", name: "video.mp4", symbol: "video" },
  { question: "How many beeps do you hear?", kind: "audio", name: "audio.ogg", symbol: "audio" },
  { question: "Hello!", symbol: "new" },
];

/** Add buttons for the examples to `place`. `ask` is a function of a question and its items. */
export function showExamples(place, ask) {
  place.append(...EXAMPLES.map((example) => button(example, ask)));
}

function button({ question, kind, name, symbol }, ask) {
  const made = element("button", { type: "button" }, icon(symbol), question);
  made.addEventListener("click", async () => ask(question, name ? [new Item(await load(name), kind)] : []));
  return made;
}

async function load(name) {
  const blob = await (await fetch(`static/examples/${name}`)).blob();
  return new File([blob], name, { type: blob.type });
}
