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
      const up = scrollY < this.#last; // nobody leaves by what grew since the last time, but by scrolling up
      this.#there = (!up && this.#there) || this.#isSeen(up ? ROUNDED_PX : NEAR_PX);
      this.#last = scrollY;
    });
    new ResizeObserver(() => this.#there && this.go()).observe(column);
  }

  /** Takes the reader there. */
  go() {
    this.#there = true;
    this.#mark.scrollIntoView({ block: "nearest" });
  }

  #isSeen(slack) {
    const { bottom } = this.#mark.getBoundingClientRect();
    return bottom > 0 && bottom <= innerHeight + slack;
  }
}
