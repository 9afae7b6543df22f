// A stacked bar, and a legend that gives the same facts as text.

import { element, svg } from "./dom.js";

const WIDTH = 1000;
const LEAST = 2; // minimum width, so that every part is visible

/** Return a figure with a bar of `parts`, each {name, size, className, text}. Parts without a name are gaps. */
export function barFigure(title, parts) {
  const whole = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  const bar = svg("svg", { class: "bar", viewBox: `0 0 ${WIDTH} 16`, preserveAspectRatio: "none", "aria-hidden": "true" });
  let start = 0;
  for (const { size, className } of parts) {
    const width = Math.max(size ? LEAST : 0, (size / whole) * WIDTH);
    bar.append(svg("rect", { class: className, x: start, y: 0, width, height: 16 }));
    start += (size / whole) * WIDTH;
  }
  const rows = parts
    .filter((part) => part.name && part.size)
    .map(({ name, className, text }) =>
      element("li", {}, swatch(className), element("span", { class: "name" }, name), ` ${text}`),
    );
  return element(
    "figure",
    { "aria-live": "off" }, // otherwise screen readers would read the figure after each answer in the log
    element("figcaption", {}, title),
    bar,
    element("ul", { class: "legend" }, ...rows),
  );
}

const swatch = (className) => svg("svg", { class: `swatch ${className}`, "aria-hidden": "true" });
