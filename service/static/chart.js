// A line chart of the last two minutes, with a table of the same numbers.

import { element, svg } from "./dom.js";
import { short } from "./format.js";

const SPAN_S = 120;
const ROWS = 10;
const WIDTH = 600;
const HEIGHT = 80;

export class Chart {
  #series;
  #unit;
  #samples = [];
  #lines;
  #picture;
  #numbers;
  #scale = element("span", { class: "scale", "aria-hidden": "true" });
  #details;
  #rows = element("tbody");

  /** Create a chart in `place`. Each of `series` is {name, className}. */
  constructor(place, series, unit = "") {
    this.#series = series;
    this.#unit = unit;
    this.#lines = series.map(({ className }) => svg("polyline", { class: className }));
    const frame = { class: "chart", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-label": "No data yet." };
    this.#picture = svg("svg", frame, ...this.#lines);
    this.#numbers = series.map(() => element("span", {}, "–"));
    const legend = series.map(({ name, className }, index) =>
      element(
        "li",
        {},
        svg("svg", { class: `swatch ${className}`, "aria-hidden": "true" }),
        element("span", { class: "name" }, name),
        " ",
        this.#numbers[index],
      ),
    );
    const heads = ["Seconds ago", ...series.map(({ name }) => name)].map((text) => element("th", { scope: "col" }, text));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.#rows);
    this.#details = element("details", {}, element("summary", {}, "As a table"), table);
    this.#details.addEventListener("toggle", () => this.#tabulate());
    place.append(
      element("ul", { class: "legend" }, ...legend),
      element("div", { class: "frame" }, this.#picture, this.#scale),
      element("div", { class: "axis", "aria-hidden": "true" }, element("span", {}, "2 min ago"), element("span", {}, "now")),
      this.#details,
    );
  }

  /** Add a sample at `at` seconds. `values` are in the order of the series. */
  push(at, values) {
    this.#samples = [...this.#samples.filter((sample) => at - sample.at <= SPAN_S), { at, values }];
    const top = Math.max(1, ...this.#samples.flatMap((sample) => sample.values));
    this.#lines.forEach((line, index) => {
      const x = (sample) => (WIDTH * (1 - (at - sample.at) / SPAN_S)).toFixed(1);
      const y = (sample) => ((HEIGHT - 2) * (1 - sample.values[index] / top) + 1).toFixed(1);
      line.setAttribute("points", this.#samples.map((sample) => `${x(sample)},${y(sample)}`).join(" "));
      this.#numbers[index].textContent = short(values[index]) + this.#unit;
    });
    this.#scale.textContent = short(top) + this.#unit;
    const now = this.#series.map(({ name }, index) => {
      const most = Math.max(...this.#samples.map((sample) => sample.values[index]));
      return `${name} ${short(values[index])}${this.#unit}, peak ${short(most)}`;
    });
    this.#picture.setAttribute("aria-label", `The last two minutes: ${now.join("; ")}.`);
    this.#tabulate();
  }

  #tabulate() {
    if (!this.#details.open || !this.#samples.length) return;
    const { at: now } = this.#samples.at(-1);
    const rows = this.#samples.slice(-ROWS).reverse();
    this.#rows.replaceChildren(
      ...rows.map(({ at, values }) =>
        element("tr", {}, ...[Math.round(now - at), ...values].map((value) => element("td", {}, short(value)))),
      ),
    );
  }
}
