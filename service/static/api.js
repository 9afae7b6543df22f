// Requests to the service's public API, with paths relative to this page.

import { authorization } from "./key.js";

/** An error with a message for the user. `status` is the HTTP status, or 0 if there was no answer. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const getJSON = async (path) => (await call(path)).json();
export const getText = async (path) => (await call(path)).text();

/** Yield the chunks of a streamed chat completion. */
export async function* chat(body, signal) {
  const answer = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  try {
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
      yield chunk;
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // browsers report a broken connection as a TypeError
  }
  throw new ApiError("The connection to the service ended before the answer was complete.", 0);
}

async function call(path, { headers = {}, ...options } = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...headers, ...authorization() }, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The service cannot be reached.", 0);
  }
  if (answer.ok) return answer;
  throw new ApiError(await words(answer), answer.status);
}

async function words(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The service answered with status ${answer.status}.`;
  }
}

/** Yield the data of server-sent events. Each event has one data line. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split(/\r?\n/);
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
