// Charts of queue and throughput, from the service's metrics.

import { byId } from "./dom.js";
import { Chart } from "./chart.js";

const PREFIX = "mindie_mm:";

export class Load {
  #queue = new Chart(byId("queue"), [
    { name: "Running", className: "line-one" },
    { name: "Waiting", className: "line-two" },
  ]);
  #throughput = new Chart(
    byId("throughput"),
    [
      { name: "Answer tokens", className: "line-one" },
      { name: "Prompt tokens", className: "line-two" },
    ],
    "/s",
  );
  #last = null;

  /** Update the charts with the text of /metrics from `at` seconds. */
  update(text, at) {
    const found = sums(text);
    const value = (name) => found.get(PREFIX + name) ?? 0;
    this.#queue.push(at, [value("num_requests_running"), value("num_requests_waiting")]);
    const counts = [value("generation_tokens_total"), value("prompt_tokens_total")];
    const last = this.#last;
    // Counters decrease only if the service has been restarted.
    if (last && at > last.at && counts.every((count, index) => count >= last.counts[index])) {
      this.#throughput.push(at, counts.map((count, index) => (count - last.counts[index]) / (at - last.at)));
    }
    this.#last = { at, counts };
  }
}

/** Parse Prometheus' text format. Return a map from each metric's name to the sum of its series. */
function sums(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{.*\})? (\S+)$/.exec(line);
    if (match) found.set(match[1], (found.get(match[1]) ?? 0) + Number(match[2]));
  }
  return found;
}
