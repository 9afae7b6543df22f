// Export of a conversation as the body of a request to /v1/chat/completions, which repeats its last question.

import { element } from "./dom.js";

/** Offer the shown turns of the conversation as a JSON file. */
export async function download(conversation) {
  const body = { messages: await conversation.messages(conversation.path) };
  const url = URL.createObjectURL(new Blob([JSON.stringify(body, null, 2)], { type: "application/json" }));
  element("a", { href: url, download: `${conversation.title.replace(/[^\p{L}\p{N} -]/gu, "").trim() || "conversation"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url)); // the browser has begun the download
}
