// The figure of the tokens of a prompt, its media and the answer.

import { barFigure } from "./bar.js";

/** Return the figure for an answer's `usage` and `media_spans`. `names` are the names of all items in order, or null if
 * they are not known. The first items have no span if the service dropped them. */
export function tokensFigure(usage, spans, names) {
  const parts = [];
  const dropped = names ? names.length - spans.length : 0;
  let at = 0;
  const text = (stop) => {
    if (stop > at) parts.push({ name: "", size: stop - at, className: "tokens-text" });
  };
  spans.forEach(({ type, start, stop, features, block }, index) => {
    text(start);
    parts.push({
      name: `${type} ${names?.[dropped + index] ?? ""}`.trim(),
      size: stop - start,
      className: `tokens-${type}`,
      text: `at ${start} to ${stop - 1}, ${features} ${features === 1 ? "feature" : "features"}, block ${block}`,
    });
    at = stop;
  });
  text(usage.prompt_tokens);
  parts.push({
    name: "answer",
    size: usage.completion_tokens,
    className: "tokens-answer",
    text: `at ${usage.prompt_tokens} to ${usage.total_tokens - 1}`,
  });
  const cached = usage.prompt_tokens_details.cached_tokens;
  const kept = cached ? ` (the first ${cached} from the prefix cache)` : "";
  const lost = dropped ? `; ${dropped} ${dropped === 1 ? "item" : "items"} dropped` : "";
  return barFigure(`Tokens: ${usage.prompt_tokens} in the prompt${kept}, ${usage.completion_tokens} in the answer${lost}`, parts);
}
