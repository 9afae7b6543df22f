// A part of the page that a button shows and hides: beside the conversation on a wide screen, over it on a phone.

const WIDE = matchMedia("(min-width: 60rem)");

/** Connect `button` to the element `drawer`. `changed` is called after each change. */
export function connect(button, drawer, changed = () => {}) {
  const show = (shown) => {
    drawer.hidden = !shown;
    button.setAttribute("aria-expanded", shown);
    changed();
  };
  button.addEventListener("click", () => show(drawer.hidden));
  drawer.querySelector(".close").addEventListener("click", () => {
    show(false);
    button.focus();
  });
  drawer.addEventListener("click", (event) => {
    if (event.target.closest("a") && !WIDE.matches) show(false); // the link leads to what the drawer covers
  });
  return show;
}

/** Whether drawers are beside the conversation. */
export const isWide = () => WIDE.matches;

/** Call `changed` when the screen becomes wide or narrow. */
export const onWidth = (changed) => WIDE.addEventListener("change", changed);
