// Automatic scrolling: the end of the conversation stays in view while an answer grows, if the reader is there.

const NEAR_PX = 100; // tolerance, because the answer grows while the reader scrolls to its end
const ROUNDED_PX = 1;

export class End {
  #mark;
  #there = false;
  #last = scrollY;

  /** Follow the element `mark`, which moves as `column` grows. */
  constructor(column, mark) {
    this.#mark = mark;
    document.addEventListener("scroll", () => {
      // The reader leaves the end only by scrolling up, not because the answer grew. The first upward step counts, even
      // if the end is still in view, because following the end would interrupt the scrolling. A page that becomes
      // shorter also scrolls up, but to its bottom.
      const left = scrollY < this.#last && !isAtBottom();
      this.#there = !left && (this.#there || this.#isSeen());
      this.#last = scrollY;
    });
    new ResizeObserver(() => this.#there && this.go()).observe(column);
  }

  /** Scroll to the end and stay there. */
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
