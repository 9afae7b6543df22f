// The figure of a request's stages and their times.

import { barFigure } from "./bar.js";
import { seconds } from "./format.js";

/** Return the figure for an answer's `timings`. */
export function timingsFigure(timings) {
  const stages = {
    fetch: timings.fetch_s,
    preprocess: timings.preprocess_s,
    queue: timings.queue_s,
    tower: timings.tower_s,
    prefill: Math.max(0, timings.prefill_s - timings.tower_s), // prefill_s includes the tower's time
    decode: timings.decode_s,
  };
  const known = Object.values(stages).reduce((sum, stage) => sum + stage, 0);
  stages.other = Math.max(0, timings.total_s - known);
  const parts = Object.entries(stages).map(([name, size]) => ({
    name,
    size,
    className: `stage-${name}`,
    text: seconds(size),
  }));
  return barFigure(`Time: ${seconds(timings.total_s)}`, parts);
}
