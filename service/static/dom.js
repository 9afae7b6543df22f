// Functions that create elements without parsing markup, so that text is never interpreted as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an HTML element. Attributes that are false, null or undefined are omitted. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return an SVG element, as in `element`. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Return the icon `name`. */
export const icon = (name) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `static/icons.svg#${name}` }));

/** Return a button with only an icon. `name` is its accessible name. */
export function iconButton(symbol, name, action) {
  const button = element("button", { type: "button", class: "plain", "aria-label": name, title: name }, icon(symbol));
  button.addEventListener("click", action);
  return button;
}

export const byId = (id) => document.getElementById(id);

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}
