// The end of the conversation: kept in view as an answer grows, while the reader is there.

const NEAR_PX = 100; // an answer grows while one scrolls to its end
const ROUNDED_PX = 1;

export class End {
  #mark;
  #there = false;
  #last = scrollY;

  /** The end is where `mark` stands, which moves as `column` grows. */
  constructor(column, mark) {
    this.#mark = mark;
    document.addEventListener("scroll", () => {
      // Nobody leaves by what grew, but by scrolling up: with the first step, before the end is out of sight, for to
      // follow it would end a scroll under way. A page that became shorter scrolls up by itself, to its bottom.
      const left = scrollY < this.#last && !isAtBottom();
      this.#there = !left && (this.#there || this.#isSeen());
      this.#last = scrollY;
    });
    new ResizeObserver(() => this.#there && this.go()).observe(column);
  }

  /** Takes the reader there. */
  go() {
    this.#there = true;
    this.#mark.scrollIntoView({ block: "nearest" });
    this.#last = scrollY;
  }

  #isSeen() {
    const { bottom } = this.#mark.getBoundingClientRect();
    return bottom > 0 && bottom <= innerHeight + NEAR_PX;
  }
}

function isAtBottom() {
  return scrollY + innerHeight >= document.documentElement.scrollHeight - ROUNDED_PX;
}
